"""Hosts whose clocks are an hour apart, and a Redis whose clock jumps: nobody is called dead early, no retry lost."""

from __future__ import annotations

import ast
import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rq.job import Job

from hiddenq import delivery
from hiddenq.delivery import fleet
from hiddenq.delivery.transitions import Transitions
from tests.delivery.conftest import FAST, Bench, entry, shard
from tests.delivery.test_process import process
from tests.support.faketime import JumpingClock, clock
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}


def test_no_module_of_delivery_reads_the_hosts_clock() -> None:
    for path in Path(delivery.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in WALL_CLOCKS, f"{path.name}:{node.lineno}"


def test_times_shown_by_rqs_tools_are_the_redis_servers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rq.job.now", lambda: datetime(2001, 1, 1, tzinfo=UTC))  # a host whose clock is odd
    bench.enqueue(1)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    [claim] = worker.claim()
    worker.publish(claim, shard(claim))
    [upload] = uploader.claim()
    uploader.commit(upload, entry(upload.message))
    for job_id in (claim.job_id, upload.job_id):
        job = Job.fetch(job_id, connection=bench.client, serializer="json")
        for moment in (job.created_at, job.enqueued_at, job.started_at, job.ended_at):
            assert moment is not None
            assert abs(moment.timestamp() - time.time()) < 60
    assert abs(fleet(bench.client).now - time.time()) < 60


def queued(bench: Bench) -> int:
    return int(bench.client.llen("rq:queue:hiddenq-extract-run"))


def test_real_processes_two_hours_apart_hold_their_leases_and_wake_retries_in_time(bench: Bench) -> None:
    bench.enqueue(7)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(process(bench, "hold", **clock(hours=hours))) for hours in (1, -1)]
        mine = bench.gpu_worker(settings=FAST.model_copy(update={"reap_seconds": 600.0}))  # only the others reap
        [claim] = mine.claim()
        began = fleet(bench.client).now
        assert mine.fail(claim, RuntimeError("once")) == "retry"
        wait_until(lambda: queued(bench) == 1, what="someone whose clock is wrong wakes it")
        assert FAST.retry_delays[0] <= fleet(bench.client).now - began < FAST.lease_seconds + 3
        wait_until(lambda: fleet(bench.client).now > began + 3 * FAST.lease_seconds)
        assert queued(bench) == 1, "no lease of a living process was reaped"
        for child in children:
            child.terminate()
            _, errors = child.communicate(timeout=60)
            assert child.returncode == 0, errors
    assert [bench.status(f"run-{number:06d}") for number in range(6)] == ["finished"] * 6
    assert {bench.client.hget(f"rq:job:run-{number:06d}", "attempts") for number in range(6)} == {None}


@pytest.mark.parametrize("jump_seconds", [3600, -3600])
def test_a_real_redis_whose_clock_jumps_loses_no_lease_and_no_retry(tmp_path: Path, jump_seconds: float) -> None:
    redis_clock = JumpingClock(tmp_path / "clock")
    with contextlib.ExitStack() as stack:
        server = RedisServer(tmp_path / "redis", environment=redis_clock.environment)
        stack.callback(server.stop)
        bench = Bench(server, stack)
        settings = FAST.model_copy(update={"retry_delays": (3.0, 3.0)})
        bench.enqueue(4, settings=settings)
        worker, other = bench.gpu_worker(settings=settings), bench.gpu_worker(settings=settings)
        *held, failed = worker.claim(3)
        for claim in held:
            worker.enter(claim, "gpu")
        [dead] = Transitions(bench.client, settings).claim(
            "hiddenq-extract-run", worker="dead", host="gone", executions=["00000001"]
        )
        assert worker.fail(failed, RuntimeError("once")) == "retry"
        before = fleet(bench.client).now
        redis_clock.jump(jump_seconds)
        wait_until(lambda: abs(fleet(bench.client).now - before) > 3000, what="the clock has jumped")
        back = [wait_until(lambda: other.claim(1), what="the retry or the dead one's, twice")[0] for _ in range(2)]
        assert {claim.job_id for claim in back} == {failed.job_id, dead.job_id}
        for holder, claims in ((worker, held), (other, back)):
            for claim in claims:
                holder.enter(claim, "gpu")
                holder.publish(claim, shard(claim))
        assert {bench.client.hget(f"rq:job:{claim.job_id}", "attempts") for claim in held} == {None}
