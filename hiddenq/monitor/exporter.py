"""One look at the fleet as Prometheus samples.

Invariant: a pure function of a look and its statuses, so what Prometheus sees and what `status` says are one thing.
A worker has its series as long as it is expected: a dead one is 0, not absent, until it is drained or forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hiddenq import __version__
from hiddenq.contracts.metrics import Sample
from hiddenq.monitor.discovery import run_label
from hiddenq.monitor.model import RunStatus, SpoolStatus, WorkerStatus
from hiddenq.monitor.status import Look


def samples_of(look: Look, statuses: Sequence[RunStatus]) -> Iterator[Sample]:
    """Every sample of the monitor while Redis answers."""
    yield "redis_up", (), 1.0
    yield "snapshot_timestamp_seconds", (), look.snapshot.now
    yield "build_info", (__version__,), 1.0
    yield "redis_memory_bytes", (), look.snapshot.memory_bytes
    yield "redis_memory_max_bytes", (), look.snapshot.memory_limit_bytes
    spools = look.spools()
    yield from _of_queues(look, {spool.spool_id for spool in spools})
    for spool in spools:
        yield from _of_a_spool(spool)
    yield from _of_workers(look)
    for status in statuses:
        yield from _of_a_run(status)


def samples_without_redis(last: Sequence[Sample]) -> list[Sample]:
    """The last samples go on standing, with the word that Redis is away: alerts neither end nor begin by that."""
    kept = [sample for sample in last if sample[0] not in ("redis_up", "build_info")]
    return [("redis_up", (), 0.0), ("build_info", (__version__,), 1.0), *kept]


def _of_queues(look: Look, known_spools: set[str]) -> Iterator[Sample]:
    for state in look.snapshot.queues:
        queue = look.queue(state)
        if queue.spool_id and queue.spool_id not in known_spools:
            continue
        labels = (queue.queue, queue.run, queue.spool_id, queue.host)
        yield "queue_depth", labels, queue.num_waiting
        yield "queue_oldest_seconds", labels, queue.oldest_seconds
        yield "queue_started", labels, queue.num_started
        yield "queue_delayed", labels, queue.num_delayed


def _of_a_spool(spool: SpoolStatus) -> Iterator[Sample]:
    labels = (spool.spool_id, spool.host)
    yield "spool_alive", labels, float(spool.alive)
    for name, value in (
        ("spool_bytes", spool.num_bytes),
        ("spool_files", spool.num_files),
        ("spool_high_mark_bytes", spool.high_bytes),
        ("spool_disk_free_bytes", spool.disk_free_bytes),
    ):
        if value is not None:
            yield name, labels, value


def _of_workers(look: Look) -> Iterator[Sample]:
    live: Counter[tuple[str, str]] = Counter()
    expected: Counter[tuple[str, str]] = Counter()
    for seen in look.snapshot.workers:
        if seen.drained:
            continue
        worker = look.worker(seen)
        place = (worker.role, worker.host)
        expected[place] += 1
        live[place] += worker.alive
        labels = (worker.role, run_label(seen.report), worker.host, worker.device, worker.target)
        yield "worker_up", labels, float(worker.alive)
        yield "worker_starting_seconds", labels, _starting_seconds(worker)
        if worker.role == "gpu_worker":
            yield "worker_stalled_seconds", labels, worker.stalled_seconds
    for role_and_host, number in expected.items():
        yield "workers_expected", role_and_host, number
        yield "workers_live", role_and_host, live[role_and_host]


def _starting_seconds(worker: WorkerStatus) -> float:
    return worker.state_seconds if worker.alive and worker.state == "starting" else 0.0


def _of_a_run(status: RunStatus) -> Iterator[Sample]:
    run = (status.run,)
    yield "run_batches", run, status.total.num_batches
    yield "run_batches_committed", run, status.committed.num_batches
    yield "run_samples", run, status.total.num_samples
    yield "run_samples_committed", run, status.committed.num_samples
    yield "run_tokens", run, status.total.num_tokens
    yield "run_tokens_committed", run, status.committed.num_tokens
    yield "run_committed_bytes", run, status.committed_bytes
    yield "run_complete", run, float(status.complete)
    yield "batch_p99_seconds", run, status.batch_p99_seconds
    yield "dead_letters", run, status.num_dead_letters
    by_ledger = status.rate if status.rate and status.rate.source == "ledger" and not status.complete else None
    yield "run_tokens_per_second", run, by_ledger.tokens_per_second if by_ledger else 0.0
    yield "run_samples_per_second", run, by_ledger.samples_per_second if by_ledger else 0.0
    if status.eta_seconds is not None:
        yield "run_eta_seconds", run, status.eta_seconds
