"""Stored values as numpy sees them, without torch: what is not finite, what is zero, how large vectors are.

Invariant: the checks stay in integers (a float without its sign orders like its bits), so one pass over the words
decides, and no value is rounded on the way.

Shape legend: S tokens, K target layers, H hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WORDS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F8_E4M3": "u1", "I64": "<i8"}
"""The integer that holds a value, by safetensors dtype."""
_BITS = {
    "BF16": (0x7FFF, 0x7F80),
    "F16": (0x7FFF, 0x7C00),
    "F32": (0x7FFFFFFF, 0x7F800000),
    "F8_E4M3": (0x7F, 0x7F),
}
"""All bits but the sign, and the smallest word without sign that is not finite."""


def odd_vectors(words: npt.NDArray[Any], dtype: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(not finite, all zero) for each vector along the last axis."""
    magnitude, not_finite = _BITS[dtype]
    peaks = (words & magnitude).max(axis=-1)
    return peaks >= not_finite, peaks == 0


def as_float32(words: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Stored words as float32 values."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return np.take(_FP8_VALUES, words)
    return words.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)


def log_norms(arrays: dict[str, npt.NDArray[Any]], dtypes: dict[str, str]) -> npt.NDArray[np.float32]:
    """Mean over a sample's tokens of the log2 of its vectors' norms: each target layer, then the final state."""
    means = []
    for name in ("hidden_states", "final_hidden_state"):
        if name not in arrays:
            continue
        floats = as_float32(arrays[name], dtypes[name])
        if name == "hidden_states" and "hidden_states_scale" in arrays:
            floats = floats * as_float32(arrays["hidden_states_scale"], "F32")
        squares = np.einsum("...h,...h->...", floats, floats)
        with np.errstate(invalid="ignore"):
            means.append(np.atleast_1d(0.5 * np.log2(np.maximum(squares, 1e-30)).mean(axis=0)))
    return np.concatenate(means).astype(np.float32) if means else np.zeros(0, np.float32)


def _fp8_values() -> npt.NDArray[np.float32]:
    """Every value of e4m3fn: sign, 4 exponent bits (bias 7), 3 mantissa bits, NaN at 0x7F."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_FP8_VALUES = _fp8_values()
