"""What a target model is, as far as it decides the states: read from its folder or hub cache, without torch.

Invariant: the digests come from the files' own bytes (the parsed `config.json`, a sample of the weights), never from
what some version of transformers makes of them, so producer and workers agree on a model whatever they have installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from hiddenq.contracts.errors import ModelError, UsageError, words_of
from hiddenq.contracts.run import Dtype, ModelIdentity
from hiddenq.model_files import check_folder, check_here, place_of, weights_digest

AskedDtype = Literal["auto", "bfloat16", "float16", "float32"]

_NOT_DECISIVE = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "architectures")
"""Config keys that leave the states as they are: the dtype stands in `ModelIdentity` itself."""
_REACH_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class TargetModel:
    """A model's identity beside its configuration."""

    identity: ModelIdentity
    config: Any
    """The whole transformers config."""
    text_config: Any
    """The decoder's config: a part of `config` in models that wrap one, else `config` itself."""
    local_only: bool
    """Whether files come from disk alone: a folder, or a hub that can't be reached."""


def identify_model(
    model: str,
    *,
    revision: str | None = None,
    dtype: AskedDtype = "auto",
    trust_remote_code: bool = False,
    dequantize: bool = False,
) -> TargetModel:
    """Read a model's configuration and make out its identity.

    Raises:
        ModelError: no such model, no config or weights in it, or a kind that has no decoder of its own.
        UsageError: `dequantize` for a checkpoint that is not quantised.
    """
    if "://" in model:
        raise ModelError("--model: expected a folder or a hub id, found a URL")  # not shown: it may hold a password
    folder = Path(model).expanduser()
    is_folder = folder.is_dir()
    if is_folder:
        check_folder(model, folder)
    if folder.is_file():
        raise ModelError(f"--model {model}: a file; name the folder of a transformers checkpoint")
    check_here(model)
    local_only = is_folder or not hub_answers()
    from transformers import AutoConfig, PreTrainedConfig

    source: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        raw, _ = PreTrainedConfig.get_config_dict(place_of(model), **source)
        commit = raw.pop("_commit_hash", None)
        config = AutoConfig.from_pretrained(place_of(model), trust_remote_code=trust_remote_code, **source)
    except Exception as error:  # every kind of failure in here has one cause: this model can't be used
        raise ModelError(f"--model {model}: {_why(error, is_folder, local_only)}") from error
    text_config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"--model {model}: {config.model_type} is an encoder-decoder; hiddenq reads decoders only")
    quantization = _quantization(config, text_config)
    if dequantize and quantization is None:
        raise UsageError(f"--dequantize: has no effect, {model} is not quantised; leave it out")
    identity = ModelIdentity(
        model=model,
        revision=None if is_folder else commit,
        config_digest=_digest(json.dumps(_decisive(raw), sort_keys=True).encode()),
        weights_digest=weights_digest(folder) if is_folder else str(commit),
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=_size(model, text_config, "num_layers" if _counts_twice(text_config) else "num_hidden_layers"),
        hidden_size=_size(model, text_config, "hidden_size"),
        vocab_size=_size(model, text_config, "vocab_size"),
        max_positions=_max_positions(text_config),
        dtype=_resolve_dtype(dtype, config, text_config),
        quantization=quantization,
        dequantized=dequantize,
    )
    return TargetModel(identity=identity, config=config, text_config=text_config, local_only=local_only)


def block_torch() -> None:
    """Keep torch out of this process: transformers would import it, if it is there, for seconds and 300 MB.

    For processes that only read configs and tokenizers, before they import transformers; does nothing in one that has
    torch already.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # documented: an import of it raises ImportError
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # which would warn that there is no torch


def rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a decoder, one mapping for each kind of its layers; empty if it has none."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters or "rope_theta" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def _max_positions(text_config: Any) -> int | None:
    positions = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    for rope in rope_parameters(text_config):
        if rope.get("rope_type") in ("dynamic", "linear", "yarn"):
            original = rope.get("original_max_position_embeddings") or positions
            positions = max(positions, int(original * float(rope.get("factor") or 1.0)))
    return positions


def _counts_twice(text_config: Any) -> bool:
    """longcat_flash has two attention blocks in each element of its layer list, and counts blocks."""
    return bool(text_config.model_type == "longcat_flash")


def _size(model: str, config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"--model {model}: its config ({config.model_type}) has no {name}; not a decoder of text?")
    return value


def _resolve_dtype(asked: AskedDtype, config: Any, text_config: Any) -> Dtype:
    if asked != "auto":
        return asked
    stored = getattr(text_config, "dtype", None) or getattr(config, "dtype", None)
    name = str(stored).removeprefix("torch.")
    for dtype in get_args(Dtype):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    return "bfloat16"


def _quantization(config: Any, text_config: Any) -> str | None:
    found = getattr(config, "quantization_config", None) or getattr(text_config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def _decisive(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {name: _decisive(value) for name, value in raw.items() if name not in _NOT_DECISIVE}
    return raw


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hub_answers() -> bool:
    """Whether the hub can be reached, found out in seconds where its client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=_REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _why(error: Exception, is_folder: bool, local_only: bool) -> str:
    if is_folder:
        return f"its config.json can't be used: {words_of(error)}"
    if local_only:
        return "no such folder, and not in the hub's cache on this machine; the hub can't be reached from here"
    return f"not a folder here, and the hub says: {words_of(error)}"
