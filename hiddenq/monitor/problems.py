"""What is wrong with a run, in words, and what to do about it.

Invariant: a pure function of one moment; it names a problem only with its remedy, the worst first, and says nothing
when a person has nothing to do. The alert rules watch the same symptoms over time, with the same thresholds.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence

from hiddenq.contracts.wording import counted
from hiddenq.monitor.embedded import Embedded
from hiddenq.monitor.model import Problem, QueueStatus, RedisStatus, SpoolStatus, WorkerStatus
from hiddenq.monitor.texts import format_bytes, format_rate, format_seconds, format_share
from hiddenq.monitor.thresholds import (
    DISK_FREE_BYTES,
    REDIS_FULL_SHARE,
    SPOOL_FULL_SHARE,
    STARTING_SECONDS,
    STRAGGLER_SHARE,
    UPLOAD_OLD_SECONDS,
    stall_limit_seconds,
)

_ORDER = {"critical": 0, "warning": 1, "info": 2}


def find_problems(
    *,
    run: str,
    location: str,
    state: str,
    num_left: int,
    num_dead_letters: int,
    p99_seconds: float,
    workers: Sequence[WorkerStatus],
    queues: Sequence[QueueStatus],
    spools: Sequence[SpoolStatus],
    redis: RedisStatus,
    embedded: Embedded | None = None,
) -> tuple[Problem, ...]:
    """All problems of this moment, worst first; `num_left` is the number of batches not yet committed.

    Once a run is over (it is not `live`, or nothing is left), nobody needs to be there for it. `embedded`: the run has
    its own Redis.
    """
    meant = f"--out {shlex.quote(location)}" if embedded else f"--run {run}"
    found = [*_of_redis(redis), *_of_dead_letters(meant, num_dead_letters)]
    if state == "stopped":
        found.append(_of_a_stopped_run(num_left - num_dead_letters))
    elif state == "live" and num_left:
        found += [
            *_of_the_rest(num_left - num_dead_letters, workers, queues, embedded),
            *(problem for worker in workers for problem in _of_a_worker(worker, workers, p99_seconds, embedded)),
            *_stragglers(workers),
            *(problem for spool in spools for problem in _of_a_spool(spool, workers, queues, embedded)),
        ]
    return tuple(sorted(found, key=lambda problem: _ORDER[problem.severity]))


def worker_label(worker: WorkerStatus) -> str:
    """`node1 cuda:0`, `node1 uploader`."""
    return f"{worker.host} {worker.device or worker.role.replace('_', ' ')}"


def stragglers(workers: Sequence[WorkerStatus]) -> list[tuple[WorkerStatus, float]]:
    """Busy GPU workers under 60 % of the busy ones' median tokens a second, with their share of it."""
    busy = [
        worker
        for worker in workers
        if worker.role == "gpu_worker" and worker.alive and worker.state == "busy" and worker.tokens_per_second > 0
    ]
    if len(busy) < 2:
        return []
    median = statistics.median(worker.tokens_per_second for worker in busy)
    shares = [(worker, worker.tokens_per_second / median) for worker in busy]
    return [(worker, share) for worker, share in shares if share < STRAGGLER_SHARE]


def _of_redis(redis: RedisStatus) -> Iterator[Problem]:
    if redis.memory_max_bytes and redis.memory_bytes > REDIS_FULL_SHARE * redis.memory_max_bytes:
        yield Problem(
            severity="critical",
            what=f"Redis uses {format_bytes(redis.memory_bytes)} of its {format_bytes(redis.memory_max_bytes)}; "
            "when it is full, everything waits",
            do="raise maxmemory (CONFIG SET maxmemory …), or `hiddenq cancel` runs that nobody needs",
        )


def _of_dead_letters(meant: str, num_dead_letters: int) -> Iterator[Problem]:
    if num_dead_letters:
        yield Problem(
            severity="warning",
            what=f"{counted(num_dead_letters, 'dead letter')}, set aside after the last attempt",
            do=f"see why: `hiddenq failed list {meant}`; when it is mended: `hiddenq failed retry {meant}`",
        )


def _of_a_stopped_run(num_left: int) -> Problem:
    left = f"{counted(num_left, 'batch')} left" if num_left > 0 else "only its index and manifest are missing"
    return Problem(
        severity="info",
        what=f"no process runs it; {left}",
        do="type the same `hiddenq run` again: it goes on from here",
    )


def _of_the_rest(
    num_left: int, workers: Sequence[WorkerStatus], queues: Sequence[QueueStatus], embedded: Embedded | None
) -> Iterator[Problem]:
    if num_left <= 0:
        return
    gpu_workers = [worker for worker in workers if worker.role == "gpu_worker" and not worker.drained]
    has_work = any(queue.num_waiting or queue.num_started or queue.num_delayed for queue in queues)
    if not has_work:
        yield Problem(
            severity="critical",
            what=f"{counted(num_left, 'batch')} left, but no queue holds any of them",
            do="start `hiddenq run` (or `hiddenq produce`) with the same flags: it enqueues what is missing",
        )
    elif not any(worker.alive for worker in gpu_workers) and any(
        queue.queue == "extract" and (queue.num_waiting or queue.num_started) for queue in queues
    ):
        yield Problem(
            severity="critical",
            what="batches wait, but no GPU worker is alive",
            do=_by_itself(embedded) or "start one: `hiddenq worker`; its log says why the last one ended",
        )


