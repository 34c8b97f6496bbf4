"""From a checkpoint to its language decoder: only that, all of it, and in the numbers the run asked for.

Invariant: every weight of the decoder came from the checkpoint's safetensors files, never from a pickle (Transformers
fills gaps with random numbers and says so only in its loading info, which is always asked for); layers are counted and
layer ids checked on a model without weights before any weight is read; a quantised checkpoint runs as it is, or
dequantised because someone said so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from gpu_worker.decoder import count_layers
from gpu_worker.experts import num_used_parameters
from gpu_worker.extraction import check_layers
from gpu_worker.kernels import attentions_for
from hiddenq.contracts.errors import ModelError
from hiddenq.model_identity import weight_files

WRAPPED_DECODER = r"^(model\.)?(language_model|text_model)\.(model\.)?"
"""Prefix of the decoder's weights in a wrapper's checkpoint."""
_WEIGHT_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A decoder without head, with its weights, in evaluation mode."""

    model: nn.Module
    config: Any
    """The decoder's own config (of the text part of a wrapper)."""
    attention: str
    quantization: str | None
    """None, `fp8 (native)`, `mxfp4 (dequantized)`, …"""

    @property
    def num_parameters(self) -> int:
        """Parameters that take part in a token's matrix products."""
        return num_used_parameters(self.model, self.config)


def load_decoder(
    path: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: str = "cpu",
    attention: str = "auto",
    target_layer_ids: tuple[int, ...] = (),
    trust_remote_code: bool = False,
    dequantize: bool = False,
    num_gpus: int = 1,
) -> LoadedModel:
    """Load the language decoder of a checkpoint.

    Raises:
        ModelError: no such model, a kind that is not supported, a layer id that does not exist, a decoder weight that
            the checkpoint lacks, or a quantisation that can't run here as asked.
    """
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not Path(path).is_dir():
        common["revision"] = revision
    config, text_config = _read_config(path, common)
    method = _quantization_method(config)
    attention, shell = _build_shell(path, text_config, attention, common)
    check_layers(target_layer_ids, count_layers(shell))
    if Path(path).is_dir():
        weight_files(Path(path))
    arguments: dict[str, Any] = common | {
        "config": text_config,
        "dtype": dtype,
        "use_safetensors": True,
        "attn_implementation": attention,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are in the loading info, and refused below
        "device_map": _device_map(device, num_gpus),
    }
    if num_gpus > 1:
        arguments["max_memory"] = _only_gpus(device, num_gpus)
    if text_config is not config:
        arguments["key_mapping"] = {WRAPPED_DECODER: ""}
    if method is not None and dequantize:
        arguments["quantization_config"] = _dequantizing(config, method)
    model, info = _from_pretrained(path, arguments, method)
    _refuse_gaps(path, model, info)
    return LoadedModel(
        model=model.eval(),
        config=text_config,
        attention=str(getattr(model.config, "_attn_implementation", attention)),
        quantization=_quantization_found(model, method, dequantize),
    )


