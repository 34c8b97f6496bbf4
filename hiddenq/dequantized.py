"""A model whose quantised checkpoint was dequantised while loading: its weights in one dtype.

Invariant: afterwards the model runs in the dtype that was asked for, whatever the Transformers that loaded it: before
5.23 they leave what was not quantised (embeddings, norms) as it lies in the file. What a model keeps in float32 stays.
"""

from __future__ import annotations

import torch
from torch import nn

_KEPT_IN_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def cast_rest(model: nn.Module, dtype: torch.dtype) -> None:
    """Put a dequantised model's weights into one dtype, as loading does with one that was never quantised."""
    kept = {name for field in _KEPT_IN_FP32 for name in getattr(model, field, None) or ()}
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not kept & set(name.split(".")):
            weight.data = weight.data.to(dtype)
