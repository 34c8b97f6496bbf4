"""What RQ's own tools show of our queues is true, and what they do cannot harm them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from rq import Queue, Worker
from rq.job import Job
from rq.registry import StartedJobRegistry, clean_registries

from hiddenq.contracts.errors import NonFiniteStates
from hiddenq.delivery import Ledger
from tests.delivery.conftest import FAST, Bench, shard
from tests.support.waiting import wait_until

EXTRACT = "hiddenq-extract-run"


def info(bench: Bench) -> list[str]:
    command = [str(Path(sys.executable).parent / "rq"), "info", "--raw", "-u", bench.server.url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_rq_info_shows_the_truth(bench: Bench) -> None:
    bench.enqueue(10)
    worker = bench.gpu_worker()
    done, failing, *_ = worker.claim(4)
    worker.publish(done, shard(done))
    worker.fail(failing, NonFiniteStates("x"))
    lines = info(bench)
    assert f"queue {EXTRACT} 6, 2 executing, 1 finished, 1 failed" in lines
    assert any(
        line.startswith(f"worker {worker.name}") and line.endswith(f"{EXTRACT}. jobs: 1 finished, 1 failed")
        for line in lines
    )
    worker.close()
    assert not any(line.startswith("worker") for line in info(bench))


def test_rqs_objects_read_our_jobs(bench: Bench) -> None:
    bench.enqueue(2)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    queue = Queue(EXTRACT, connection=bench.client, serializer="json")
    job = Job.fetch("run-000000", connection=bench.client, serializer="json")
    assert (job.get_status(), job.worker_name, job.origin) == ("started", worker.name, EXTRACT)
    assert [execution.id for execution in job.get_executions()] == [claim.execution]
    assert queue.started_job_registry.get_job_ids() == ["run-000000"]
    [seen] = Worker.all(queue=queue)
    assert (seen.name, [execution.job_id for execution in seen.get_current_executions()]) == (
        worker.name,
        ["run-000000"],
    )
    assert queue.job_ids == ["run-000001"]
    worker.publish(claim, shard(claim))
    job = Job.fetch("run-000000", connection=bench.client, serializer="json")
    assert job.get_status() == "finished"
    assert job.started_at
    assert job.ended_at
    assert [(result.type.name, result.worker_name) for result in job.results()] == [("SUCCESSFUL", worker.name)]
    assert queue.finished_job_registry.get_job_ids() == ["run-000000"]
    assert job.get_executions() == []


def test_a_failed_jobs_tracebacks_are_in_rqs_results(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    worker.fail(claim, RuntimeError("once"))
    [claim] = wait_until(worker.claim)
    worker.fail(claim, NonFiniteStates("for good"))
    job = Job.fetch("run-000000", connection=bench.client, serializer="json")
    assert [result.type.name for result in job.results()] == ["FAILED", "RETRIED"]
    assert [(result.exc_string or "").strip().splitlines()[-1] for result in job.results()] == [
        "hiddenq.contracts.errors.NonFiniteStates: for good",
        "RuntimeError: once",
    ]


def test_stock_cleanup_running_all_along_harms_nothing(bench: Bench) -> None:
    bench.enqueue(60)
    stop = threading.Event()

    def clean() -> None:
        client = bench.server.client()
        while not stop.is_set():
            for queue in Queue.all(connection=client, serializer="json"):
                clean_registries(queue)
                StartedJobRegistry(queue.name, connection=client, serializer="json").cleanup(timestamp=4e9)
                queue.intermediate_queue.cleanup(Worker([queue], connection=client), queue)
                assert queue.count >= 0
        client.close()

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    worker, uploader = bench.gpu_worker(), bench.uploader()
    held = worker.claim(5)
    assert bench.run_all(worker) == 55
    for claim in held:
        worker.publish(claim, shard(claim))
    assert bench.upload_all(uploader) == 60
    stop.set()
    for cleaner in cleaners:
        cleaner.join()
    assert Ledger(bench.client, "run").totals().num_batches == 60
    assert bench.client.zcard(f"rq:failed:{EXTRACT}") == 0


def test_finished_jobs_leave_after_their_time(bench: Bench) -> None:
    settings = FAST.model_copy(update={"finished_seconds": 1})
    bench.enqueue(2)
    worker, uploader = bench.gpu_worker(settings=settings), bench.uploader(settings=settings)
    bench.run_all(worker)
    wait_until(lambda: bench.client.ttl("rq:job:run-000000") == -1)  # not before its commit
    bench.upload_all(uploader)
    bench.client.delete("hiddenq:swept")
    wait_until(lambda: not bench.client.keys("rq:job:*") and not bench.client.keys("rq:results:*"))
    bench.client.delete("hiddenq:swept")
    wait_until(lambda: not bench.client.zcard(f"rq:finished:{EXTRACT}"))
