"""Samples on disk between tokenising and writing: memory holds eight bytes a sample, whatever its length.

Invariant: a sample's place is the number of samples kept before it, so places follow the order of the rows; and what
is read back at a place is what was appended there.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hiddenq.contracts.errors import UsageError
from producer.batching import Keys, make_keys
from producer.encoder import EncodedBlock

_ENTRY = np.dtype([("offset", "<i8"), ("sample_id", "<i8")])


class Sample(NamedTuple):
    """One sample read back."""

    sample_id: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


class Lengths:
    """Keys of samples in the order of the rows: all that a plan needs."""

    def __init__(self) -> None:
        self._keys = array("Q")
        self.num_tokens = 0
        self.num_supervised = 0

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, block: EncodedBlock) -> None:
        """Add a block's samples."""
        lengths = np.array([len(ids) for ids in block.input_ids], np.int64)
        self._keys.frombytes(make_keys(lengths, len(self)).tobytes())
        self.num_tokens += int(lengths.sum())
        self.num_supervised += sum(int(mask.sum()) for mask in block.loss_mask)

    def keys(self) -> Keys:
        """The keys, without a copy: sorting them in place is meant, and ends appending."""
        return np.frombuffer(self._keys, np.uint64)


class Spill:
    """Samples' ids and masks in a file, with a table of where each begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples = (folder / "samples.bin").open("w+b", buffering=1 << 20)
        self._table = (folder / "table.bin").open("w+b", buffering=1 << 20)
        self._offset = 0

    def append(self, block: EncodedBlock) -> None:
        """Add a block's samples.

        Raises:
            UsageError: no room is left.
        """
        entries = np.empty(len(block.sample_ids), _ENTRY)
        try:
            for number, (ids, mask) in enumerate(zip(block.input_ids, block.loss_mask, strict=True)):
                entries[number] = (self._offset, block.sample_ids[number])
                self._samples.write(ids.tobytes())
                self._samples.write(mask.tobytes())
                self._offset += ids.nbytes + mask.nbytes
            self._table.write(entries.tobytes())
        except OSError as error:
            raise UsageError(
                f"no room for tokens in {self._folder.parent}: {error.strerror}; name a roomier folder in TMPDIR"
            ) from error

    def flush(self) -> None:
        """Make everything appended readable."""
        self._samples.flush()
        self._table.flush()

    def read(self, place: int, num_tokens: int) -> Sample:
        """The sample at a place."""
        entry = np.frombuffer(os.pread(self._table.fileno(), _ENTRY.itemsize, place * _ENTRY.itemsize), _ENTRY)[0]
        data = os.pread(self._samples.fileno(), num_tokens * 5, int(entry["offset"]))
        return Sample(
            sample_id=int(entry["sample_id"]),
            input_ids=np.frombuffer(data, np.int32, num_tokens),
            loss_mask=np.frombuffer(data, np.uint8, num_tokens, offset=num_tokens * 4),
        )

    def close(self) -> None:
        """Close the files; the folder is the caller's."""
        self._samples.close()
        self._table.close()
