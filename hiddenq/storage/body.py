"""Bodies of requests: read block by block under a limit, and checked as they leave.

Invariant: the last block of a file's part is given out only if all that was given out has the checksum that the part
was announced with, so a file that changes between the announcement and the sending is found out here, and a checksum
that the store finds wrong after all was damaged on the way.

`read` gives up to 256 KiB at a time even where less is asked for: HTTP clients ask for 16 KiB. A socket's timeout
counts for each block, so a slow line is no fault as long as it moves; and no part is ever held in memory.
"""

from __future__ import annotations

import os
from typing import Self

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import DamagedShard
from hiddenq.storage.bandwidth import BandwidthLimit

BLOCK_BYTES = 256 << 10
_CHECK_BYTES = 1 << 20


class Body:
    """What an HTTP client reads a request's body from; `_block` gives the bytes."""

    def __init__(self, num_bytes: int, limit: BandwidthLimit) -> None:
        self.num_bytes = num_bytes
        self._limit = limit
        self._position = 0

    def __len__(self) -> int:
        return self.num_bytes

    def rewind(self) -> Self:
        """Itself, to be sent from its beginning."""
        self.seek(0)
        return self

    def read(self, size: int = -1) -> memoryview:
        """The next block; it is overwritten by the one after it."""
        size = self.num_bytes if size < 0 else max(size, BLOCK_BYTES)
        block = self._block(self._position, min(size, self.num_bytes - self._position))
        self._position += len(block)
        self._limit.take(len(block))
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.num_bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def _block(self, begin: int, size: int) -> memoryview:
        raise NotImplementedError


class MemoryBody(Body):
    """Bytes in memory."""

    def __init__(self, data: bytes, limit: BandwidthLimit) -> None:
        super().__init__(len(data), limit)
        self._data = memoryview(data)

    def _block(self, begin: int, size: int) -> memoryview:
        return self._data[begin : begin + size]


class FileBody(Body):
    """Bytes `begin` to `begin + num_bytes` of an open file.

    Raises:
        DamagedShard: the file ends before (here, or while it is read), or changes while it is sent.
    """

    def __init__(self, descriptor: int, name: str, begin: int, num_bytes: int, limit: BandwidthLimit) -> None:
        super().__init__(num_bytes, limit)
        self._descriptor = descriptor
        self._name = name
        self._begin = begin
        self._buffer = memoryview(bytearray(min(num_bytes, _CHECK_BYTES)))
        self._sent = crc.Crc64Nvme()
        self.checksum = self._read_checksum()

    def seek(self, offset: int, whence: int = 0) -> int:
        if super().seek(offset, whence) == 0:
            self._sent = crc.Crc64Nvme()
        return self._position

    def _read_checksum(self) -> str:
        found, position = crc.Crc64Nvme(), 0
        while position < self.num_bytes:
            block = self._read(position, self.num_bytes - position)
            found.update(block)
            position += len(block)
        return found.value

    def _block(self, begin: int, size: int) -> memoryview:
        if size == 0:
            return self._buffer[:0]
        block = self._read(begin, size)
        self._sent.update(block)
        if begin + len(block) == self.num_bytes and self._sent.value != self.checksum:
            raise DamagedShard(f"{self._name}: changed while it was sent")
        return block

    def _read(self, begin: int, size: int) -> memoryview:
        target = self._buffer[: min(size, len(self._buffer))]
        num_read = os.preadv(self._descriptor, [target], self._begin + begin)
        if num_read == 0:
            expected = self._begin + self.num_bytes
            raise DamagedShard(f"{self._name}: cut: expected {expected} bytes or more, found {self._begin + begin}")
        return target[:num_read]
