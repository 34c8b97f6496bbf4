"""Runs whose store refuses this worker although it let it in before: why, and when each is tried again.

Invariant: what a store refuses in mid-run (permissions or credentials that someone changed, and may change back) costs
no batch an attempt and ends no worker; the wait grows with each refusal, and a run that was served waits no more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 2.0, 60.0
"""Between two tries of a run, with jitter."""


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    seconds: float
    until: float
    reason: str


class Refusals:
    """Who waits, and for how long; written by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_run: dict[str, _Refusal] = {}

    def refused(self, run: str, error: Exception) -> None:
        """The store said no. Refusals that come while the run waits count as one."""
        now, last = self._clock(), self._by_run.get(run)
        if last is None or now >= last.until:
            seconds = min(2 * last.seconds, LONGEST_WAIT_SECONDS) if last else FIRST_WAIT_SECONDS
            until = now + seconds * random.uniform(0.5, 1.0)
            self._by_run[run] = _Refusal(seconds=seconds, until=until, reason=str(error))

    def served(self, run: str) -> None:
        """The store let this worker read."""
        self._by_run.pop(run, None)

    def seconds_left(self, run: str) -> float:
        """Until the run is to be tried; 0 if it may be tried now."""
        refusal = self._by_run.get(run)
        return max(0.0, refusal.until - self._clock()) if refusal else 0.0

    def all_wait(self, runs: Collection[str]) -> bool:
        """Whether none of these runs is to be tried now."""
        return all(self.seconds_left(run) for run in runs)

    def reason(self, runs: Collection[str]) -> str:
        """Why none of these runs can be served; "" if one of them can."""
        refusals = [self._by_run.get(run) for run in runs]
        return next((refusal.reason for refusal in refusals if refusal), "") if all(refusals) else ""
