"""Tiny models of many architectures, built from configs, and a tiny real tokenizer.

Invariant: the same call gives the same weights and the same tokenizer in every process, because everything is seeded
and nothing is downloaded; a tiny model differs from a real one in sizes only (4 layers, hidden 64, 512 ids).
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support.architectures import ARCHITECTURES, HIDDEN_SIZE, REFUSED, SIZES, VOCAB_SIZE

__all__ = ["HIDDEN_SIZE", "VOCAB_SIZE"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it writes a letter to the editor.",
    "What is the capital of France? The capital of France is Paris; it lies on the river Seine.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "Hidden states are the outputs of a decoder's layers, read before the final norm. 0123456789",
]


def tiny_config(name: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """The config of a tiny model of a type; `overrides` replace or add fields."""
    config_class = CONFIG_MAPPING[name]
    known = set(inspect.signature(config_class.__init__).parameters) | {
        field for field in dir(config_class) if not field.startswith("_")
    }
    known |= set(getattr(config_class, "__dataclass_fields__", {}))
    aliases = getattr(config_class, "attribute_map", {})
    fields = {field: value for field, value in SIZES.items() if field in known and field not in aliases}
    fields |= ARCHITECTURES.get(name, {}) | REFUSED.get(name, ("", {}))[1] | overrides
    return config_class(**{field: value for field, value in fields.items() if value is not None or field in overrides})


def build_model(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A whole causal model with seeded random weights, biases and norms included, in evaluation mode."""
    return _randomized(AutoModelForCausalLM, config, seed, dtype)


def build_base_model(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same without a head."""
    return _randomized(AutoModel, config, seed, dtype)


def _randomized(auto_class: Any, config: PreTrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith(("A_log", "dt_bias", ".D", "dt_proj.bias")):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 512 ids with a ChatML template; 0 pad, 1 start, 2 end of a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def save_tiny_model(
    folder: Path, name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Save a tiny model and the tiny tokenizer as a folder that `from_pretrained` loads."""
    model = build_model(tiny_config(name, **overrides), seed=seed, dtype=dtype)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_fp8_model(folder: Path) -> Path:
    """Save a tiny checkpoint whose matrices are quantised to fp8 in blocks of 128 x 128."""
    save_tiny_model(
        folder, hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=32
    )
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[name.replace(".weight", ".weight_scale_inv")] = scale.reshape(1, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    add_quantization(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    return folder


def add_quantization(folder: Path, fields: dict[str, Any]) -> None:
    """Say in a checkpoint's config that it is quantised."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))


def write_config(folder: Path, config: PreTrainedConfig, **fields: Any) -> Path:
    """Save a config alone, with fields replaced, as a model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | fields))
    return folder
