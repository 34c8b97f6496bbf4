"""Failures in a row: when a worker should stop taking batches.

Invariant: one batch that succeeds ends the row; errors that are nobody's fault here (Redis, store or spool away, a
message that is not of the run) neither lengthen nor end it. So one bad batch never stops a worker, and a bad GPU never
eats a queue.
"""

from __future__ import annotations

import threading

from hiddenq.contracts.errors import BadMessage, LeaseLost, RedisAway, SpoolAway, StoreAway


class DeviceLost(Exception):
    """The device can do nothing more for this process: end it, its leases return the work."""


class FailureStreak:
    """Counts failed executions since the last one that succeeded; safe from any thread."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._lock = threading.Lock()
        self._in_a_row = 0
        self.last_error = ""

    def failed(self, error: BaseException) -> None:
        """An execution failed."""
        if isinstance(error, RedisAway | StoreAway | SpoolAway | LeaseLost | BadMessage):
            return
        with self._lock:
            self._in_a_row += 1
            self.last_error = f"{type(error).__name__}: {error}"[:300]

    def succeeded(self) -> None:
        """An execution succeeded."""
        with self._lock:
            self._in_a_row = 0

    @property
    def is_sick(self) -> bool:
        """Whether so many executions failed in a row that this worker should take no more."""
        return self._in_a_row >= self._max_failures

    def __str__(self) -> str:
        return f"{self._in_a_row} batches failed in a row; last: {self.last_error}"
