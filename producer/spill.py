"""Samples on disk between tokenising and writing: memory holds none of them.

Invariant: a sample's place is the number of samples kept before it, so places follow the order of the rows; and what
is read back at a place is what was appended there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hiddenq.contracts.errors import UsageError
from producer.samples import EncodedBlock

_ENTRY = np.dtype([("first_token", "<i8"), ("sample_id", "<i8")])


class Sample(NamedTuple):
    """One sample read back."""

    sample_id: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


@contextlib.contextmanager
def needing_room(folder: Path) -> Iterator[None]:
    """Say in one line that a scratch folder is full.

    Raises:
        UsageError: what is written inside did not fit.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"no room for tokens in {folder.parent}: {error.strerror}; name a roomier folder in TMPDIR"
        ) from error


class Spill:
    """Samples' ids and masks in files, with a table of where each begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ids, self._masks, self._table = (
            (folder / name).open("w+b", buffering=1 << 20) for name in ("ids.bin", "masks.bin", "table.bin")
        )
        self._num_tokens = 0

    def append(self, block: EncodedBlock) -> None:
        """Add a block's samples.

        Raises:
            UsageError: no room is left.
        """
        entries = np.empty(len(block.sample_ids), _ENTRY)
        entries["first_token"] = self._num_tokens + np.cumsum(block.lengths) - block.lengths
        entries["sample_id"] = block.sample_ids
        self._num_tokens += len(block.input_ids)
        with needing_room(self._folder):
            self._ids.write(block.input_ids.tobytes())
            self._masks.write(block.loss_mask.tobytes())
            self._table.write(entries.tobytes())

    def flush(self) -> None:
        """Make everything appended readable.

        Raises:
            UsageError: no room is left.
        """
        with needing_room(self._folder):
            for file in (self._ids, self._masks, self._table):
                file.flush()

    def read(self, place: int, num_tokens: int) -> Sample:
        """The sample at a place."""
        entry = np.frombuffer(os.pread(self._table.fileno(), _ENTRY.itemsize, place * _ENTRY.itemsize), _ENTRY)[0]
        first = int(entry["first_token"])
        return Sample(
            sample_id=int(entry["sample_id"]),
            input_ids=np.frombuffer(os.pread(self._ids.fileno(), num_tokens * 4, first * 4), np.int32),
            loss_mask=np.frombuffer(os.pread(self._masks.fileno(), num_tokens, first), np.uint8),
        )

    def close(self) -> None:
        """Close the files; the folder is the caller's."""
        for file in (self._ids, self._masks, self._table):
            with contextlib.suppress(OSError):  # what could not be written is of no use any more
                file.close()
