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

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
NUM_LAYERS = 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": 4, "n_inner": 96, "d_model": HIDDEN_SIZE,
    "n_layers": NUM_LAYERS, "n_heads": 4, "num_layers": NUM_LAYERS, "ffn_dim": 96, "ffn_hidden_size": 96,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "top_k_experts": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_dt_rank": 4, "mamba_chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "state_size": 16, "num_heads": 8, "chunk_size": 16, "n_groups": 1, "expand": 2,
    "time_step_rank": 4, "attention_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Tiny values for the names that configs use; a config takes those that it knows."""

_WINDOW = {"sliding_window": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # dense
    "apertus": {}, "arcee": {}, "biogpt": {}, "bitnet": {}, "bloom": {}, "codegen": {"rotary_dim": 8}, "cohere": {},
    "cohere2": _WINDOW, "cwm": _WINDOW, "diffllama": {}, "doge": {}, "ernie4_5": {}, "exaone": {},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 4}, "falcon": {"head_dim": None}, "gemma": {},
    "gemma2": _WINDOW, "gemma3_text": _WINDOW, "glm": {}, "glm4": {}, "gpt2": {}, "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gpt_neox": {}, "gpt_neox_japanese": {}, "gptj": {"rotary_dim": 8}, "granite": {}, "helium": {},
    "hunyuan_v1_dense": {}, "jais2": {}, "llama": {}, "minicpm3": {}, "ministral": _WINDOW, "ministral3": {},
    "mistral": _WINDOW, "mpt": {}, "nanochat": {}, "nemotron": {}, "olmo": {}, "olmo2": {}, "olmo3": _WINDOW,
    "opt": {"word_embed_proj_dim": HIDDEN_SIZE}, "persimmon": {}, "phi": {}, "phi3": {}, "qwen2": {}, "qwen3": {},
    "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {}, "vaultgemma": _WINDOW, "xglm": {},
    # experts
    "aria_text": {}, "deepseek_v2": {}, "deepseek_v3": {}, "dots1": {}, "ernie4_5_moe": {"moe_k": 2},
    "flex_olmo": {}, "glm4_moe": {}, "glm4_moe_lite": {}, "gpt_oss": _WINDOW, "granitemoe": {},
    "granitemoeshared": {}, "hunyuan_v1_moe": {}, "jetmoe": {},
    "llama4_text": {"attention_chunk_size": 16}, "longcat_flash": {"head_dim": 8}, "mimo_v2_flash": _WINDOW,
    "minimax": {}, "minimax_m2": {}, "mixtral": {}, "olmoe": {}, "phimoe": {}, "qwen2_moe": {},
    "qwen3_moe": {"num_experts": 4}, "solar_open": {},
    # hybrids and state spaces
    "bamba": {}, "falcon_h1": {"mamba_d_ssm": 128}, "falcon_mamba": {}, "granitemoehybrid": {}, "jamba": {},
    "lfm2": {}, "mamba": {}, "mamba2": {}, "nemotron_h": {}, "olmo_hybrid": {}, "qwen3_5_moe_text": {},
    "qwen3_5_text": {}, "qwen3_next": {}, "recurrent_gemma": {},
}  # fmt: skip
"""Model types whose states hiddenq stores, with what their configs need beyond `SIZES`."""

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
    fields |= ARCHITECTURES.get(name, {}) | overrides
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
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    save_tiny_model(folder, **sizes, num_key_value_heads=4)
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
