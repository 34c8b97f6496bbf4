"""The model on this machine: is it there and whole, does it fit the GPUs, are its fast kernels here.

Invariant: read from the checkpoint's own files, without torch and without loading a weight. Of a hub model that is not
here yet only the hub is asked, and nothing is fetched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hiddenq.contracts.errors import ModelError, words_of
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.doctor.findings import Finding, error, gib, ok, warning
from hiddenq.model_files import check_folder, check_here, is_path, weight_files, weights_digest
from hiddenq.model_identity import hub_answers

RECURRENT = ("linear_attention", "mamba", "recurrent", "gated_delta")
"""Layer types with a recurrence, whose plain torch path is several times slower than their kernels."""
RESERVED_BYTES = 2 << 30
"""CUDA's context, kernels' workspaces, fragmentation."""
HUB_SECONDS = 10.0
INTERMEDIATE_COPIES = 24
"""Hidden-sized rows alive at once for a token: residual, attention, the widest MLP activations, gather."""


def check_named_model(
    model: str, gpu_bytes: Sequence[int], *, gpus_per_worker: int = 1, run: RunConfig | None = None
) -> Iterator[Finding]:
    """As `check_model`, for what `--model` names: a folder, or a model of the hub."""
    folder = Path(model).expanduser()
    if folder.is_dir() or is_path(model):
        yield from check_model(folder, gpu_bytes, gpus_per_worker=gpus_per_worker, run=run)
        return
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
            folder = Path(cached).parent
            yield from check_model(folder, gpu_bytes, name=model, gpus_per_worker=gpus_per_worker, run=run)
        elif not hub_answers():
            yield _not_there(model, "not in the hub's cache on this machine; the hub can't be reached from here")
        else:
            model_info(model, timeout=HUB_SECONDS)
            yield ok(f"--model {model}: the hub has it; it is fetched at the first start")
    except (HFValidationError, RepositoryNotFoundError) as refusal:
        yield _not_there(model, f"the hub says: {words_of(refusal)}")
    except Exception as fault:  # the network's, or the hub's
        yield warning(
            f"--model {model}: no such folder here, and the hub could not be asked: {words_of(fault)}",
            "whether it can be loaded is not known",
            f"hf download {model}, which says more",
        )


def _not_there(model: str, why: str) -> Finding:
    return error(
        f"--model {model}: no such folder here, and {why}",
        "the worker has nothing to load",
        "name a folder, or a hub id that this machine may read (HF_TOKEN for one that is not public)",
    )


def check_model(
    folder: Path,
    gpu_bytes: Sequence[int],
    *,
    name: str | None = None,
    gpus_per_worker: int = 1,
    run: RunConfig | None = None,
) -> Iterator[Finding]:
    """Whether the checkpoint in `folder` can be read, fits, and has its kernels; `gpu_bytes`: empty without a GPU."""
    try:
        check_here(str(folder), was_folder=True)
        check_folder(str(folder), folder)
        weights_digest(folder)
        weights = sum(file.stat().st_size for file in weight_files(folder))
        config = json.loads((folder / "config.json").read_bytes())
    except (ModelError, OSError) as missing:
        yield error(
            str(missing),
            "the worker can't load it",
            f"hf download OWNER/NAME --local-dir {folder}, or mount the folder that has it",
        )
        return
    except ValueError as broken:
        config = broken
    if not isinstance(config, dict):
        yield error(
            f"{folder / 'config.json'} is not a model's config: {words_of(config)}",
            "the worker can't read it either",
            f"copy the checkpoint again: hf download OWNER/NAME --local-dir {folder}",
        )
        return
    name = name or folder.name
    yield from check_kernels(config, on_gpu=bool(gpu_bytes))
    if not gpu_bytes:
        yield ok(f"{name} can be read: weights {gib(weights)}; whether it fits a GPU shows where there is one")
        return
    activations = _activation_bytes(run) if run else 0
    room = min(gpu_bytes) * gpus_per_worker
    need = weights + activations + RESERVED_BYTES * gpus_per_worker
    parts = f"weights {gib(weights)}, a batch {gib(activations)}" if run else f"weights {gib(weights)}"
    if weights > room:
        yield error(
            f"{name} does not fit: {parts}, the smallest GPU has {gib(room)}",
            "loading it would end in an out-of-memory error",
            "--gpus-per-worker 2 (or more) spreads it over GPUs; or a smaller or quantised checkpoint",
        )
    elif need > room:
        yield warning(
            f"{name} fits closely: {parts}, {gib(need)} of {gib(room)} in all",
            "large batches will be split, which costs time",
            "produce the run with a lower --token-budget, or use --gpus-per-worker 2",
        )
    else:
        yield ok(f"{name} fits: {parts}, {gib(need)} of {gib(room)} in all")


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
