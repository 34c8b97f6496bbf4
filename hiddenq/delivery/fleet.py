"""The fleet as Redis sees it: the source of `status`, of the monitor and of what can be expected (outlook.py).

Invariant: looking changes nothing. No call of RQ's own is made here, because its counts clean up as they count.
A worker that was once seen stays expected until its host is drained or forgotten, or it withdrew at its end: so a dead
one is missed, not forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis

from hiddenq.contracts.errors import BadMessage, UnknownSchema, UsageError
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import jobs
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.dead_letters import num_dead
from hiddenq.delivery.ledger import Ledger, LedgerTotals
from hiddenq.delivery.runs import RunRecord, State, list_runs, run_state


@dataclass(frozen=True)
class QueueState:
    """One RQ queue of ours."""

    queue: str
    run: str | None
    """Of an extract queue."""
    spool_id: str | None
    """Of an upload queue."""
    num_waiting: int
    oldest_seconds: float
    """Since the first waiting job was queued; 0 if none waits."""
    num_started: int
    num_delayed: int
    num_dead: int


@dataclass(frozen=True)
class WorkerStatus:
    """A worker's last report."""

    report: WorkerReport
    age_seconds: float
    live: bool
    drained: bool
    """Its host is drained: it is not expected any more."""


@dataclass(frozen=True)
class SpoolState:
    """One spool's heartbeat."""

    spool_id: str
    host: str
    age_seconds: float
    alive: bool
    """Under the time after which its shards are made again elsewhere."""
    silent: bool
    """For a lease: no process on it lives."""


@dataclass(frozen=True)
class RunState:
    """One run."""

    record: RunRecord
    state: State | None
    totals: LedgerTotals
    num_dead: int

    @property
    def is_complete(self) -> bool:
        """Whether every batch is committed."""
        return self.totals.num_batches >= self.record.config.num_batches


@dataclass(frozen=True)
class FleetSnapshot:
    """Everything at one moment of the Redis clock."""

    now: float
    queues: tuple[QueueState, ...]
    workers: tuple[WorkerStatus, ...]
    spools: tuple[SpoolState, ...]
    runs: tuple[RunState, ...]
    memory_bytes: int
    memory_limit_bytes: int
    """0 for none."""

    def run(self, name: str) -> RunState | None:
        """One run by its name."""
        return next((run for run in self.runs if run.record.run == name), None)


def fleet(client: redis.Redis) -> FleetSnapshot:
    """Look at everything, changing nothing.

    Raises:
        RedisAway: Redis is away.
    """
    with away_errors():
        seconds, microseconds = client.time()
        now = seconds + microseconds / 1e6
        records = list_runs(client)
        memory = client.info("memory")
        return FleetSnapshot(
            now=now,
            queues=tuple(_queue(client, queue, now) for queue in _queues(client)),
            workers=tuple(_workers(client, now, records)),
            spools=tuple(_spools(client, now, records)),
            runs=tuple(
                RunState(
                    record,
                    run_state(client, record.run),
                    Ledger(client, record.run).totals(),
                    num_dead(client, record.run),
                )
                for record in records
            ),
            memory_bytes=int(memory["used_memory"]),
            memory_limit_bytes=int(memory["maxmemory"]),
        )


def drain(client: redis.Redis, host: str) -> int:
    """A host takes no more work and is expected no more; its processes finish and end. Returns its workers.

    Raises:
        UsageError: nobody has heard of the host.
    """
    with away_errors():
        entries = _entries_of(client, host)
        client.sadd("hiddenq:drained", host)
        return len(entries)


def forget(client: redis.Redis, host: str) -> int:
    """A host is as if never seen: its workers are off the list, and it may work again. Returns its workers.

    Raises:
        UsageError: nobody has heard of the host.
    """
    with away_errors():
        entries = _entries_of(client, host)
        client.srem("hiddenq:drained", host)
        if entries:
            client.hdel("hiddenq:workers", *entries)
            client.zrem("hiddenq:workers:seen", *entries)
        return len(entries)


