"""From a checkpoint to its language decoder: only that, all of it, and in the numbers the run asked for.

Invariant: every weight of the decoder came from the checkpoint's safetensors files, never from a pickle (Transformers
fills gaps with random numbers and says so only in its loading info, which is always asked for); layers are counted and
layer ids checked on a model without weights before any weight is read; a quantised checkpoint runs as it is, or
dequantised because someone said so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from gpu_worker import quantization
from gpu_worker.decoder import count_layers
from gpu_worker.experts import num_used_parameters
from gpu_worker.extraction import check_layers
from gpu_worker.kernels import attentions_for
from hiddenq.contracts.errors import ModelError, words_of
from hiddenq.dequantized import cast_rest
from hiddenq.model_files import check_folder, check_here, place_of, weight_files

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
    path = place_of(path)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not Path(path).is_dir():
        common["revision"] = revision
    config, text_config = _read_config(path, common)
    method = quantization.method_of(config)
    attention, shell = _build_shell(path, text_config, attention, common)
    check_layers(target_layer_ids, count_layers(shell))
    if Path(path).is_dir():
        weight_files(Path(path))
    if method is not None and not dequantize:
        quantization.check_runs_here(path, config, method, _device_map(device, num_gpus))
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
        arguments["quantization_config"] = quantization.dequantizing(config, method)
    model, info = _from_pretrained(path, arguments, method)
    _refuse_gaps(path, model, info)
    if method is not None and dequantize:
        cast_rest(model, dtype)
    return LoadedModel(
        model=model.eval(),
        config=text_config,
        attention=str(getattr(model.config, "_attn_implementation", attention)),
        quantization=quantization.found(model, method, dequantize=dequantize),
    )


def _read_config(path: str, common: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoConfig

    check_here(path)
    if Path(path).is_dir():
        check_folder(path, Path(path))
    try:
        config = AutoConfig.from_pretrained(path, **common)
    except Exception as error:  # of whatever kind: this config can't be used
        raise ModelError(f"--model {path}: {_said(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"--model {path}: {config.model_type} is an encoder-decoder; hiddenq reads causal decoders")
    try:
        return config, config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(f"--model {path}: {_said(error)}") from error


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
        except Exception as error:  # no memory and no device is used: it is the config
            raise ModelError(
                f"--model {path}: no model can be built of its config: {type(error).__name__}: {_said(error)}"
            ) from error
    raise ModelError(f"--model {path}: {_said(refusal)}") from refusal


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
        raise ModelError(f"--model {path}: {method or 'the model'} needs a package: {_said(error)}") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"--model {path}: does not fit into GPU memory: {_said(error)}; "
            "--gpus-per-worker N spreads it over several GPUs"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"--model {path}: {_said(error)}") from error
    except RuntimeError as error:
        if not (names := _unconverted(error)):
            raise
        raise ModelError(
            f"--model {path}: the checkpoint's parts of {_names(names)} do not fit together; one is missing or of "
            "another shape"
        ) from error
    return model, info


def _refuse_gaps(path: str, model: nn.Module, info: dict[str, Any]) -> None:
    missing = sorted(map(str, info.get("missing_keys", ())))
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        kind, names = ("lacks", missing) if missing else ("has another shape for", mismatched)
        raise ModelError(
            f"--model {path}: the checkpoint {kind} {len(names)} of the decoder's {len(list(model.parameters()))} "
            f"weights: {_names(names)}"
        )
    if info.get("error_msgs"):
        raise ModelError(f"--model {path}: {_said(info['error_msgs'][0])}")


def _names(names: list[str]) -> str:
    return ", ".join(names[:_WEIGHT_NAMES_SHOWN]) + (" …" if len(names) > _WEIGHT_NAMES_SHOWN else "")


def _unconverted(error: BaseException) -> list[str]:
    """Weights that Transformers could not put together from the checkpoint's; it names them only in what it logs."""
    step = error.__traceback__
    while step is not None:
        names = getattr(step.tb_frame.f_locals.get("loading_info"), "conversion_errors", None)
        if names:
            return sorted(map(str, names))
        step = step.tb_next
    return []


def _said(error: object) -> str:
    if "trust_remote_code" in str(error):
        return "it brings Python code of its own, which is not run unless you give --trust-remote-code"
    return words_of(error)
