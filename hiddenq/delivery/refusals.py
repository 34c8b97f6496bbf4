"""Runs whose store refuses a process that serves several, or stays away: why, and when each is tried again.

Invariant: the wait grows with each refusal, refusals that come while a run waits count as one, and a run that was
served waits no more. Nothing is charged here: whoever is told to wait hands its claims back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 2.0, 60.0
"""Between two tries of a run, with jitter."""

_random = random.SystemRandom()
"""Not Python's own generator, which a process that trains has seeded."""


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    seconds: float
    until: float
    reason: str


class Refusals:
    """Which runs wait, and for how long. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_run: dict[str, _Refusal] = {}
        self._lock = threading.Lock()

    def refused(self, run: str, error: Exception) -> float:
        """The run could not be served; returns how long it waits."""
        with self._lock:
            now, last = self._clock(), self._by_run.get(run)
            if last is not None and now < last.until:
                return last.until - now
            seconds = min(2 * last.seconds, LONGEST_WAIT_SECONDS) if last else FIRST_WAIT_SECONDS
            until = now + seconds * _random.uniform(0.5, 1.0)
            self._by_run[run] = _Refusal(seconds=seconds, until=until, reason=str(error))
            return until - now

    def served(self, run: str) -> bool:
        """The run could be served; returns whether it was refused before."""
        with self._lock:
            return self._by_run.pop(run, None) is not None

    def seconds_left(self, run: str) -> float:
        """Until the run is to be tried; 0 if it may be tried now."""
        with self._lock:
            refusal = self._by_run.get(run)
            return max(0.0, refusal.until - self._clock()) if refusal else 0.0

    def reasons(self) -> dict[str, str]:
        """Why, by run, of all that were refused and not served since."""
        with self._lock:
            return {run: refusal.reason for run, refusal in self._by_run.items()}

    def all_wait(self, runs: Collection[str]) -> bool:
        """Whether none of these runs is to be tried now."""
        return all(self.seconds_left(run) for run in runs)

    def reason(self, runs: Collection[str]) -> str:
        """Why none of these runs can be served; "" if one of them can."""
        reasons = self.reasons()
        found = [reasons.get(run, "") for run in runs]
        return found[0] if found and all(found) else ""

    def keep(self, runs: Collection[str]) -> None:
        """Forget all but these runs: the others are over."""
        with self._lock:
            self._by_run = {run: refusal for run, refusal in self._by_run.items() if run in runs}
