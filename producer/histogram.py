"""How long samples are: counts by length.

Invariant: every sample is counted once, in memory that follows from the longest length and not from their number.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hiddenq.contracts.base import Frozen

_NUM_BINS = 16


class LengthBin(Frozen):
    """Samples of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    num_samples: int


class LengthCounts:
    """Samples by their length in tokens."""

    def __init__(self, max_length: int) -> None:
        self._counts = np.zeros(max_length + 1, np.int64)

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Count some samples."""
        np.add.at(self._counts, lengths, 1)

    @property
    def median(self) -> int:
        """The length that half of the samples do not exceed; 0 without samples."""
        places = np.cumsum(self._counts)
        return int(np.searchsorted(places, places[-1] // 2, side="right")) if places[-1] else 0

    @property
    def longest(self) -> int:
        """The greatest length; 0 without samples."""
        return int(max(np.flatnonzero(self._counts), default=0))

    def bins(self) -> Iterable[LengthBin]:
        """A histogram in bins of equal width on a logarithmic scale, empty ends left out."""
        found = np.flatnonzero(self._counts)
        if not len(found):
            return
        edges = np.unique(np.rint(np.geomspace(found[0], found[-1] + 1, _NUM_BINS + 1)).astype(np.int64))
        below = np.concatenate([[0], np.cumsum(self._counts)])
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield LengthBin(shortest=begin, longest=end - 1, num_samples=int(below[end] - below[begin]))
