"""What the benchmark runs on: model shapes with random weights, and samples whose lengths have a long tail.

Invariant: seeded, so every part of a benchmark, and every repetition, sees the same weights and the same samples.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gpu_worker.loading import LoadedModel

SHAPES: dict[str, Any] = {
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=40960, dtype="bfloat16",
    ),
    "qwen3.6-27b": lambda: Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, vocab_size=248320,
        max_position_embeddings=262144, dtype="bfloat16",
    ),
    "qwen3.6-16-layers": lambda: Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=16, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, vocab_size=1024,
        max_position_embeddings=262144, dtype="bfloat16",
    ),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, vocab_size=151936, max_position_embeddings=40960, dtype="bfloat16",
    ),
    "qwen3.6-35b-a3b": lambda: Qwen3_5MoeTextConfig(
        hidden_size=2048, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, vocab_size=248320,
        max_position_embeddings=262144, dtype="bfloat16",
    ),
    "tiny": lambda: Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=1000, max_position_embeddings=4096, dtype="float32",
    ),
}  # fmt: skip
MIN_LENGTH, MAX_LENGTH = 16, 4096


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model folder and a data file."""

    model: Path
    data: Path
    lengths: list[int]
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        """Real tokens of all samples."""
        return sum(self.lengths)

    def rows(self) -> list[list[int]]:
        """The samples' token ids, in file order."""
        generator = np.random.default_rng(1)
        return [generator.integers(3, self.vocab_size, length).tolist() for length in self.lengths]


def make_workload(folder: Path, shape: str, *, num_samples: int, tiny: bool) -> Workload:
    """The samples, and where the model's folder will be."""
    generator = torch.Generator().manual_seed(0)
    scale, longest = (0.05, MAX_LENGTH // 16) if tiny else (1.0, MAX_LENGTH)
    lengths = torch.exp(torch.randn(num_samples, generator=generator) * 0.9 + 5.9) * scale
    return Workload(
        model=folder / "model",
        data=folder / "data.jsonl",
        lengths=lengths.clamp(MIN_LENGTH, longest).long().tolist(),
        vocab_size=SHAPES[shape]().vocab_size,
    )


def build_model(shape: str, device: str) -> Any:
    """The whole causal model with seeded random weights."""
    config = SHAPES[shape]()
    with _seeded(config, device):
        return AutoModelForCausalLM.from_config(config).eval()


def build_decoder(shape: str, device: str) -> Any:
    """The same without a head, as a worker would have loaded it."""
    config = SHAPES[shape]()
    with _seeded(config, device):
        model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    return LoadedModel(model=model, config=config, attention="sdpa", quantization=None)


def write_workload(workload: Workload, shape: str, model: Any) -> None:
    """Write the model's folder (without `model`: its config and an empty weight file) and the data file."""
    if model is not None:
        model.save_pretrained(workload.model)
    else:
        SHAPES[shape]().save_pretrained(workload.model)
        save_file({"none": torch.zeros(1)}, workload.model / "model.safetensors")
    with workload.data.open("w") as file:
        for row in workload.rows():
            file.write(json.dumps({"input_ids": row}) + "\n")


@contextlib.contextmanager
def _seeded(config: Any, device: str) -> Iterator[None]:
    """Weights made inside are the same each time, in the config's dtype, on the device."""
    torch.manual_seed(0)
    former = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, str(config.dtype).removeprefix("torch.")))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(former)
