"""SIGTERM and SIGINT: once drains, again ends at once.

Invariant: a signal is acted on within moments even while the main thread sits in native code, because Python's C
handler writes its number into a socket that a thread of ours reads.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

SAME_REQUEST_SECONDS = 1.0
"""A second signal within this is the same request: a Ctrl-C reaches a child by its group and by its supervisor."""


class StopSignals:
    """Calls `first(signum)` at the first signal and `again(signum)` at a later one, in a thread of its own."""

    def __init__(self, *, first: Callable[[int], None], again: Callable[[int], None]) -> None:
        self._first = first
        self._again = again
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._former: dict[int, Any] = {}
        self._former_fd = -1

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; in the main thread only."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._former[signum] = signal.signal(signum, lambda number, frame: None)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def uninstall(self) -> None:
        """Give the signals back to whom they belonged; outside the main thread it does nothing."""
        if self._former and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former_fd)
            for signum, handler in self._former.items():
                signal.signal(signum, handler)
            self._former.clear()
            self._writer.close()

    def _watch(self) -> None:
        began: float | None = None
        while number := self._reader.recv(1):
            if number[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            if began is None:
                began = time.monotonic()
                self._first(number[0])
            elif time.monotonic() - began >= SAME_REQUEST_SECONDS:
                self._again(number[0])
        self._reader.close()
