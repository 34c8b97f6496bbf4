"""A limit on bytes a second that all uploaders of a host keep together.

Invariant: over any time t no more than `rate * t` bytes plus one block leave the host, because each block books its
time on one shared line (a number in a locked file, on the host's monotonic clock) before it is sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from pathlib import Path

BLOCK_BYTES = 256 << 10
_IDLE_SECONDS = 0.05
"""Unused time is not saved up beyond this."""


class BandwidthLimit:
    """Waits before bytes are sent; `path` is the file that processes share, None for this process alone."""

    def __init__(self, bytes_per_second: int | None, path: Path | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self._path = path
        self._lock = threading.Lock()
        self._booked_until = 0.0

    def take(self, num_bytes: int) -> None:
        """Return when these bytes may be sent."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            begin = self._book(num_bytes / self.bytes_per_second)
        time.sleep(max(0.0, begin - time.monotonic()))

    def _book(self, seconds: float) -> float:
        """Book time on the line; returns when it begins."""
        if self._path is None:
            begin = max(self._booked_until, time.monotonic() - _IDLE_SECONDS)
            self._booked_until = begin + seconds
            return begin
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            now, booked = time.monotonic(), 0.0
            with contextlib.suppress(struct.error):
                (booked,) = struct.unpack("<d", os.pread(descriptor, 8, 0))
            if not booked <= now + 3600:  # nonsense, or written before the host was restarted: its clock began anew
                booked = 0.0
            begin = max(booked, now - _IDLE_SECONDS)
            os.pwrite(descriptor, struct.pack("<d", begin + seconds), 0)
            return begin
        finally:
            os.close(descriptor)


class LimitedBody:
    """A request's body, read block by block under a limit.

    `read` gives up to 256 KiB at a time even where less is asked for: HTTP clients ask for 16 KiB, and a socket's
    timeout counts for each block, so a slow line is no fault as long as it moves.
    """

    def __init__(self, data: memoryview, limit: BandwidthLimit) -> None:
        self._data = data
        self._limit = limit
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else self._position + max(size, BLOCK_BYTES)
        block = bytes(self._data[self._position : end])
        self._limit.take(len(block))
        self._position += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position
