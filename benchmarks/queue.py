"""What one Redis carries: enqueue rate, batches finished a second, memory a batch, and a simulated fleet.

    python -m benchmarks.queue rates [--batches 100000]
    python -m benchmarks.queue fleet [--batches 100000] [--workers 1024] [--forward-seconds 1.05] [--folder /dev/shm]

Everything runs against a real server with the settings of the delivery promise (`appendfsync always`) and goes through
the same scripts as a real worker; only the forward pass and the upload are left out. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import redis

from benchmarks.simulated_fleet import FleetSettings, shard_of, simulate
from hiddenq.contracts import names
from hiddenq.contracts.messages import BatchJob, LedgerEntry, ShardReady
from hiddenq.delivery import DeliverySettings, EmbeddedServer, enqueue, fleet
from hiddenq.delivery.runs import RunRecord
from hiddenq.delivery.transitions import Claim, Transitions, claim_of, new_executions

RUN = "benchmark"
SPOOL = "00000000-0000-4000-8000-000000000001"
CLAIMED_AT_ONCE = 4
M = TypeVar("M", BatchJob, ShardReady)
PROCESSES, THREADS = 2, 16


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "fleet"])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--forward-seconds", type=float, default=1.05)
    parser.add_argument("--folder", type=Path, default=None, help="where Redis keeps its data (its disk counts)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        server = EmbeddedServer.start(Path(folder))
        try:
            if options.what == "rates":
                result = rates(server, options.batches)
            else:
                fleet_settings = FleetSettings(num_workers=options.workers, forward_seconds=options.forward_seconds)
                queue_all(server.connect(), options.batches)
                result = simulate(server, RUN, options.batches, fleet_settings)
        finally:
            server.stop()
    print(json.dumps(result, indent=2))


def rates(server: EmbeddedServer, num_batches: int) -> dict[str, Any]:
    """Enqueue, run and commit `num_batches`, each step timed on its own."""
    client = server.connect()
    empty = used(client)
    enqueue_seconds = timed(lambda: queue_all(client, num_batches))
    queued = used(client)
    gpu_seconds = timed(
        lambda: everywhere(server, lambda moves: drain(moves, names.extract_queue(RUN), run_one, BatchJob))
    )
    waiting = used(client)
    upload_seconds = timed(
        lambda: everywhere(server, lambda moves: drain(moves, names.upload_queue(SPOOL), commit_one, ShardReady))
    )
    committed = used(client)
    [run_queue, _] = fleet(client).queues
    assert run_queue.num_waiting + run_queue.num_started + run_queue.num_dead == 0
    return {
        "batches": num_batches,
        "enqueued_per_second": round(num_batches / enqueue_seconds),
        "published_per_second": round(num_batches / gpu_seconds),
        "committed_per_second": round(num_batches / upload_seconds),
        "bytes_per_queued_batch": round((queued - empty) / num_batches),
        "bytes_per_batch_waiting_for_upload": round((waiting - empty) / num_batches),
        "bytes_per_committed_batch_in_its_first_hour": round((committed - empty) / num_batches),
        "redis_cpu_milliseconds_per_batch": round(1000 * client.info("cpu")["used_cpu_user"] / num_batches, 3),
    }


def queue_all(client: redis.Redis, num_batches: int) -> None:
    """Queue all batches; the queue's bound is lifted."""
    record = RunRecord.model_construct(config=_Run(), location="", store={}, delivery=DeliverySettings())
    batches = (
        BatchJob(
            run=RUN, batch_id=names.batch_id(number), token_part=number // 1000, first_row=16 * number, num_samples=16,
            num_tokens=9_000, padded_length=640,
        )
        for number in range(num_batches)
    )  # fmt: skip
    report = enqueue(client, record, batches, high_water=num_batches + 1)
    assert report.num_enqueued == num_batches


class _Run:
    run = RUN


def drain(moves: Transitions, queue: str, finish: Callable[[Transitions, Claim[M]], None], kind: type[M]) -> None:
    """Claim and finish until the queue is empty."""
    worker = f"benchmark-{os.getpid()}-{threading.get_ident()}"
    while claims := moves.claim(queue, worker=worker, host="here", executions=new_executions(CLAIMED_AT_ONCE)):
        for raw in claims:
            finish(moves, claim_of(raw, kind))


def run_one(moves: Transitions, claim: Claim[BatchJob]) -> None:
    """What a GPU worker says to Redis about one batch."""
    assert moves.enter(claim.job_id, claim.execution, "gpu")
    assert moves.publish(claim.job_id, claim.execution, shard_of(claim, SPOOL), host="here")


def commit_one(moves: Transitions, claim: Claim[ShardReady]) -> None:
    """What an uploader says to Redis about one shard."""
    ready = claim.message
    entry = LedgerEntry(
        batch_id=ready.batch.batch_id, execution=ready.execution, key=names.STATES_PREFIX + ready.file_name,
        num_bytes=ready.num_bytes, data_offset=ready.data_offset, checksum=ready.checksum,
        num_samples=ready.batch.num_samples, num_tokens=ready.batch.num_tokens,
    )  # fmt: skip
    assert moves.enter(claim.job_id, claim.execution, "put")
    assert moves.settle(claim.job_id, claim.execution, ready, entry) == "committed"


def everywhere(server: EmbeddedServer, work: Callable[[Transitions], None]) -> None:
    """Do it in many threads of several processes at once, each with a connection of its own."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=in_threads, args=(server, work)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def in_threads(server: EmbeddedServer, work: Callable[[Transitions], None]) -> None:
    """One process's share of `everywhere`."""
    threads = [
        threading.Thread(target=lambda: work(Transitions(server.connect(), DeliverySettings()))) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def used(client: redis.Redis) -> int:
    """Bytes that Redis uses for data."""
    return int(client.info("memory")["used_memory"])


if __name__ == "__main__":
    main()