def _read_config(path: str, common: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoConfig

    if path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        raise ModelError(f"--model {path}: no such folder on this host")
    try:
        config = AutoConfig.from_pretrained(path, **common)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"--model {path}: {_first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"--model {path}: {config.model_type} is an encoder-decoder; hiddenq reads causal decoders")
    try:
        return config, config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(f"--model {path}: {_first_line(error)}") from error


def _build_shell(path: str, config: Any, asked: str, common: dict[str, Any]) -> tuple[str, nn.Module]:
    """A model without weights, with the best attention that it takes."""
    from transformers import MODEL_MAPPING, AutoModel

    if type(config) not in MODEL_MAPPING and "AutoModel" not in (getattr(config, "auto_map", None) or {}):
        raise ModelError(
            f"--model {path}: Transformers {transformers.__version__} has no {config.model_type} without a head "
            "(AutoModel does not know it); not supported"
        )
    refusal: Exception | None = None
    for attention in attentions_for(config, asked):
        try:
            with torch.device("meta"):
                shell: nn.Module = AutoModel.from_config(
                    config, attn_implementation=attention, trust_remote_code=common["trust_remote_code"]
                )
            return attention, shell
        except (ValueError, ImportError) as error:
            refusal = refusal or error
    raise ModelError(f"--model {path}: {_first_line(refusal)}") from refusal


def _device_map(device: str, num_gpus: int) -> Any:
    return "balanced" if num_gpus > 1 else {"": device}


def _only_gpus(device: str, num_gpus: int) -> dict[int, int]:
    """Memory for `device_map`: what is free on the worker's GPUs, nothing on the others, a tenth left for states."""
    first = int(device.partition(":")[2])
    if first + num_gpus > torch.cuda.device_count():
        raise ModelError(f"--gpus-per-worker {num_gpus}: from {device} on there are fewer GPUs")
    return {
        index: int(torch.cuda.mem_get_info(index)[0] * 0.9) if first <= index < first + num_gpus else 0
        for index in range(torch.cuda.device_count())
    }


def _from_pretrained(path: str, arguments: dict[str, Any], method: str | None) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModel

    try:
        model, info = AutoModel.from_pretrained(path, **arguments)
    except ImportError as error:
        raise ModelError(f"--model {path}: {method or 'the model'} needs a package: {_first_line(error)}") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"--model {path}: does not fit into GPU memory: {_first_line(error)}; "
            "--gpus-per-worker N spreads it over several GPUs"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"--model {path}: {_first_line(error)}") from error
    return model, info


def _refuse_gaps(path: str, model: nn.Module, info: dict[str, Any]) -> None:
    missing = sorted(map(str, info.get("missing_keys", ())))
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        kind, names = ("lacks", missing) if missing else ("has another shape for", mismatched)
        shown = ", ".join(names[:_WEIGHT_NAMES_SHOWN]) + (" …" if len(names) > _WEIGHT_NAMES_SHOWN else "")
        raise ModelError(
            f"--model {path}: the checkpoint {kind} {len(names)} of the decoder's {len(list(model.parameters()))} "
            f"weights: {shown}"
        )
    if info.get("error_msgs"):
        raise ModelError(f"--model {path}: {_first_line(info['error_msgs'][0])}")


def _quantization_method(config: Any) -> str | None:
    fields = _quantization_fields(config)
    if not fields:
        return None
    method = fields.get("quant_method", "unknown")
    return str(getattr(method, "value", method))


def _quantization_fields(config: Any) -> dict[str, Any]:
    """The quantisation section of a checkpoint's config, or of its text part; empty if it is not quantised."""
    for part in (config, config.get_text_config(decoder=True)):
        quantization = getattr(part, "quantization_config", None)
        if quantization is not None:
            return dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
    return {}


def _dequantizing(config: Any, method: str) -> Any:
    """The checkpoint's quantisation with the order to undo it while loading."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        quantization = AutoQuantizationConfig.from_dict(_quantization_fields(config) | {"dequantize": True})
    except (ValueError, ImportError, TypeError) as error:
        raise ModelError(f"quantised checkpoint ({method}): {_first_line(error)}") from error
    if not hasattr(quantization, "dequantize"):
        raise ModelError(f"--dequantize: Transformers can't dequantise {method} while loading")
    return quantization


def _quantization_found(model: Any, method: str | None, dequantize: bool) -> str | None:
    """What the weights are now; a silent dequantisation is refused.

    Raises:
        ModelError: the checkpoint was dequantised because kernels or a capability are missing here.
    """
    if method is None:
        return None
    quantizer = getattr(model, "hf_quantizer", None)
    settings = getattr(quantizer, "quantization_config", None)
    native = quantizer is not None and not getattr(settings, "dequantize", False)
    if not native and not dequantize:
        raise ModelError(
            f"this checkpoint is quantised ({method}) and can't run so here (kernels or GPU capability are missing); "
            "use a machine that can, or --dequantize to run it in the run's dtype (more memory, other numbers)"
        )
    return f"{method} ({'native' if native else 'dequantized'})"


def _first_line(error: object) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    if "trust_remote_code" in text:
        return "it brings Python code of its own, which is not run unless you give --trust-remote-code"
    return text[:300]
