"""A bound on the bytes that several threads hold at the same time.

Invariant: the bytes taken are never more than the limit, but for a single taker that alone is larger: nobody waits
for what can't come.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ByteBudget:
    """Bytes that may be held, shared by threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Hold so many bytes; waits until they are free."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken_bytes or self._taken_bytes + num_bytes <= self._limit_bytes)
            self._taken_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken_bytes -= num_bytes
                self._changed.notify_all()
