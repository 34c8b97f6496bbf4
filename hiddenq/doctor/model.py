"""The model on this machine's GPUs: does it fit, and are its fast kernels here.

Invariant: read from the checkpoint's own files, without torch and without loading a weight; what can't be known before
loading (a hub model that is not here yet) is left to the load.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hiddenq.contracts.errors import words_of
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.doctor.findings import Finding, error, gib, ok, warning

RECURRENT = ("linear_attention", "mamba", "recurrent", "gated_delta")
"""Layer types with a recurrence, whose plain torch path is several times slower than their kernels."""
RESERVED_BYTES = 2 << 30
"""CUDA's context, kernels' workspaces, fragmentation."""
INTERMEDIATE_COPIES = 24
"""Hidden-sized rows alive at once for a token: residual, attention, the widest MLP activations, gather."""


def check_model(
    folder: Path, gpu_bytes: Sequence[int], *, gpus_per_worker: int = 1, run: RunConfig | None = None
) -> Iterator[Finding]:
    """Whether the checkpoint in `folder` fits, and has its kernels; `gpu_bytes` is empty on a machine without GPU."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not weights:
        yield error(
            f"{folder} holds no checkpoint (config.json and *.safetensors)",
            "the worker has nothing to load",
            f"hf download OWNER/NAME --local-dir {folder}, or mount the folder that has it",
        )
        return
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as broken:
        config = broken
    if not isinstance(config, dict):
        yield error(
            f"{folder / 'config.json'} is not a model's config: {words_of(config)}",
            "the worker can't read it either",
            f"copy the checkpoint again: hf download OWNER/NAME --local-dir {folder}",
        )
        return
    yield from check_kernels(config, on_gpu=bool(gpu_bytes))
    if not gpu_bytes:
        return
    activations = _activation_bytes(run) if run else 0
    room = min(gpu_bytes) * gpus_per_worker
    need = weights + activations + RESERVED_BYTES * gpus_per_worker
    parts = f"weights {gib(weights)}, a batch {gib(activations)}" if run else f"weights {gib(weights)}"
    if weights > room:
        yield error(
            f"{folder.name} does not fit: {parts}, the smallest GPU has {gib(room)}",
            "loading it would end in an out-of-memory error",
            "--gpus-per-worker 2 (or more) spreads it over GPUs; or a smaller or quantised checkpoint",
        )
    elif need > room:
        yield warning(
            f"{folder.name} fits closely: {parts}, {gib(need)} of {gib(room)} in all",
            "large batches will be split, which costs time",
            "produce the run with a lower --token-budget, or use --gpus-per-worker 2",
        )
    else:
        yield ok(f"{folder.name} fits: {parts}, {gib(need)} of {gib(room)} in all")


def check_kernels(config: dict[str, Any], *, on_gpu: bool) -> Iterator[Finding]:
    """Whether a hybrid model's fast kernels are installed, and what Triton needs."""
    if not on_gpu:
        return
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        yield error(
            "no C compiler",
            "Triton builds a small launcher for each of its kernels",
            "sudo apt-get install gcc libc6-dev",
        )
    text_config = config.get("text_config") or config
    kinds = {str(kind) for kind in text_config.get("layer_types") or ()} | {str(config.get("model_type"))}
    if any(word in kind for kind in kinds for word in RECURRENT) and find_spec("fla") is None:
        yield warning(
            f"{config.get('model_type')} has recurrent layers, and their fast kernels are not installed",
            "it runs at half its speed or less",
            "pip install flash-linear-attention; --require-fast-kernels refuses to run without",
        )


def _activation_bytes(run: RunConfig) -> int:
    """Memory of the largest batch: what is stored of it, and what the forward pass keeps alive."""
    stored = ShardFormat.of_run(run).bytes_per_token
    item = 4 if run.model.dtype == "float32" else 2
    return run.token_budget * (stored + INTERMEDIATE_COPIES * run.model.hidden_size * item)
