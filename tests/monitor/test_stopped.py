"""A run with its own Redis is called stopped when nothing brings it further, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO

import pytest
import redis
from rich.console import Console

from hiddenq import telemetry
from hiddenq.delivery import LocationLock, cancel, mark_finished
from hiddenq.delivery.whereabouts import whereabouts
from hiddenq.monitor import Embedded, RunStatus, render, run_status
from tests.monitor.made_fleet import MadeWorker, made_fleet, made_record, start_run

GONE = Embedded(is_running=False, logs="/out/.hiddenq/logs")
RUNNING = Embedded(is_running=True, logs="/out/.hiddenq/logs")


def shown(status: RunStatus) -> str:
    text = StringIO()
    Console(width=200, file=text).print(render(status))
    return text.getvalue()


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_its_processes_said_a_moment_before_they_were_killed_counts_for_nothing(
    redis_client: redis.Redis, dead_pid: int
) -> None:
    with made_fleet(redis_client, made_record()) as (worker, uploader):
        worker.extract()
        uploader.upload()
        worker.say(pid=dead_pid, state="busy", tokens_per_second=50.0)
        status = run_status(redis_client, embedded=GONE)
        assert (status.state, status.rate, status.eta_seconds) == ("stopped", None, None)
        (problem,) = status.problems
        assert problem.severity == "info"
        assert problem.what == "no process runs it; 5 batches left"
        assert problem.do == "type the same `hiddenq run` again: it goes on from here"
        assert "demo  stopped  " in shown(status)
        assert "4 of 24 samples, 1 of 6 batches" in shown(status)
        assert "left, done at" not in shown(status)


def test_one_that_a_worker_joined_goes_on_when_its_run_is_killed(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, _):
        worker.say(pid=os.getpid(), state="busy")
        assert run_status(redis_client, embedded=GONE).state == "live"
        worker.say(state="draining")
        assert run_status(redis_client, embedded=GONE).state == "stopped", "it was told to stop"


def test_one_that_was_cancelled_says_so_and_names_no_end(redis_client: redis.Redis) -> None:
    record = made_record()
    with made_fleet(redis_client, record) as (worker, _):
        worker.say(state="busy", tokens_per_second=50.0)
        cancel(redis_client, record.run)
        for embedded in (None, RUNNING, GONE):
            status = run_status(redis_client, record.run, embedded=embedded)
            assert (status.state, status.rate, status.eta_seconds, status.problems) == ("cancelled", None, None, ())
            assert "demo  cancelled  " in shown(status)
            assert "the same `hiddenq run` or `hiddenq produce` enqueues what is left again" in shown(status)


def test_one_whose_batches_are_all_committed_lacks_its_manifest_until_that_is_written(
    redis_client: redis.Redis,
) -> None:
    record = made_record(num_batches=1)
    with made_fleet(redis_client, record) as (worker, uploader):
        worker.extract()
        uploader.upload()
    status = run_status(redis_client, embedded=GONE)
    assert status.state == "stopped"
    assert "only its index and manifest are missing" in shown(status)
    mark_finished(redis_client, record.run)
    status = run_status(redis_client, record.run, embedded=GONE)
    assert (status.state, status.problems) == ("finished", ())
    assert "demo  complete  " in shown(status)


def test_a_living_run_with_its_own_redis_is_not_told_to_start_what_it_starts_itself(redis_client: redis.Redis) -> None:
    start_run(redis_client, made_record())
    (problem,) = run_status(redis_client, embedded=RUNNING).problems
    assert problem.what == "batches wait, but no GPU worker is alive"
    assert problem.do == "`hiddenq run` starts it again by itself; its log in /out/.hiddenq/logs says why it ended"


def test_one_that_died_beside_others_of_its_host_takes_none_of_them_away(redis_client: redis.Redis) -> None:
    record, host = made_record(), telemetry.host_name()
    with made_fleet(redis_client, record) as (worker, _):
        other = MadeWorker(redis_client, record, "cuda:1")
        with other.consumer:
            worker.say(state="draining")
            worker.consumer.close()
            redis_client.zadd("hiddenq:workers:seen", {f"gpu_worker:{worker.report().target}": 1.0})
            (problem,) = run_status(redis_client).problems
            assert "was told to stop, and ended" in problem.what
            assert "start it again (`hiddenq worker`)" in problem.do
            assert "drain" not in problem.do
            assert f"`hiddenq forget {host}` (those that live there are listed again" in problem.do


def test_an_owner_whose_process_is_gone_holds_no_location(redis_client: redis.Redis, dead_pid: int) -> None:
    key = "hiddenq:owner:/out"
    redis_client.set(key, json.dumps(whereabouts()))
    assert LocationLock.is_held(redis_client, "/out")
    redis_client.set(key, json.dumps({**whereabouts(), "pid": dead_pid}))
    assert not LocationLock.is_held(redis_client, "/out")
    redis_client.delete(key)
    assert not LocationLock.is_held(redis_client, "/out")
