"""What fits on the device: batches are split when memory runs out, and the limit found is remembered.

Invariant: rows are only ever run in other groups, never left out or run twice into different places; a length whose
limit was found once is not tried above it again, so memory runs out once a length and not once a batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

from hiddenq.contracts.errors import TransientError, words_of

OutOfMemory = torch.OutOfMemoryError


class RowLimits:
    """The most rows that fit, by padded length, as far as it was found."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._tokens: list[int] = []

    def most_rows(self, padded_length: int) -> int | None:
        """Rows of that length to run at once at most; None: no limit found. Shorter rows' limits hold by tokens."""
        known = self._tokens[: bisect.bisect_right(self._lengths, padded_length)]
        return max(1, min(known) // padded_length) if known else None

    def learn(self, padded_length: int, num_rows: int) -> None:
        """So many rows of that length are the most from now on."""
        place = bisect.bisect_left(self._lengths, padded_length)
        tokens = num_rows * padded_length
        if place < len(self._lengths) and self._lengths[place] == padded_length:
            self._tokens[place] = min(self._tokens[place], tokens)
        else:
            self._lengths.insert(place, padded_length)
            self._tokens.insert(place, tokens)


def run_in_parts(
    run: Callable[[int, int], None],
    *,
    num_rows: int,
    padded_length: int,
    limits: RowLimits,
    release: Callable[[], None],
) -> int:
    """Run rows 0 to `num_rows` in as few groups as fit: `run(first, last)` for each. Returns how often it was split.

    Raises:
        TransientError: one row alone does not fit.
    """
    first, splits = 0, 0
    while first < num_rows:
        last = min(num_rows, first + (limits.most_rows(padded_length) or num_rows))
        try:
            run(first, last)
        except OutOfMemory as error:
            if last - first == 1:
                said = words_of(str(error).partition("\n")[0])  # advice on the allocator follows
                raise TransientError(
                    f"out of memory with one row of {padded_length} tokens: {said}; lower --max-length, or give the "
                    "worker more memory (--gpus-per-worker)"
                ) from error
            splits += 1
            limits.learn(padded_length, (last - first + 1) // 2)
        else:
            first = last
            continue
        release()  # outside of `except`: the error's traceback holds the tensors that did not fit
    return splits
