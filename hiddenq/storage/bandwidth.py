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

from hiddenq.storage.files import open_shared

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
        with open_shared(self._path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            now, booked = time.monotonic(), 0.0
            with contextlib.suppress(struct.error):
                (booked,) = struct.unpack("<d", os.pread(descriptor, 8, 0))
            if not booked <= now + 3600:  # nonsense, or written before the host was restarted: its clock began anew
                booked = 0.0
            begin = max(booked, now - _IDLE_SECONDS)
            os.pwrite(descriptor, struct.pack("<d", begin + seconds), 0)
            return begin
