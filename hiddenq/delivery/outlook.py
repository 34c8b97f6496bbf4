"""Whether anything alive can still bring a run further, and if not, why.

Invariant: while any batch of the run has a way to its commit that living processes will go, nobody gives up; that
includes shards in a spool whose machine is gone, since they are made again once it has been silent for long enough. A
GPU worker counts only if what it makes can be uploaded: one whose spool has no uploader fills it and stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import redis

from hiddenq.contracts import names
from hiddenq.contracts.wording import counted
from hiddenq.delivery.connection import away_errors, text
from hiddenq.delivery.fleet import FleetSnapshot, WorkerStatus

LIVE = frozenset({b"queued", b"started", b"scheduled"})
"""RQ's statuses of a job that is not at its end."""


def uploads_of(client: redis.Redis, run: str) -> dict[str, int]:
    """How many shards of a run are on their way to the store, by spool: waiting, started or delayed."""
    job = re.compile(re.escape(run) + r"-[0-9]+-[0-9a-f]+(?::[0-9a-f]+)?")
    with away_errors():
        spools = [text(spool) for spool in client.zrange("hiddenq:spools", 0, -1)]
        pipeline: Any = client.pipeline(transaction=False)
        for spool in spools:
            queue = names.upload_queue(spool)
            pipeline.lrange(f"rq:queue:{queue}", 0, -1)
            pipeline.zrange(f"rq:wip:{queue}", 0, -1)
            pipeline.zrange(f"rq:scheduled:{queue}", 0, -1)
        answers = iter(pipeline.execute())
    nums = {
        spool: sum(bool(job.fullmatch(text(member))) for members in triple for member in members)
        for spool, *triple in zip(spools, answers, answers, answers, strict=True)
    }
    return {spool: num for spool, num in nums.items() if num}


def upload_is_live(client: redis.Redis, run: str, batch_id: str, execution: str) -> bool:
    """Whether a shard's upload job waits, is started or delayed: somebody may be writing to the store, or will be."""
    with away_errors():
        status = client.hget(f"rq:job:{names.upload_job_id(run, batch_id, execution)}", "status")
    return status in LIVE


def stuck_reason(snapshot: FleetSnapshot, run: str, uploads: Mapping[str, int]) -> str | None:
    """Why nothing that lives could bring the run to its end; None while something can, or nothing is left to do.

    `uploads` is what `uploads_of` says.
    """
    reasons = list(_obstacles(snapshot, run, uploads))
    return None if None in reasons else "; ".join(filter(None, reasons)) or None


def _obstacles(snapshot: FleetSnapshot, run: str, uploads: Mapping[str, int]) -> Iterator[str | None]:
    """One for each thing that is left to do; None for one that will be done."""
    uploading = {worker.report.spool_id for worker in snapshot.workers if _works(worker, "uploader")}
    workers = [
        worker
        for worker in snapshot.workers
        if _works(worker, "gpu_worker") and worker.report.run in (run, None) and worker.report.state != "sick"
    ]
    can_extract = any(worker.report.spool_id in uploading for worker in workers)
    if any(queue.num_waiting + queue.num_started + queue.num_delayed for queue in snapshot.queues if queue.run == run):
        yield None if can_extract else f"batches of run {run} wait, and {_missing(workers)}"
    silent = {spool.spool_id for spool in snapshot.spools if spool.silent}
    for spool, num in uploads.items():
        if spool in uploading:
            yield None
        elif spool not in silent:
            yield f"{counted(num, 'shard')} left in spool {spool}, and no uploader of it is alive"
        elif can_extract:
            yield None  # they are made again
        else:
            yield f"{counted(num, 'shard')} left in spool {spool}, which is silent, and {_missing(workers)}"


def _missing(workers: list[WorkerStatus]) -> str:
    if not workers:
        return "no GPU worker that could take them is alive"
    return f"no uploader of spool {workers[0].report.spool_id} is alive, which its GPU worker needs"


def _works(worker: WorkerStatus, role: str) -> bool:
    return worker.live and worker.report.role == role
