"""Write `target_head.safetensors`: embedding, final norm and lm_head of the target, and how they are used.

Invariant: only the tensors concerned are read, and a tensor that should be there and is not, or is quantised, is an
error: what is written is the checkpoint's, in the dtype the run computes in, described by `head_probe`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from gpu_worker.head_probe import describe_head, take_layers_out
from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import ModelError
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import METADATA_KEY
from hiddenq.storage import ObjectStore

_WRAPPERS = ("model", "language_model", "text_model", "transformer")
"""Prefixes that checkpoints and models put before a tensor's name, or not."""


def write_target_head(store: ObjectStore, config: RunConfig) -> bool:
    """Write the target's head into a run's location; False if it is there already.

    Raises:
        ModelError: the model can't be found, its tensors are missing or quantised, or its head is of an unknown kind.
    """
    if store.stat(names.TARGET_HEAD) is not None:
        return False
    head, tensors = describe_head(load_head(config.model.model, config.model.revision), config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, names.TARGET_HEAD)
        save_file(tensors, path, metadata={METADATA_KEY: head.to_json()})
        store.put_file(names.TARGET_HEAD, path, checksum=crc.of_file(path), num_bytes=path.stat().st_size)
    return True


def load_head(name: str, revision: str | None) -> nn.Module:
    """A causal model in float32 without its layers, the rest with the checkpoint's weights.

    Raises:
        ModelError: there is no such model, or a tensor is missing, of another shape, or quantised.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(getattr(config, "text_config", config), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"--target-head: {name} can't be loaded: {str(error).splitlines()[0]}") from error
    take_layers_out(model)
    model.tie_weights()
    wrappers = re.compile(rf"^(?:(?:{'|'.join({*_WRAPPERS, model.base_model_prefix})})\.)*")
    parameters = list(model.named_parameters())
    found = _read_tensors(name, revision, {wrappers.sub("", key) for key, _ in parameters}, wrappers)
    for key, parameter in parameters:
        tensor = found.get(wrappers.sub("", key))
        if tensor is None or tensor.shape != parameter.shape or tensor.dtype.itemsize < 2:
            seen = "none" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
            raise ModelError(
                f"--target-head: {name}: {key}: expected {list(parameter.shape)} of a float dtype, found {seen}"
            )
        owner, _, leaf = key.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.float(), requires_grad=False))
    model.tie_weights()
    network: nn.Module = model.eval()
    return network


def _read_tensors(name: str, revision: str | None, wanted: set[str], wrappers: re.Pattern[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in _weight_files(name, revision):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (the file is no mapping)
                if (bare := wrappers.sub("", key)) in wanted:
                    found[bare] = file.get_tensor(key)
    return found


def _weight_files(name: str, revision: str | None) -> Iterator[str]:
    """The safetensors files of a checkpoint that may hold what lies outside the layers."""
    missing = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(name, "model.safetensors.index.json", **missing)
    if index is None:
        single = cached_file(name, "model.safetensors", **missing)
        if single is None:
            raise ModelError(f"--target-head: {name}: no model.safetensors; save the checkpoint as safetensors")
        yield single
        return
    weight_map = json.loads(Path(index).read_text())["weight_map"]
    outside = {file for key, file in weight_map.items() if not re.search(r"\.\d+\.", key)}
    for file in sorted(outside):
        if (path := cached_file(name, file, **missing)) is None:
            raise ModelError(f"--target-head: {name}: {file} is missing")
        yield path
