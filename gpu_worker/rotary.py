"""Rotary scaling that remembers: made to forget before each forward pass.

Invariant: a batch's states do not depend on which batch ran before it. Transformers' dynamic scaling keeps the factors
of the longest rows so far and uses them for shorter ones, too; here each pass starts as with a model just loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def forgetting(model: nn.Module) -> Callable[[], None]:
    """What makes a model's rotary embeddings forget the lengths they saw; does nothing where none remembers."""
    remembering = [(module, prefix) for module in model.modules() for prefix in _prefixes(module)]

    def forget() -> None:
        for module, prefix in remembering:
            factors = getattr(module, f"{prefix}inv_freq")
            original = getattr(module, f"{prefix}original_inv_freq").to(factors.device)
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    return forget


def _prefixes(module: Any) -> list[str]:
    """Prefixes of the buffers that dynamic scaling changes: one for each kind of layers with factors of its own."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return [f"{layers}_" for layers, name in kind.items() if "dynamic" in str(name)]
    return [""] if "dynamic" in str(kind) else []
