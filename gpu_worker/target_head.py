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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import cached_file

from gpu_worker.head_probe import describe_head, take_layers_out
from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import ModelError, words_of
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import METADATA_KEY, SAFETENSORS_DTYPES
from hiddenq.model_files import check_here, place_of
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
    head = head.model_copy(update={"checksum": head.checksum_of(map(_described, sorted(tensors.items())))})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, names.TARGET_HEAD)
        save_file(tensors, path, metadata={METADATA_KEY: head.to_json()})
        store.put_file(names.TARGET_HEAD, path, checksum=crc.of_file(path), num_bytes=path.stat().st_size)
    return True


def _described(item: tuple[str, Tensor]) -> tuple[str, str, tuple[int, ...], list[memoryview]]:
    name, tensor = item
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return name, SAFETENSORS_DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), [data]


def load_head(name: str, revision: str | None) -> nn.Module:
    """A causal model in float32 without its layers, the rest with the checkpoint's weights.

    Raises:
        ModelError: there is no such model, or a tensor is missing, of another shape, or quantised.
    """
    check_here(name)
    name = place_of(name)
    try:
        model = _without_weights(AutoConfig.from_pretrained(name, revision=revision))
    except (OSError, ValueError) as error:
        raise ModelError(f"--target-head: {name} can't be loaded: {words_of(error)}") from error
    take_layers_out(model)
    model.tie_weights()
    wrappers = re.compile(rf"^(?:(?:{'|'.join({*_WRAPPERS, model.base_model_prefix})})\.)*")
    language = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    wanted = {id(parameter) for module in language for parameter in module.parameters()}
    parameters = [(key, parameter) for key, parameter in model.named_parameters() if id(parameter) in wanted]
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


def _without_weights(config: Any) -> Any:
    """A causal model of a config (of a wrapper's text part, if that stands alone), its weights on the meta device."""
    text = config.get_text_config()
    auto, chosen = (AutoModelForCausalLM, text)
    if type(text) not in AutoModelForCausalLM._model_mapping:
        auto, chosen = AutoModelForImageTextToText, config
    with init_empty_weights(include_buffers=False):
        return auto.from_config(chosen, dtype=torch.float32)


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
    weight_map = json.loads(Path(index).read_bytes())["weight_map"]
    outside = {file for key, file in weight_map.items() if not re.search(r"\.\d+\.", key)}
    for file in sorted(outside):
        if (path := cached_file(name, file, **missing)) is None:
            raise ModelError(f"--target-head: {name}: {file} is missing")
        yield path
