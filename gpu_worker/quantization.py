"""Quantised checkpoints: whether one can run here as it is, known before its weights are read.

Invariant: a quantised checkpoint runs as it is, or dequantised because someone said so. Transformers dequantises in
silence where kernels or a capability are missing, and skips a method that it does not know; its quantiser is asked
beforehand, and what was loaded is looked at again.
"""

from __future__ import annotations

from typing import Any

import transformers

from hiddenq.contracts.errors import ModelError, words_of

_VERSION = transformers.__version__


def method_of(config: Any) -> str | None:
    """How a checkpoint is quantised, by its config; None if it is not."""
    fields = _fields(config)
    if not fields:
        return None
    method = fields.get("quant_method", "unknown")
    return str(getattr(method, "value", method))


def check_runs_here(path: str, config: Any, method: str, device_map: Any) -> None:
    """Refuse a checkpoint that can't run quantised on this host.

    Raises:
        ModelError: the method is unknown, a package or a capability is missing, or it would be dequantised in silence.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        if not AutoHfQuantizer.supports_quant_method(_fields(config)):
            raise ModelError(f"--model {path}: quantised by {method}, which Transformers {_VERSION} does not know")
        quantizer = AutoHfQuantizer.from_config(_fields(config), pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except ImportError as error:
        raise ModelError(f"--model {path}: {method} needs a package: {words_of(error)}") from error
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"--model {path}: quantised by {method}, which can't run here: {words_of(error)}") from error
    _refuse_silence(method, quantizer)


def dequantizing(config: Any, method: str) -> Any:
    """The checkpoint's quantisation with the order to undo it while loading.

    Raises:
        ModelError: Transformers can't undo this one.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        quantization = AutoQuantizationConfig.from_dict(_fields(config) | {"dequantize": True})
    except (ValueError, ImportError, TypeError) as error:
        raise ModelError(f"quantised checkpoint ({method}): {words_of(error)}") from error
    if not hasattr(quantization, "dequantize"):
        raise ModelError(f"--dequantize: Transformers can't dequantise {method} while loading")
    return quantization


def found(model: Any, method: str | None, *, dequantize: bool) -> str | None:
    """What a loaded model's weights are: None, `fp8 (native)`, `mxfp4 (dequantized)`, …

    Raises:
        ModelError: the checkpoint was dequantised, and nobody asked for it.
    """
    if method is None:
        return None
    quantizer = getattr(model, "hf_quantizer", None)
    if not dequantize:
        _refuse_silence(method, quantizer)
    return f"{method} ({'native' if _is_native(quantizer) else 'dequantized'})"


def _is_native(quantizer: Any) -> bool:
    settings = getattr(quantizer, "quantization_config", None)
    return quantizer is not None and not getattr(settings, "dequantize", False)


def _refuse_silence(method: str, quantizer: Any) -> None:
    if not _is_native(quantizer):
        raise ModelError(
            f"this checkpoint is quantised ({method}) and can't run so here (kernels or GPU capability are missing); "
            "use a machine that can, or --dequantize to run it in the run's dtype (more memory, other numbers)"
        )


def _fields(config: Any) -> dict[str, Any]:
    """The quantisation section of a checkpoint's config, or of its text part; empty if it is not quantised."""
    for part in (config, config.get_text_config(decoder=True)):
        quantization = getattr(part, "quantization_config", None)
        if quantization is not None:
            return dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
    return {}
