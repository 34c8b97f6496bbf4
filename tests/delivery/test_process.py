"""Promises about whole processes: signals, kill -9, SIGSTOP, hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddenq.delivery import Reaper, dead_letters
from tests.delivery.conftest import FAST, Bench, batch
from tests.delivery.test_crafted import packed
from tests.support.waiting import wait_until

QUEUE = "rq:queue:hiddenq-extract-run"
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(bench: Bench, mode: str, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process that holds its claims; `environment` is added to its own."""
    command = [sys.executable, "-m", "tests.delivery.process", bench.server.bare_url, bench.server.password, mode]
    child = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        if mode != "newer":
            assert child.stdout.readline() == "holding\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def queued(bench: Bench) -> int:
    return int(bench.client.llen(QUEUE))


def test_sigterm_finishes_what_is_held_and_claims_no_more(bench: Bench) -> None:
    bench.enqueue(5)
    with process(bench, "hold", "0.3") as child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
    assert queued(bench) == 2
    assert [bench.status(f"run-{number:06d}") for number in range(5)] == ["finished"] * 3 + ["queued"] * 2


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_hands_back_and_exits_at_once_even_from_native_code(
    bench: Bench, signum: signal.Signals, status: int
) -> None:
    bench.enqueue(5)
    with process(bench, "native") as child:
        child.send_signal(signum)
        time.sleep(0.2)
        child.send_signal(signum)  # the same Ctrl-C, once more by the supervisor
        time.sleep(1.2)
        assert child.poll() is None
        began = time.monotonic()
        child.send_signal(signum)
        assert child.wait(10) == status
    assert time.monotonic() - began < 2
    assert queued(bench) == 5
    assert {claim.attempt for claim in bench.gpu_worker().claim(5)} == {1}


def test_a_process_told_to_stop_ends_even_if_its_redis_does_not_come_back(own_bench: Bench) -> None:
    own_bench.enqueue(3)
    with process(own_bench, "hold") as child:
        own_bench.server.kill()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 143
    own_bench.server.start()
    with Reaper(own_bench.client, FAST):
        wait_until(lambda: queued(own_bench) == 3)


def test_kill_9_at_the_gpu_returns_all_batches_in_time_and_charges_the_one(bench: Bench) -> None:
    bench.enqueue(5)
    with Reaper(bench.client, FAST), process(bench, "hold") as child:
        time.sleep(FAST.lease_seconds)
        child.kill()
        child.wait()
        began = time.monotonic()
        wait_until(lambda: queued(bench) == 5)
    assert time.monotonic() - began < FAST.lease_seconds + FAST.renew_seconds + FAST.reap_seconds + 0.5
    attempts = {claim.message.batch_id: claim.attempt for claim in bench.gpu_worker().claim(5)}
    assert attempts == {"000000": 2, "000001": 1, "000002": 1, "000003": 1, "000004": 1}


def test_a_process_stopped_past_its_lease_and_continued_has_its_results_refused(bench: Bench) -> None:
    bench.enqueue(3)
    with Reaper(bench.client, FAST), process(bench, "hold") as child:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: queued(bench) == 3)
        bench.run_all(bench.gpu_worker())
        os.kill(child.pid, signal.SIGCONT)
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 1
        assert child.stderr is not None
        assert "lost its lease to another one" in child.stderr.read()
    [*files] = bench.client.hvals("hiddenq:spool:00000000-0000-4000-8000-000000000001:files")
    assert len(files) == 3


def test_a_stage_past_its_deadline_ends_the_process_with_all_threads_tracebacks(bench: Bench) -> None:
    bench.enqueue(5)
    with process(bench, "stall") as child:
        assert child.wait(10) == 70
    assert queued(bench) == 4  # the innocents, at once; the other one waits for its next attempt
    assert bench.client.hget("rq:job:run-000000", "attempts") == b"1"
    assert [bench.client.hget(f"rq:job:run-{number:06d}", "attempts") for number in (1, 2)] == [None, None]
    for _ in range(FAST.max_attempts - 1):
        [claim] = wait_until(lambda: [c for c in bench.gpu_worker().claim(5) if c.message.batch_id == "000000"])
        bench.gpu_worker().fail(claim, RuntimeError("again"))
    [letter] = dead_letters(bench.client, "run")
    assert letter.attempts[0].error.startswith("StageDeadline: ")
    assert "time.sleep" in letter.attempts[0].traceback or "in main" in letter.attempts[0].traceback


def test_a_newer_message_ends_the_process_with_status_2_and_one_line(bench: Bench) -> None:
    bench.enqueue(1)
    newer = packed(keywords={**batch(0).model_dump(mode="json"), "schema_version": 9})
    bench.client.hset("rq:job:run-000000", "data", newer)
    with process(bench, "newer") as child:
        assert child.wait(10) == 2
        assert child.stderr is not None
        last = child.stderr.read().strip().splitlines()[-1]
    assert last == "BatchJob: schema version 9 found, this hiddenq knows 1; use the same hiddenq everywhere"
    assert queued(bench) == 1
