"""From a plan to a bounded queue.

Invariant: enqueuing is a reconciliation, not a list of sends. Each batch is queued only if it is neither committed nor
held by something live, decided and done in one step on the server; so it may be repeated at any moment, after a lost
reply or by another `run`, and adds nothing twice.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import redis

from hiddenq.contracts import names
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.delivery import jobs
from hiddenq.delivery.connection import Patience
from hiddenq.delivery.runs import RunRecord
from hiddenq.delivery.scripts import Scripts
from hiddenq.delivery.transitions import flat

CHUNK = 500
FULL_WAIT_SECONDS = 0.5
"""Seconds between two looks at a queue that is full."""


@dataclass
class EnqueueReport:
    """What became of a plan's batches so far."""

    num_enqueued: int = 0
    num_committed: int = 0
    num_held: int = 0
    """Held by a live job: waiting, started, delayed, or on their way to the store."""
    num_dead: int = 0
    """Dead letters; `retry_dead` brings them back."""
    num_left: int = 0
    """Not looked at, because `stop` was set."""


def enqueue(
    client: redis.Redis,
    record: RunRecord,
    batches: Iterable[BatchJob],
    *,
    high_water: int = 20_000,
    stop: threading.Event | None = None,
    progress: Callable[[EnqueueReport], None] | None = None,
) -> EnqueueReport:
    """Queue what is neither committed nor held, in order, never more than about `high_water` waiting jobs.

    Waits while the queue is full or Redis is away, until `stop` is set. `progress` is called after each step.

    Raises:
        RedisAway: Redis was away and `stop` was set.
    """
    stop = stop or threading.Event()
    patiently = Patience(give_up=stop.is_set)
    run = Scripts(client).run
    queue = names.extract_queue(record.run)
    report, remaining = EnqueueReport(), iter(batches)
    size = max(1, min(CHUNK, high_water))
    while chunk := list(itertools.islice(remaining, size)):
        while not stop.is_set() and int(patiently(lambda: client.llen(f"rq:queue:{queue}"))) + len(chunk) > high_water:
            stop.wait(FULL_WAIT_SECONDS)
        if stop.is_set():
            report.num_left += len(chunk) + sum(1 for _ in remaining)
            break
        _count(report, patiently(lambda batches=chunk: _send(run, record.run, queue, batches)))  # type: ignore[misc]
        if progress:
            progress(report)
    return report


def _send(run: Callable[..., bytes], name: str, queue: str, batches: Sequence[BatchJob]) -> Sequence[bytes]:
    return run(  # type: ignore[return-value]
        "enqueue",
        *(jobs.pack(batch) for batch in batches),
        run=name,
        queue=queue,
        fields=flat(jobs.shared_fields(BatchJob, queue)),
        jobs=[(jobs.job_id(batch), batch.batch_id, jobs.describe(batch)) for batch in batches],
    )


def _count(report: EnqueueReport, answer: Sequence[bytes]) -> None:
    letters = b"".join(answer)
    report.num_enqueued += letters.count(b"e")
    report.num_committed += letters.count(b"c")
    report.num_held += letters.count(b"h")
    report.num_dead += letters.count(b"d")


def restore_uploads(client: redis.Redis, record: RunRecord, shards: Iterable[ShardReady]) -> int:
    """Make upload jobs for shards that lie in a spool although Redis lost them; returns how many were made.

    A batch that is committed, on a GPU, or on its way to the store by another shard is left alone. The caller has
    computed each shard's checksum from the file as it lies there.
    """
    patiently, run = Patience(), Scripts(client).run
    return sum(int(patiently(lambda shard=shard: _restore(run, shard))) for shard in shards)  # type: ignore[misc]


def _restore(run: Callable[..., int], shard: ShardReady) -> int:
    extract, upload = flat(jobs.job_fields(shard.batch)), flat(jobs.job_fields(shard))
    return run(
        "restore",
        *extract,
        *upload,
        run=shard.batch.run,
        batch_id=shard.batch.batch_id,
        execution=shard.execution,
        extract_job=jobs.job_id(shard.batch),
        extract_queue=jobs.queue_of(shard.batch),
        upload_job=jobs.job_id(shard),
        upload_queue=jobs.queue_of(shard),
        spool_id=shard.spool_id,
        file_name=shard.file_name,
        fields_of_extract=len(extract),
    )
