"""What is compiled, and what is left alone.

Invariant: compiled code sits inside a layer's `forward`, so the layers' hooks stay outside of it and see what they see
in eager mode; and it is compiled for dynamic shapes, once, at warm-up. Recurrences are kernels that tune themselves:
the compiler calls them, it does not look into them. Experts that run in a loop over what the router chose stay eager.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.decoder import Decoder
from gpu_worker.experts import experts_of, is_grouped
from gpu_worker.kernels import recurrences

RECOMPILE_LIMIT = 64


def compile_decoder(decoder: Decoder) -> str:
    """Compile each layer's forward where that is known to pay; returns what was done, for the log and the shards."""
    if not all(is_grouped(experts) for layer in decoder.layers for experts in experts_of(layer)):
        return "eager (experts)"
    _dynamo_limits()
    disable: Any = torch.compiler.disable
    kernels = list(recurrences(decoder.model))
    for module, name, function in kernels:
        setattr(module, name, disable(function))
    for layer in decoder.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    return "layers, recurrence left alone" if kernels else "layers"


def undo(decoder: Decoder) -> None:
    """Go back to eager layers."""
    for layer in decoder.layers:
        layer.__dict__.pop("forward", None)


def _dynamo_limits() -> None:
    config: Any = torch._dynamo.config
    config.recompile_limit = RECOMPILE_LIMIT
    config.accumulated_recompile_limit = 16 * RECOMPILE_LIMIT
