"""Attention and the fast kernels of hybrids: which are used here, and what they must not do to us.

Invariant: which kernels run is decided once, before the first batch, logged and written into every shard; a model that
has a fast path and does not get it is known by then. Rows are padded on the right and never packed, so nothing in
Transformers may look for packed samples: that would cost a wait for the GPU each pass, and would take the clamped
positions of padding for a new sample.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SUPPORT = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
_FLA_CHUNK_MODULES = ("fla.ops.gated_delta_rule.chunk", "fla.ops.kda.chunk", "fla.ops.gla.chunk")


def attentions_for(config: Any, asked: str) -> list[str]:
    """Attention implementations to try for a model of a config, best first; `asked` is one of them, or `auto`."""
    from transformers import MODEL_MAPPING
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    available = []
    if is_flash_attn_2_available():
        available.append("flash_attention_2")
    if is_flash_attn_3_available():
        available.append("flash_attention_3")
    model_class = MODEL_MAPPING.get(type(config), None)
    if model_class is None:  # code that the checkpoint brings along: ask it
        return [asked] if asked != "auto" else ["sdpa", "eager"]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    return choose_attention(model_class, asked, on_gpu=torch.cuda.is_available(), available=available)


def choose_attention(model_class: Any, asked: str, *, on_gpu: bool, available: Sequence[str]) -> list[str]:
    """Attention implementations to try, best first, for a model class that says what it supports.

    `available` are the optional packages that are installed: `flash_attention_2`, `flash_attention_3`.
    """
    if asked != "auto":
        return [asked]
    order = ["sdpa", *(name for name in ("flash_attention_3", "flash_attention_2") if on_gpu and name in available)]
    return [name for name in order if getattr(model_class, _SUPPORT[name], False)] + ["eager"]


def never_packed() -> None:
    """Tell Transformers' mask code that no row holds two samples."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    masking.find_packed_sequence_indices = _no_packed_samples


def _no_packed_samples(position_ids: Tensor) -> None:
    return None


def install_fast_kernels(model: nn.Module) -> dict[str, str]:
    """Put fla's Triton convolution where the CUDA one is missing, and keep fla from tuning itself anew per batch size.

    Returns what each replaceable function of the model's own modules runs now: `torch` is the slow path.
    """
    found: dict[str, str] = {}
    convolution = _fla_convolution()
    for module, name, function in _replaceable(model):
        nonlocals = inspect.getclosurevars(function).nonlocals
        implementation = nonlocals["implementation"] if nonlocals["is_new_implementation"] else None
        if implementation is None and name == "causal_conv1d_fn" and convolution is not None:
            setattr(module, name, convolution)
            found[name] = "fla.modules.causal_conv1d"
        elif implementation is None:
            found[name] = "torch"
        else:
            found[name] = str(implementation.__module__)
    if any(package.startswith("fla.") for package in found.values()):
        _tune_once()
    return found


def are_fast(functions: dict[str, str]) -> bool | None:
    """Whether whole sequences take fast kernels only; None for a model without such functions."""
    whole = [package for name, package in functions.items() if not _is_single_step(name)]
    return all(package != "torch" for package in whole) if whole else None


def recurrences(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """The fast functions in use: module, name, function. A compiler must leave them alone."""
    for module in _modules_of(model):
        for name, value in list(vars(module).items()):
            if callable(value) and (hasattr(value, "_hiddenq_fast") or _is_replaceable(value)):
                yield module, name, value


def _is_single_step(name: str) -> bool:
    return "update" in name or "recurrent" in name or "step" in name


def _modules_of(model: nn.Module) -> list[Any]:
    """The Python modules that define the model's classes."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules and ".models." in name]


def _replaceable(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    for module in _modules_of(model):
        for name, value in list(vars(module).items()):
            if _is_replaceable(value):
                yield module, value.__name__ if hasattr(value, "__name__") else name, value


def _is_replaceable(value: Any) -> bool:
    """Whether Transformers chose between a package's function and torch for it."""
    if not inspect.isfunction(value) or not hasattr(value, "__wrapped__"):
        return False
    return {"implementation", "is_new_implementation"} <= inspect.getclosurevars(value).nonlocals.keys()


def _fla_convolution() -> Callable[..., Tensor] | None:
    """fla's causal convolution, called as Transformers calls the CUDA one: states [B, D, S], weight [D, W]."""
    if not torch.cuda.is_available():
        return None
    try:
        from fla.modules.convolution import causal_conv1d
    except ImportError:
        try:
            from fla.modules.causal_conv1d import causal_conv1d
        except ImportError:
            return None

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        output, _state = causal_conv1d(hidden_states.transpose(1, 2), weight=weight, bias=bias, activation=activation)
        states: Tensor = output.transpose(1, 2)
        return states

    convolve._hiddenq_fast = True  # type: ignore[attr-defined]
    return convolve


def _tune_once() -> None:
    """fla's chunk-local sums and l2 norms are tuned per batch size and per token count; make both see one size."""
    for name in _FLA_CHUNK_MODULES:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "chunk_local_cumsum"):
            module.chunk_local_cumsum = one_row_cumsum(module.chunk_local_cumsum)
        if hasattr(module, "l2norm_fwd"):
            module.l2norm_fwd = l2norm


def one_row_cumsum(cumsum: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A chunk-local sum over [B, S, …] made by one row [1, B*S', …]: chunks never span rows if S' is whole chunks."""

    def flat(g: Tensor, chunk_size: int, *arguments: Any, **named: Any) -> Tensor:
        rows, tokens = g.shape[:2]
        if rows == 1 or named.get("cu_seqlens") is not None:
            return cumsum(g, chunk_size, *arguments, **named)
        padding = -tokens % chunk_size
        if padding:
            g = functional.pad(g, (0, 0) * (g.dim() - 2) + (0, padding))
        summed = cumsum(g.reshape(1, rows * (tokens + padding), *g.shape[2:]), chunk_size, *arguments, **named)
        return summed.view(rows, tokens + padding, *g.shape[2:])[:, :tokens].contiguous()

    return flat


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """fla's `l2norm_fwd` over the last axis, x / sqrt(sum(x²) + eps), by one kernel that needs no tuning."""
    from gpu_worker.gather_triton import l2norm_cuda

    return l2norm_cuda(x, eps, output_dtype)
