"""Batches set aside, with every attempt's story.

Invariant: a dead letter is a failed job of RQ, and its story is that job's results stream, so RQ's tools and
`hiddenq failed` show the same. Retrying gives all attempts back; dropping forgets the job, not the batch, which a later
`enqueue` will find missing. The run's are those of batches in its plan; a message that says it is the run's and names
no such batch is set aside as `foreign` (by lua/common.lua): listed and dropped with them, counted with none.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, UnknownSchema, UsageError
from hiddenq.contracts.manifest import Attempt, DeadLetter
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.delivery import jobs
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.scripts import Scripts

CHUNK = 500
"""Dead letters read or moved in one request."""


def dead_letters(client: redis.Redis, run: str, *, limit: int | None = None) -> list[DeadLetter]:
    """The run's dead letters, oldest first, all or the first `limit`.

    Messages that nobody could read are counted by `fleet`, not listed.
    """
    at_once = min(limit or CHUNK, CHUNK)
    return list(itertools.islice(each_dead_letter(client, run, foreign=False, at_once=at_once), limit))


def each_dead_letter(
    client: redis.Redis,
    run: str,
    batch_ids: Sequence[str] | None = None,
    *,
    foreign: bool = True,
    at_once: int = CHUNK,
) -> Iterator[DeadLetter]:
    """The same one by one (or those of some batches), foreign ones at the end; all are never in memory together.

    Raises:
        UsageError: one of the batches named has no dead letter.
    """
    for chunk in _chunks(_dead_jobs(client, run, batch_ids, foreign=foreign), at_once):
        pipeline: Any = client.pipeline(transaction=False)
        for job_id in chunk:
            pipeline.hgetall(f"rq:job:{job_id}")
            pipeline.xrange(f"rq:results:{job_id}")
        with away_errors():
            answers = iter(pipeline.execute())
        for job_id, job, results in zip(chunk, answers, answers, strict=True):
            if letter := _letter(job_id, {text(name): raw(value) for name, value in job.items()}, results):
                yield letter


def dead_batches(client: redis.Redis, run: str, *, queue: str | None = None) -> set[str]:
    """Ids of the batches that have a dead letter (of one queue only, if given), without their stories."""
    found: set[str] = set()
    for chunk in _chunks(_dead_jobs(client, run, None, foreign=False)):
        pipeline: Any = client.pipeline(transaction=False)
        for job_id in chunk:
            pipeline.hmget(f"rq:job:{job_id}", "batch_id", "origin")
        with away_errors():
            answers = pipeline.execute()
        found |= {text(batch_id) for batch_id, origin in answers if batch_id and queue in (None, text(origin))}
    return found


def num_dead(client: redis.Redis, run: str) -> int:
    """How many dead letters the run has; one request, however many they are."""
    with away_errors():
        return int(client.zcard(_key(run)))


def num_foreign(client: redis.Redis, run: str) -> int:
    """How many messages were set aside that are no batches of the run's plan."""
    with away_errors():
        return int(client.zcard(_foreign_key(run)))


def retry_dead(client: redis.Redis, run: str, batch_ids: Sequence[str] | None = None) -> int:
    """Queue dead letters again (all of the run's plan, or these batches), with all their attempts; returns how many.

    Raises:
        UsageError: one of the batches named has no dead letter; none was queued.
    """
    return _act(client, run, batch_ids, "retry")


def drop_dead(client: redis.Redis, run: str, batch_ids: Sequence[str] | None = None) -> int:
    """Forget dead letters (all, foreign ones as well, or these batches); returns how many.

    Raises:
        UsageError: one of the batches named has no dead letter; none was dropped.
    """
    return _act(client, run, batch_ids, "drop")


def _act(client: redis.Redis, run: str, batch_ids: Sequence[str] | None, action: str) -> int:
    scripts, num = Scripts(client), 0
    for chunk in _chunks(_dead_jobs(client, run, batch_ids, foreign=action == "drop" or batch_ids is not None)):
        with away_errors():
            num += int(scripts.run("dead_letter", action=action, jobs=chunk))
    return num


def _dead_jobs(client: redis.Redis, run: str, batch_ids: Sequence[str] | None, *, foreign: bool) -> list[str]:
    """Ids of the run's dead jobs: a batch's extract job, or an upload job of it (its id has the batch's in front)."""
    with away_errors():
        keys = [_key(run), _foreign_key(run)] if foreign else [_key(run)]
        found = [text(job_id) for key in keys for job_id in client.zrange(key, 0, -1)]
    if batch_ids is None:
        return found
    wanted = {names.extract_job_id(run, batch_id): batch_id for batch_id in batch_ids}
    batch_of = {job_id: wanted.get(job_id) or wanted.get(job_id.rpartition("-")[0]) for job_id in found}
    if unknown := sorted(set(batch_ids) - set(batch_of.values())):
        raise UsageError(f"{', '.join(unknown)}: no dead letter of run {run}; `hiddenq failed list` has them")
    return [job_id for job_id, batch_id in batch_of.items() if batch_id]


def _chunks(job_ids: Sequence[str], size: int = CHUNK) -> Iterator[list[str]]:
    for start in range(0, len(job_ids), size):
        yield list(job_ids[start : start + size])


def _key(run: str) -> str:
    return f"hiddenq:run:{run}:dead"


def _foreign_key(run: str) -> str:
    return f"hiddenq:run:{run}:foreign"


def _letter(job_id: str, job: dict[str, bytes], results: list[tuple[bytes, dict[bytes, bytes]]]) -> DeadLetter | None:
    if job.get("status") != b"failed":
        return None
    try:
        queue, data = job["origin"].decode(), job["data"]
        message = jobs.unpack(data, BatchJob) if jobs.run_of(queue) else jobs.unpack(data, ShardReady)
        if jobs.job_id(message) != job_id:
            return None
        batch = message if isinstance(message, BatchJob) else message.batch
        attempts = [_attempt(text(entry_id), fields) for entry_id, fields in results if b"error" in fields]
        return DeadLetter(batch=batch, queue=queue, reason=_last_line(job["exc_info"]), attempts=tuple(attempts))
    except (BadMessage, UnknownSchema, KeyError, ValueError, zlib.error):
        return None


def _attempt(entry_id: str, fields: dict[bytes, bytes]) -> Attempt:
    def field(name: str) -> str:
        return fields.get(name.encode(), b"").decode(errors="replace")

    milliseconds = int(entry_id.partition("-")[0])
    return Attempt(
        number=int(field("number")),
        execution=field("execution_id"),
        worker=field("worker_name"),
        host=field("host"),
        device=field("device"),
        ended_at=datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(),
        error=field("error"),
        traceback=jobs.unpack_traceback(fields[b"exc_string"]),
    )


def _last_line(text_of_failure: bytes) -> str:
    lines = text_of_failure.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
