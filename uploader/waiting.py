"""Runs whose store refuses this uploader, or stays away: why, and when each is tried again.

Invariant: one run's store never stops another run's shards. A shard of a run that waits is handed back uncharged until
the run's time has come; the wait grows with each refusal, and a run that was served waits no more.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass

from hiddenq.contracts.errors import RedisAway
from uploader.runs import Runs
from uploader.status import UploaderStatus

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 2.0, 60.0
"""Between two tries of a run, with jitter."""


@dataclass(frozen=True, kw_only=True)
class _Wait:
    seconds: float
    until: float
    reason: str


class WaitingRuns:
    """Who waits, and for how long; told to `status`. Safe to use from several threads."""

    def __init__(self, runs: Runs, status: UploaderStatus) -> None:
        self._runs = runs
        self._status = status
        self._waits: dict[str, _Wait] = {}
        self._lock = threading.Lock()

    def seconds_left(self, run: str) -> float:
        """Until the run is to be tried; 0 if it may be tried now."""
        with self._lock:
            wait = self._waits.get(run)
            return max(0.0, wait.until - time.monotonic()) if wait else 0.0

    def refused(self, run: str, error: Exception) -> float:
        """The run could not be served; returns how long it waits. Refusals that overlap count as one."""
        with self._lock:
            now, wait = time.monotonic(), self._waits.get(run)
            if wait is None or now >= wait.until:
                seconds = min(2 * wait.seconds, LONGEST_WAIT_SECONDS) if wait else FIRST_WAIT_SECONDS
                wait = _Wait(seconds=seconds, until=now + seconds * random.uniform(0.5, 1.0), reason=str(error))
                self._waits[run] = wait
                self._tell()
            return wait.until - now

    def served(self, run: str) -> None:
        """The run could be served."""
        with self._lock:
            if self._waits.pop(run, None):
                self._tell()

    def forget_ended(self) -> None:
        """Runs that are over wait for nothing."""
        if self._waits:
            live = self._runs.live()
            with self._lock:
                self._waits = {run: wait for run, wait in self._waits.items() if run in live}
                self._tell()

    def is_alone(self, run: str) -> bool:
        """Whether no other run is going on; False while Redis can't say."""
        with contextlib.suppress(RedisAway):
            return not self._runs.live() - {run}
        return False

    def is_all_there_is(self, run: str) -> bool:
        """Whether a run that is refused never worked here, and no other run could."""
        with contextlib.suppress(RedisAway):
            opened = self._runs.opened().get(run)
            has_worked = opened is not None and opened.ledger.totals().num_batches > 0
            return not has_worked and self.is_alone(run)
        return False

    def _tell(self) -> None:
        self._status.runs_wait({run: wait.reason for run, wait in self._waits.items()})
