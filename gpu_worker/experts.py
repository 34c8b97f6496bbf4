"""Mixtures of experts: which modules hold the experts, how they run, and what of their weights a token uses.

Invariant: experts are found by what Transformers names them (`experts`, or a class named so that holds stacked
weights); a mixture that is not known to run as grouped products is one that runs in a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

GROUPED = "grouped_mm"
"""Transformers' name for one product over all experts; the other ways wait for the router's choice, or copy weights."""
_STACKED_AXES = 3
_NUM_CHOSEN = ("num_experts_per_tok", "moe_topk")


def experts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside that hold experts."""
    for name, part in module.named_modules():
        stacked = any(weight.dim() == _STACKED_AXES for weight in part.parameters(recurse=False))
        if name.rpartition(".")[2] == "experts" or (stacked and "expert" in type(part).__name__.lower()):
            yield part


def implementation_of(experts: nn.Module) -> str:
    """How Transformers runs these experts: `grouped_mm`, `eager`, …"""
    switchable = hasattr(experts, "is_transposed")  # set by Transformers on those that it can run in several ways
    found = getattr(getattr(experts, "config", None), "_experts_implementation", None) if switchable else None
    return str(found or "eager")


def is_grouped(experts: nn.Module) -> bool:
    """Whether they run as grouped products, without a wait for the router: only bfloat16 does when compiled."""
    dtypes = {weight.dtype for weight in experts.parameters()}
    return implementation_of(experts) == GROUPED and dtypes == {torch.bfloat16}


def implementations(model: nn.Module) -> dict[str, str]:
    """How the model's experts run, for the log and the shards; empty for a model without any."""
    found = sorted({implementation_of(experts) for experts in experts_of(model)})
    return {"experts": ", ".join(found)} if found else {}


def num_used_parameters(model: nn.Module, config: Any) -> int:
    """Parameters that take part in a token's matrix products: two axes or more, less embeddings and idle experts."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    matrices = {id(matrix): matrix for matrix in model.parameters() if matrix.dim() > 1}
    total = sum(matrix.numel() for key, matrix in matrices.items() if key not in embeddings)
    chosen: int | None = next((getattr(config, name) for name in _NUM_CHOSEN if hasattr(config, name)), None)
    if chosen is None:
        return total
    for experts in experts_of(model):
        for matrix in (weight for weight in experts.parameters() if id(weight) in matrices):
            num_experts = len(experts) if isinstance(experts, nn.ModuleList) else len(matrix)
            total -= matrix.numel() * max(0, num_experts - chosen) // num_experts
    return total
