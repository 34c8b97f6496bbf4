"""Runs whose store refuses this uploader, or stays away: why, and when each is tried again.

Invariant: one run's store never stops another run's shards. A shard of a run that waits is handed back uncharged until
the run's time has come (`hiddenq.delivery.refusals` says when).
"""

from __future__ import annotations

import contextlib
import threading

from hiddenq.contracts.errors import RedisAway
from hiddenq.delivery.refusals import Refusals
from uploader.runs import Runs
from uploader.status import UploaderStatus


class WaitingRuns:
    """Who waits, and for how long; told to `status`. Safe to use from several threads."""

    def __init__(self, runs: Runs, status: UploaderStatus) -> None:
        self._runs = runs
        self._status = status
        self._refusals = Refusals()
        self._telling = threading.Lock()

    def seconds_left(self, run: str) -> float:
        """Until the run is to be tried; 0 if it may be tried now."""
        return self._refusals.seconds_left(run)

    def refused(self, run: str, error: Exception) -> float:
        """The run could not be served; returns how long it waits. Refusals that overlap count as one."""
        seconds = self._refusals.refused(run, error)
        self._tell()
        return seconds

    def served(self, run: str) -> None:
        """The run could be served."""
        if self._refusals.served(run):
            self._tell()

    def forget_ended(self) -> None:
        """Runs that are over wait for nothing."""
        if self._refusals.reasons():
            self._refusals.keep(self._runs.live())
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
        with self._telling:  # so that the newest is told last
            self._status.runs_wait(self._refusals.reasons())
