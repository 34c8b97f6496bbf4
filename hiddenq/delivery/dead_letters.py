"""Batches set aside, with every attempt's story.

Invariant: a dead letter is a failed job of RQ, and its story is that job's results stream, so RQ's tools and
`hiddenq failed` show the same. Retrying gives all attempts back; dropping forgets the job, not the batch, which a later
`enqueue` will find missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import redis

from hiddenq.contracts.errors import BadMessage, UnknownSchema
from hiddenq.contracts.manifest import Attempt, DeadLetter
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.delivery import jobs
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.scripts import Scripts


def dead_letters(client: redis.Redis, run: str) -> list[DeadLetter]:
    """The run's dead letters, oldest first. Messages that nobody could read are counted by `fleet`, not listed."""
    with away_errors():
        letters = [_letter(client, job_id) for job_id in _dead_jobs(client, run)]
    return [letter for letter in letters if letter]


def retry_dead(client: redis.Redis, run: str, batch_ids: Sequence[str] | None = None) -> int:
    """Queue dead letters again (all of the run, or these batches), with all their attempts; returns how many."""
    return _act(client, run, batch_ids, "retry")


def drop_dead(client: redis.Redis, run: str, batch_ids: Sequence[str] | None = None) -> int:
    """Forget dead letters (all of the run, or these batches); returns how many."""
    return _act(client, run, batch_ids, "drop")


def _act(client: redis.Redis, run: str, batch_ids: Sequence[str] | None, action: str) -> int:
    with away_errors():
        chosen = [
            job_id
            for job_id in _dead_jobs(client, run)
            if batch_ids is None or text(client.hget(f"rq:job:{job_id}", "batch_id")) in batch_ids
        ]
        return int(Scripts(client).run("dead_letter", action=action, jobs=chosen)) if chosen else 0


def _dead_jobs(client: redis.Redis, run: str) -> list[str]:
    return [text(job_id) for job_id in client.zrange(f"hiddenq:run:{run}:dead", 0, -1)]


def _letter(client: redis.Redis, job_id: str) -> DeadLetter | None:
    job = {text(name): raw(value) for name, value in client.hgetall(f"rq:job:{job_id}").items()}
    if job.get("status") != b"failed":
        return None
    queue = job["origin"].decode()
    try:
        data = job["data"]
        batch = jobs.unpack(data, BatchJob) if jobs.run_of(queue) else jobs.unpack(data, ShardReady).batch
    except (BadMessage, UnknownSchema):
        return None
    results: Any = client.xrange(f"rq:results:{job_id}")
    attempts = [_attempt(text(entry_id), fields) for entry_id, fields in results if b"error" in fields]
    return DeadLetter(batch=batch, queue=queue, reason=_last_line(job["exc_info"]), attempts=tuple(attempts))


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
