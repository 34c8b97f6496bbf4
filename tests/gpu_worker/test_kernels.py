"""Which kernels run is known at the start, and nothing looks for packed samples where there are none."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker import WorkerSettings, kernels
from gpu_worker.startup import _check_fast_kernels
from hiddenq.contracts.errors import ModelError
from tests.gpu_worker.conftest import tiny_decoder

_CAPTURE: dict[str, Any] = {"capture_output": True, "text": True, "check": True}


def test_clamped_positions_are_not_taken_for_packed_samples() -> None:
    from transformers import masking_utils

    kernels.never_packed()
    create = masking_utils.create_causal_mask
    cache = "cache" if "cache" in inspect.signature(create).parameters else "past_key_values"
    arguments: dict[str, Any] = {
        "config": tiny_decoder("llama").model.config,
        "inputs_embeds": torch.zeros(2, 6, 64),
        "attention_mask": None,
        "position_ids": torch.tensor([[0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]]),
        cache: None,
    }
    assert create(**arguments) is None  # so the causal kernel runs, without a mask


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "mamba2", "jamba", "lfm2", "nemotron_h"])
def test_a_hybrid_without_its_fast_kernels_is_reported_and_refused_when_asked(name: str) -> None:
    functions = kernels.install_fast_kernels(tiny_decoder(name).model)
    assert set(functions.values()) == {"torch"}
    assert _check_fast_kernels(functions, required=False) is False
    with pytest.raises(ModelError, match=r"--require-fast-kernels: fast kernels are missing for .*causal_conv1d_fn"):
        _check_fast_kernels(functions, required=True)


def test_a_dense_model_has_no_fast_kernels_to_miss() -> None:
    assert _check_fast_kernels(kernels.install_fast_kernels(tiny_decoder("llama").model), required=True) is None


def test_kernels_of_single_steps_do_not_count() -> None:
    assert kernels.are_fast({"causal_conv1d_fn": "fla.modules.causal_conv1d", "causal_conv1d_update": "torch"})


@pytest.mark.parametrize("tokens", [64, 150, 1, 128])
def test_a_chunk_local_sum_by_one_row_equals_the_batched_one(tokens: int) -> None:
    def batched(g: Tensor, chunk_size: int, *, scale: float) -> Tensor:
        assert g.dim() == 3
        padding = -g.shape[1] % chunk_size
        chunks = functional.pad(g, (0, 0, 0, padding)).view(g.shape[0], -1, chunk_size, g.shape[2])
        return (chunks.cumsum(2) * scale).view(g.shape[0], -1, g.shape[2])[:, : g.shape[1]]

    shapes: list[int] = []

    def watched(g: Tensor, chunk_size: int, *, scale: float) -> Tensor:
        shapes.append(g.shape[0])
        return batched(g, chunk_size, scale=scale)

    g = torch.randn(3, tokens, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kernels.one_row_cumsum(watched)(g, 64, scale=2.0), batched(g, 64, scale=2.0))
    assert shapes == [1]


def test_allocator_and_caches_are_set_before_torch_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    WorkerSettings(spool=tmp_path, cache=tmp_path / "cache").set_environment()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    done = subprocess.run([sys.executable, "-c", "import gpu_worker, sys; print('torch' in sys.modules)"], **_CAPTURE)
    assert done.stdout == "False\n"
