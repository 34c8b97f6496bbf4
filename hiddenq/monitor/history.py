"""What one look at the fleet can't tell: rates, and how long a worker has made no progress.

Invariant: everything here is derived from two numbers that only real progress moves, the ledger's totals and each
worker's count of finished batches, on the Redis server's clock. Heartbeats, utilisation and log lines never count, so
a worker that hangs with all of these alive is seen to stand still.

Every look leaves its point in one Redis key (`load`, `save`), so a `status` typed once knows the rate that the monitor
or an earlier `status` saw, and a restarted monitor goes on where it was. Two writers at once lose a point, no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import redis
from pydantic import Field

from hiddenq.contracts.base import Frozen, Versioned
from hiddenq.contracts.errors import PermanentError
from hiddenq.contracts.reports import WorkerReport

KEY = "hiddenq:monitor:history"
KEEP_SECONDS = 7 * 24 * 3600
"""The key's life after the last look."""

RATE_SECONDS = 300.0
"""The window of `rate now`."""
POINT_SECONDS = 5.0
"""Points closer to each other than this are one."""
WORKING_STATES = frozenset({"idle", "busy", "sick"})
"""States in which a batch may be expected of a worker that has work: not while it loads its model, is paused by a
full spool, waits for Redis or the store, or drains; each of these has an alert of its own."""


class Point(Frozen):
    """The ledger's totals of a run at one moment."""

    at: float
    num_batches: int
    num_samples: int
    num_tokens: int
    num_bytes: int


class Mark(Frozen):
    """A worker's count of finished batches, and since when it has not moved although it could have."""

    num_batches: int
    since: float
    state_since: float
    state: str


class RunHistory(Frozen):
    """What is remembered of one run."""

    first: Point
    """The first look, from which the mean rate counts."""
    points: tuple[Point, ...]
    """Of the last `RATE_SECONDS`, oldest first."""

    def seen(self, point: Point) -> RunHistory:
        """With one more point; those that are too old, or close to the one before, are left out."""
        kept = [old for old in self.points if point.at - RATE_SECONDS <= old.at <= point.at]
        if len(kept) >= 2 and kept[-1].at - kept[-2].at < POINT_SECONDS:
            kept.pop()
        restarted = point.num_tokens < self.first.num_tokens or point.at < self.first.at
        if restarted:
            return RunHistory(first=point, points=(point,))
        return RunHistory(first=self._first_without_idle_time(point), points=(*kept, point))

    def _first_without_idle_time(self, point: Point) -> Point:
        """A long time without a look and without progress is a pause, which the mean rate leaves out."""
        last = self.points[-1]
        gap = point.at - last.at
        if gap <= RATE_SECONDS or point.num_tokens > last.num_tokens:
            return self.first
        return self.first.model_copy(update={"at": self.first.at + gap})


class History(Versioned):
    """All that is remembered, as one JSON value in Redis."""

    schema_version: int = 1
    runs: dict[str, RunHistory] = Field(default_factory=dict)
    marks: dict[str, Mark] = Field(default_factory=dict)
    """By the worker's target."""

    @classmethod
    def load(cls, connection: redis.Redis) -> Self:
        """The history as last saved; an empty one if there is none or another version's."""
        raw: Any = connection.get(KEY)
        if raw is None:
            return cls()
        try:
            return cls.parse(raw)
        except PermanentError:
            return cls()

    def save(self, connection: redis.Redis) -> None:
        """Keep it for the next look."""
        connection.set(KEY, self.to_json(), ex=KEEP_SECONDS)

    def seen(
        self,
        *,
        at: float,
        totals: Mapping[str, Point],
        workers: Iterable[WorkerReport],
        num_waiting: Mapping[str, int],
    ) -> History:
        """With one more look: the runs' totals, the workers' reports, the batches that wait in each run's queue."""
        marks = {
            report.target: _next_mark(self.marks.get(report.target), report, at, num_waiting.get(report.run or "", 0))
            for report in workers
        }
        runs = {
            run: self.runs[run].seen(point) if run in self.runs else RunHistory(first=point, points=(point,))
            for run, point in totals.items()
        }
        return History(runs=runs, marks=marks)

    def stalled_seconds(self, report: WorkerReport, at: float) -> float:
        """How long a GPU worker has finished nothing although it could have."""
        mark = self.marks.get(report.target)
        return max(0.0, at - mark.since) if mark else 0.0

    def state_seconds(self, report: WorkerReport, at: float) -> float:
        """How long a worker has been in the state that it reports."""
        mark = self.marks.get(report.target)
        return max(0.0, at - mark.state_since) if mark else 0.0


def rate_between(points: Sequence[Point]) -> tuple[float, float] | None:
    """Committed samples and tokens a second from the first to the last point; None if they span no time."""
    if len(points) < 2 or points[-1].at <= points[0].at:
        return None
    seconds = points[-1].at - points[0].at
    samples = (points[-1].num_samples - points[0].num_samples) / seconds
    return samples, (points[-1].num_tokens - points[0].num_tokens) / seconds


def _next_mark(old: Mark | None, report: WorkerReport, at: float, num_waiting: int) -> Mark:
    could_finish = report.state in WORKING_STATES and (report.batch_id is not None or num_waiting > 0)
    stands_still = old is not None and old.num_batches == report.num_batches and could_finish
    same_state = old is not None and old.state == report.state
    return Mark(
        num_batches=report.num_batches,
        since=old.since if old and stands_still else at,
        state=report.state,
        state_since=old.state_since if old and same_state else at,
    )
