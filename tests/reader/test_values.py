"""Stored words read as torch reads them, for every word there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiddenq.reader.checks.values import WORDS, as_float32, odd_vectors

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


@pytest.mark.parametrize("dtype", list(TORCH))
def test_every_word_has_torchs_value_and_is_finite_when_torch_says_so(dtype: str) -> None:
    bits = 8 * np.dtype(WORDS[dtype]).itemsize
    words = np.arange(2**bits, dtype=np.uint64).astype(WORDS[dtype])
    wanted = torch.from_numpy(words.copy()).view(TORCH[dtype]).float().numpy()
    assert np.array_equal(as_float32(words, dtype), wanted, equal_nan=True)
    not_finite, zero = odd_vectors(words[:, None], dtype)
    assert np.array_equal(not_finite, ~np.isfinite(wanted))
    assert np.array_equal(zero, wanted == 0)


def test_float32_is_finite_when_numpy_says_so() -> None:
    wanted = np.array([0.0, -0.0, 1.0, -3.4e38, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    not_finite, zero = odd_vectors(wanted.view("<u4")[:, None], "F32")
    assert np.array_equal(not_finite, ~np.isfinite(wanted))
    assert np.array_equal(zero, wanted == 0)
