"""From Redis to `RunStatus`: one look at the fleet, seen together with what earlier looks left.

Invariant: a look reads, and writes nothing but its own history; it takes the same few requests however long the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from hiddenq.contracts.manifest import DeadLetter
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import (
    FleetSnapshot,
    QueueState,
    RunState,
    batch_seconds,
    dead_letters,
    fleet,
    load_run,
)
from hiddenq.delivery import WorkerStatus as Seen
from hiddenq.delivery.connection import away_errors
from hiddenq.monitor.embedded import Embedded, is_stopped
from hiddenq.monitor.history import History, Point, rate_between
from hiddenq.monitor.model import (
    DeadLetterStatus,
    QueueStatus,
    Rate,
    RedisStatus,
    RunStatus,
    SpoolStatus,
    Totals,
    WorkerStatus,
)
from hiddenq.monitor.problems import find_problems
from hiddenq.monitor.thresholds import SPOOL_FRESH_SECONDS

MAX_LETTERS = 20


def run_status(client: redis.Redis, run: str | None = None, *, embedded: Embedded | None = None) -> RunStatus:
    """The status of a run now; without a name, of the only live one. `embedded`: it has its own Redis.

    Raises:
        UsageError: there is no such run, none, or more than one to choose from.
        RedisAway: Redis is away.
    """
    record = load_run(client, run)
    look = Look.take(client)
    state = look.snapshot.run(record.run)
    assert state is not None, f"run {record.run} is in the list of runs and not in the fleet"
    letters = dead_letters(client, record.run, limit=MAX_LETTERS) if state.num_dead else []
    return look.status_of(state, batch_seconds(client, record.run), letters, embedded)


@dataclass(frozen=True)
class Look:
    """The fleet at one moment, and the history up to it."""

    snapshot: FleetSnapshot
    history: History

    @classmethod
    def take(cls, client: redis.Redis) -> Look:
        """Look, and leave the look's point for the next one.

        Raises:
            RedisAway: Redis is away.
        """
        snapshot = fleet(client)
        with away_errors():
            history = History.load(client)
        history = history.seen(
            at=snapshot.now,
            totals={run.record.run: _point(snapshot.now, run) for run in snapshot.runs},
            workers=[seen.report for seen in snapshot.workers],
            num_waiting={queue.run: queue.num_waiting for queue in snapshot.queues if queue.run},
        )
        with contextlib.suppress(redis.RedisError):  # a full Redis can be looked at, and so by one who may only read
            history.save(client)
        return cls(snapshot, history)

    def status_of(
        self,
        state: RunState,
        batch_times: Sequence[float],
        letters: Sequence[DeadLetter],
        embedded: Embedded | None = None,
    ) -> RunStatus:
        """One run's status, given its newest batch times and its dead letters."""
        config, totals = state.record.config, state.totals
        word = "stopped" if embedded and is_stopped(self.snapshot, state, embedded) else state.state or "live"
        workers = tuple(self.worker(seen) for seen in self.snapshot.workers if _concerns(seen.report, config.run))
        queues = tuple(self.queue(queue) for queue in self.snapshot.queues if queue.run in (None, config.run))
        spools = tuple(self.spools())
        executed = [seen.report for seen in self.snapshot.workers if seen.report.run == config.run]
        rate, mean = self._rates(state) if word in ("live", "finished") else (None, None)
        tokens_left = max(0, config.num_tokens - totals.num_tokens)
        complete = state.is_complete
        eta = tokens_left / rate.tokens_per_second if rate and rate.tokens_per_second and not complete else None
        memory = RedisStatus(memory_bytes=self.snapshot.memory_bytes, memory_max_bytes=self.snapshot.memory_limit_bytes)
        p99 = percentile(batch_times, 0.99)
        return RunStatus(
            run=config.run,
            location=state.record.location,
            model=config.model.model,
            state=word,
            at=self.snapshot.now,
            total=Totals(num_batches=config.num_batches, num_samples=config.num_samples, num_tokens=config.num_tokens),
            committed=Totals(
                num_batches=totals.num_batches, num_samples=totals.num_samples, num_tokens=totals.num_tokens
            ),
            committed_bytes=totals.num_bytes,
            executed=Totals(
                num_batches=sum(report.num_batches for report in executed if report.role == "gpu_worker"),
                num_samples=sum(report.num_samples for report in executed if report.role == "gpu_worker"),
                num_tokens=sum(report.num_tokens for report in executed if report.role == "gpu_worker"),
            ),
            share=1.0 if complete else totals.num_tokens / max(1, config.num_tokens),
            complete=complete,
            rate=rate,
            mean_rate=None if complete else mean,  # the time since the end would count
            eta_seconds=eta,
            eta_at=None if eta is None else self.snapshot.now + eta,
            batch_p99_seconds=p99,
            padding=_padding(config.num_tokens, config.num_padded_tokens) or 0.0,
            workers=workers,
            queues=queues,
            spools=spools,
            num_dead_letters=state.num_dead,
            dead_letters=tuple(
                DeadLetterStatus(
                    batch_id=letter.batch.batch_id,
                    num_samples=letter.batch.num_samples,
                    num_attempts=len(letter.attempts),
                    reason=letter.reason,
                )
                for letter in letters[:MAX_LETTERS]
            ),
            redis=memory,
            problems=find_problems(
                run=config.run,
                location=state.record.location,
                state=word,
                num_left=config.num_batches - totals.num_batches,
                num_dead_letters=state.num_dead,
                p99_seconds=p99,
                workers=workers,
                queues=queues,
                spools=spools,
                redis=memory,
                embedded=embedded,
            ),
        )

    def worker(self, seen: Seen) -> WorkerStatus:
        """A worker's report together with what the history knows of it."""
        report = seen.report
        fields = report.model_dump(include=set(WorkerStatus.model_fields))
        return WorkerStatus(
            **fields,
            alive=seen.live,
            drained=seen.drained,
            heartbeat_seconds=seen.age_seconds,
            state_seconds=self.history.state_seconds(report, self.snapshot.now),
            stalled_seconds=self.history.stalled_seconds(report, self.snapshot.now),
            padding=_padding(report.num_tokens, report.num_padded_tokens),
        )

    def queue(self, queue: QueueState) -> QueueStatus:
        """A queue, with the host of its spool."""
        return QueueStatus(
            queue="extract" if queue.run else "upload",
            run=queue.run or "",
            spool_id=queue.spool_id or "",
            host=next((spool.host for spool in self.snapshot.spools if spool.spool_id == queue.spool_id), ""),
            num_waiting=queue.num_waiting,
            oldest_seconds=queue.oldest_seconds,
            num_started=queue.num_started,
            num_delayed=queue.num_delayed,
        )

    def spools(self) -> list[SpoolStatus]:
        """Spools that live or hold shards, as their newest report says."""
        jobs = {queue.spool_id: queue.num_waiting + queue.num_started for queue in self.snapshot.queues}
        found = []
        for spool in self.snapshot.spools:
            alive = spool.age_seconds < SPOOL_FRESH_SECONDS
            if not alive and not jobs.get(spool.spool_id):
                continue
            reports = [seen for seen in self.snapshot.workers if seen.report.spool_id == spool.spool_id]
            known = [seen for seen in reports if seen.report.spool_bytes is not None]
            newest = min(known, key=lambda seen: seen.age_seconds).report if known else None
            found.append(
                SpoolStatus(
                    spool_id=spool.spool_id,
                    host=spool.host,
                    alive=alive,
                    num_files=newest.spool_files if newest else None,
                    num_bytes=newest.spool_bytes if newest else None,
                    high_bytes=newest.spool_high_bytes if newest else None,
                    disk_free_bytes=newest.disk_free_bytes if newest else None,
                )
            )
        return found

    def _rates(self, state: RunState) -> tuple[Rate | None, Rate | None]:
        config = state.record.config
        history = self.history.runs[config.run]
        measured = rate_between(history.points)
        mean = rate_between((history.first, history.points[-1]))
        mean_rate = Rate(samples_per_second=mean[0], tokens_per_second=mean[1], source="ledger") if mean else None
        if measured and measured[1] > 0:
            return Rate(samples_per_second=measured[0], tokens_per_second=measured[1], source="ledger"), mean_rate
        tokens_per_second = sum(
            seen.report.tokens_per_second
            for seen in self.snapshot.workers
            if seen.live and seen.report.role == "gpu_worker" and seen.report.run == config.run
        )
        samples_per_token = config.num_samples / max(1, config.num_tokens)
        if tokens_per_second:
            samples_per_second = tokens_per_second * samples_per_token
            return (
                Rate(samples_per_second=samples_per_second, tokens_per_second=tokens_per_second, source="workers"),
                mean_rate,
            )
        return (Rate(samples_per_second=0.0, tokens_per_second=0.0, source="ledger") if measured else None), mean_rate


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed (nearest rank); 0 for none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0.0


def _point(at: float, run: RunState) -> Point:
    totals = run.totals
    return Point(
        at=at,
        num_batches=totals.num_batches,
        num_samples=totals.num_samples,
        num_tokens=totals.num_tokens,
        num_bytes=totals.num_bytes,
    )


def _concerns(report: WorkerReport, run: str) -> bool:
    return report.role == "uploader" or report.run in (None, run)


def _padding(num_tokens: int, num_padded_tokens: int) -> float | None:
    return 1 - num_tokens / num_padded_tokens if num_padded_tokens else None
