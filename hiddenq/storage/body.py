"""What a request sends: a part of a file in memory, given out block by block under a limit.

Invariant: the bytes that are sent are the very ones whose checksum was announced, because both come from one buffer;
so a checksum that the store finds wrong was damaged on the way, and the file is innocent.

`read` gives 256 KiB at a time even where less is asked for: HTTP clients ask for 16 KiB. A socket's timeout counts for
each block, so a slow line is no fault as long as it moves.
"""

from __future__ import annotations

import os
import threading
from typing import Self

from hiddenq.contracts.errors import DamagedShard
from hiddenq.storage.bandwidth import BandwidthLimit

BLOCK_BYTES = 256 << 10


class Body:
    """Bytes in memory, as an HTTP client reads them."""

    def __init__(self, data: bytes | memoryview, limit: BandwidthLimit) -> None:
        self._data = memoryview(data)
        self._limit = limit
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def rewind(self) -> Self:
        """Itself, to be sent from its beginning."""
        self._position = 0
        return self

    def read(self, size: int = -1) -> memoryview:
        """The next block."""
        end = len(self._data) if size < 0 else self._position + max(size, BLOCK_BYTES)
        block = self._data[self._position : end]
        self._position += len(block)
        self._limit.take(len(block))
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position


class PartBuffer(threading.local):
    """A buffer of each thread, kept from part to part: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, source: int, name: str, begin: int, size: int) -> memoryview:
        """Exactly `size` bytes of a file from `begin` on; they last until this thread's next read.

        Raises:
            DamagedShard: the file ends before.
        """
        if len(self._data) < size:
            self._data = bytearray(size)
        data = memoryview(self._data)[:size]
        position = 0
        while position < size:
            num_read = os.preadv(source, [data[position:]], begin + position)
            if num_read == 0:
                raise DamagedShard(f"{name}: cut: expected {begin + size} bytes or more, found {begin + position}")
            position += num_read
        return data