def _entries_of(client: redis.Redis, host: str) -> list[str]:
    """Under what a host's workers are expected; none for one that was drained and has left.

    Raises:
        UsageError: no worker of that host was ever seen, and it is not drained.
    """
    reports = list(_reports(client))
    drained = {text(name) for name in client.smembers("hiddenq:drained")}
    known = {report.host for _, report in reports} | drained
    if host not in known:
        raise UsageError(f"{host}: no such host; Redis knows {', '.join(sorted(known)) or 'none'}")
    return [entry for entry, report in reports if report.host == host]


def _queues(client: redis.Redis) -> list[str]:
    found = (text(key).removeprefix("rq:queue:") for key in client.smembers("rq:queues"))
    return sorted(queue for queue in found if queue.startswith((jobs.EXTRACT_PREFIX, jobs.UPLOAD_PREFIX)))


def _queue(client: redis.Redis, queue: str, now: float) -> QueueState:
    run = jobs.run_of(queue) or None
    pipeline: Any = client.pipeline(transaction=False)
    pipeline.llen(f"rq:queue:{queue}")
    pipeline.lindex(f"rq:queue:{queue}", 0)
    pipeline.zcard(f"rq:wip:{queue}")
    pipeline.zcard(f"rq:scheduled:{queue}")
    pipeline.zcard(f"rq:failed:{queue}")
    num_waiting, first, num_started, num_delayed, num_dead = pipeline.execute()
    return QueueState(
        queue=queue,
        run=run,
        spool_id=None if run else queue.removeprefix(jobs.UPLOAD_PREFIX),
        num_waiting=num_waiting,
        oldest_seconds=_age(client, text(first), now) if first else 0.0,
        num_started=num_started,
        num_delayed=num_delayed,
        num_dead=num_dead,
    )


def _age(client: redis.Redis, job_id: str, now: float) -> float:
    queued_at = client.hget(f"rq:job:{job_id}", "enqueued_at")
    with contextlib.suppress(ValueError):
        return max(0.0, now - datetime.fromisoformat(text(queued_at or "")).astimezone(UTC).timestamp())
    return 0.0


def _reports(client: redis.Redis) -> Iterator[tuple[str, WorkerReport]]:
    for entry, report in sorted(client.hgetall("hiddenq:workers").items()):
        try:
            yield text(entry), WorkerReport.parse(raw(report))
        except (BadMessage, UnknownSchema):
            continue  # of another hiddenq: it decides nothing


def _workers(client: redis.Redis, now: float, records: list[RunRecord]) -> Iterator[WorkerStatus]:
    lease = _longest(records, "lease_seconds", 30.0)
    seen = dict(_scores(client, "hiddenq:workers:seen"))
    drained = {text(host) for host in client.smembers("hiddenq:drained")}
    for entry, report in _reports(client):
        age = max(0.0, now - seen.get(entry, 0.0))
        yield WorkerStatus(report, age, age < lease, report.host in drained)


def _spools(client: redis.Redis, now: float, records: list[RunRecord]) -> Iterator[SpoolState]:
    dead, lease = _longest(records, "spool_dead_seconds", 600.0), _longest(records, "lease_seconds", 30.0)
    for spool_id, seen in _scores(client, "hiddenq:spools"):
        age = max(0.0, now - seen)
        host = text(client.hget(f"hiddenq:spool:{spool_id}", "host") or "")
        yield SpoolState(spool_id, host, age, alive=age < dead, silent=age >= lease)


def _scores(client: redis.Redis, key: str) -> list[tuple[str, float]]:
    members: Any = client.zrange(key, 0, -1, withscores=True)
    return [(text(member), float(score)) for member, score in members]


def _longest(records: list[RunRecord], setting: str, default: float) -> float:
    return max((getattr(record.delivery, setting) for record in records), default=default)