def _by_itself(embedded: Embedded | None) -> str:
    """What starts a dead process of a living `hiddenq run` again; "" in a fleet."""
    if not embedded or not embedded.is_running:
        return ""
    return f"`hiddenq run` starts it again by itself; its log in {embedded.logs} says why it ended"


def _of_a_dead_worker(
    worker: WorkerStatus, workers: Sequence[WorkerStatus], embedded: Embedded | None
) -> Iterator[Problem]:
    """One whose heartbeat has stopped. What takes a host out is no remedy while others of that host work."""
    if worker.state == "draining":
        what = f"was told to stop, and ended {format_seconds(worker.heartbeat_seconds)} ago"
    else:
        what = f"no heartbeat for {format_seconds(worker.heartbeat_seconds)}"
        what += f"; it last said: {worker.detail}" if worker.detail else ""
    command = "hiddenq worker" if worker.role == "gpu_worker" else "hiddenq upload"
    if any(other.alive for other in workers if other.host == worker.host):
        gone = f"`hiddenq forget {worker.host}` (those that live there are listed again with their next heartbeat)"
    else:
        gone = f"`hiddenq forget {worker.host}`, or `hiddenq drain {worker.host}` to let none start there"
    yield Problem(
        severity="critical" if worker.role == "gpu_worker" else "warning",
        what=f"{worker_label(worker)}: {what}",
        do=_by_itself(embedded) or f"look at its log and start it again (`{command}`); gone on purpose: {gone}",
    )


def _of_a_worker(
    worker: WorkerStatus, workers: Sequence[WorkerStatus], p99_seconds: float, embedded: Embedded | None
) -> Iterator[Problem]:
    label = worker_label(worker)
    if worker.drained:
        return
    if not worker.alive:
        yield from _of_a_dead_worker(worker, workers, embedded)
        return
    limit = stall_limit_seconds(p99_seconds)
    if worker.state == "sick":
        yield Problem(
            severity="critical",
            what=f"{label}: stopped claiming: {worker.detail or 'too many failures in a row'}",
            do="`hiddenq doctor` on that host; restart the worker when it is mended",
        )
    elif worker.role == "gpu_worker" and worker.stalled_seconds > limit:
        yield Problem(
            severity="critical",
            what=f"{label}: no batch finished for {format_seconds(worker.stalled_seconds)} "
            f"(limit {format_seconds(limit)}) though there is work",
            do=f"on {worker.host}: `py-spy dump --pid {worker.pid}`, `nvidia-smi`; then kill pid {worker.pid}: "
            "its batches go to others within 35 s",
        )
    if worker.state == "starting" and worker.state_seconds > STARTING_SECONDS:
        yield Problem(
            severity="warning",
            what=f"{label}: has been starting for {format_seconds(worker.state_seconds)}",
            do="see its log: a slow disk under the model, or a download that hangs",
        )
    if worker.state == "waiting":
        yield Problem(
            severity="warning",
            what=f"{label}: waits: {worker.detail or 'Redis or the object store is away'}",
            do="nothing is lost; it goes on by itself when the server answers again",
        )
    if worker.fast_kernels is False:
        yield Problem(
            severity="warning",
            what=f"{label}: runs without the model's fast kernels, at half speed or less",
            do="`hiddenq doctor` names the packages; `--require-fast-kernels` refuses to start without them",
        )


def _stragglers(workers: Sequence[WorkerStatus]) -> Iterator[Problem]:
    for worker, share in stragglers(workers):
        reason = f", throttled: {worker.throttle}" if worker.throttle else ""
        yield Problem(
            severity="warning",
            what=f"{worker_label(worker)}: {format_rate(worker.tokens_per_second)} tokens/s, "
            f"{format_share(share)} of the median{reason}",
            do=f"on {worker.host}: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`; "
            "look for another process on the GPU",
        )


def _of_a_spool(
    spool: SpoolStatus, workers: Sequence[WorkerStatus], queues: Sequence[QueueStatus], embedded: Embedded | None
) -> Iterator[Problem]:
    queue = next((one for one in queues if one.queue == "upload" and one.spool_id == spool.spool_id), None)
    num_waiting = queue.num_waiting + queue.num_started if queue else 0
    uploaders = [worker for worker in workers if worker.role == "uploader" and worker.alive]
    if num_waiting and not any(worker.host == spool.host for worker in uploaders):
        yield Problem(
            severity="critical",
            what=f"{spool.host}: {counted(num_waiting, 'finished shard')} left, but no uploader is alive there",
            do=_by_itself(embedded) or f"start one on {spool.host}: `hiddenq upload`",
        )
    elif queue and queue.oldest_seconds > UPLOAD_OLD_SECONDS:
        yield Problem(
            severity="warning",
            what=f"{spool.host}: the oldest shard has waited {format_seconds(queue.oldest_seconds)} for its upload",
            do="more uploaders (`--uploaders`), or a look at the object store",
        )
    if spool.num_bytes and spool.high_bytes and spool.num_bytes > SPOOL_FULL_SHARE * spool.high_bytes:
        yield Problem(
            severity="warning",
            what=f"{spool.host}: the spool holds {format_bytes(spool.num_bytes)} of {format_bytes(spool.high_bytes)}; "
            "GPU workers pause when it is full",
            do="uploads are the bottleneck: more uploaders, or a faster way to the object store",
        )
    if spool.disk_free_bytes is not None and spool.disk_free_bytes < DISK_FREE_BYTES:
        yield Problem(
            severity="warning",
            what=f"{spool.host}: {format_bytes(spool.disk_free_bytes)} left on the spool's disk",
            do="free space there; what hiddenq needs itself stays under the spool's high mark",
        )
