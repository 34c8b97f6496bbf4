"""When `run` gives up: with the reason, once nothing alive can go on, and never before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import redis

from hiddenq import watch
from hiddenq.contracts.errors import HiddenqError, RetryableError, StoreAway, UsageError
from hiddenq.delivery import cancel
from hiddenq.delivery.connection import never_again
from hiddenq.watch import Watch
from tests.delivery.conftest import Bench, record, report
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

STUCK_SECONDS = 0.2


@dataclass
class Processes:
    """What the watch asks of a supervisor."""

    is_starting: bool = False
    withdrawn: dict[str, str] = field(default_factory=dict)
    only_misconfigured: bool = False


@pytest.fixture
def bench(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(watch, "STUCK_SECONDS", STUCK_SECONDS)
    with ExitStack() as stack:
        yield Bench(redis_server, stack)


def watched(bench: Bench, processes: Processes) -> Watch:
    watch_ = Watch(bench.client, bench.enqueue(3), processes)
    assert watch_.reason(0, enqueuing=False) is None, "the first look sees something move"
    return watch_


def given_up(watch_: Watch, **options: bool) -> HiddenqError:
    """What it is given up with, after it was stuck for a while."""
    began = time.monotonic()
    reason = wait_until(lambda: watch_.reason(0, **{"enqueuing": False, **options}))
    assert time.monotonic() - began >= STUCK_SECONDS
    return reason


def test_a_run_without_workers_is_given_up_with_the_reason_even_while_it_is_still_enqueued(bench: Bench) -> None:
    for enqueuing in (False, True):
        reason = given_up(watched(bench, Processes()), enqueuing=enqueuing)
        assert isinstance(reason, RetryableError)
        assert "batches of run run wait, and no GPU worker that could take them is alive; the same" in str(reason)


def test_a_process_that_is_starting_is_waited_for(bench: Bench) -> None:
    processes = Processes(is_starting=True)
    watch_ = watched(bench, processes)
    end = time.monotonic() + 3 * STUCK_SECONDS
    while time.monotonic() < end:
        assert watch_.reason(0, enqueuing=False) is None
        time.sleep(0.02)
    processes.is_starting = False
    given_up(watch_)


def test_a_commit_or_a_living_fleet_starts_the_wait_anew(bench: Bench) -> None:
    watch_ = watched(bench, Processes())
    end = time.monotonic() + 3 * STUCK_SECONDS
    while time.monotonic() < end:
        assert watch_.reason(time.monotonic(), enqueuing=False) is None, "something is committed at every look"
        time.sleep(0.02)
    bench.gpu_worker()
    bench.uploader()
    end = time.monotonic() + 3 * STUCK_SECONDS
    while time.monotonic() < end:
        assert watch_.reason(0, enqueuing=False) is None
        time.sleep(0.02)


def test_workers_that_are_told_nonsense_end_a_run_at_once_and_as_a_wrong_setting(bench: Bench) -> None:
    watch_ = watched(bench, Processes(is_starting=True, withdrawn={"worker-cpu": "no model"}, only_misconfigured=True))
    reason = watch_.reason(0, enqueuing=False)
    assert isinstance(reason, UsageError)
    assert str(reason) == "run: worker-cpu was given up: no model"
    assert watch_.is_final


def test_a_cancelled_run_ends_once_what_was_begun_is_done(bench: Bench) -> None:
    watch_ = watched(bench, Processes())
    worker, uploader = bench.gpu_worker(), bench.uploader()
    [claim] = worker.claim(1)
    assert cancel(bench.client, "run") == 2
    assert watch_.reason(0, enqueuing=False) is None, "a batch is on its way"
    worker.hand_back(claim)
    reason = watch_.reason(0, enqueuing=False)
    assert str(reason) == "run: it was cancelled; the same command goes on from here"
    assert watch_.is_final, "comparing the plan with the queue would make it live again"
    uploader.close()


def test_a_redis_that_lost_the_run_is_told_from_one_that_is_away(bench: Bench) -> None:
    watch_ = watched(bench, Processes())
    assert not watch_.is_unknown()
    bench.client.flushall()
    assert watch_.is_unknown()
    nowhere = redis.Redis(port=free_port(), retry=never_again())
    away = Watch(nowhere, record("run"), Processes())
    assert not away.is_unknown()
    assert away.reason(0, enqueuing=False) is away.reason(0, enqueuing=False) is None


def test_batches_that_no_queue_holds_are_a_reason_unless_more_are_coming(bench: Bench) -> None:
    watch_ = watched(bench, Processes())
    bench.client.delete("rq:queue:hiddenq-extract-run")
    assert watch_.reason(0, enqueuing=True) is None
    assert "no queue holds what is left of it" in str(given_up(watch_))
    assert not watch_.is_final


@pytest.mark.parametrize("role", ["uploader", "gpu_worker"])
def test_a_run_whose_store_lets_nothing_in_for_an_hour_ends_with_the_reason_and_a_commit_begins_it_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(watch, "OUTAGE_SECONDS", 1.0)
    waits = report(role).model_copy(update={"run": "run", "state": "waiting", "detail": "run run waits: AccessDenied"})
    watch_ = watched(bench, Processes())
    if role == "uploader":
        bench.run_all(bench.gpu_worker())
        bench.uploader(report=lambda: waits)
    else:
        bench.gpu_worker(report=lambda: waits)
        bench.uploader()
    began = time.monotonic()
    reason = wait_until(lambda: watch_.reason(0, enqueuing=False))
    assert time.monotonic() - began >= 1.0
    assert isinstance(reason, StoreAway)
    assert "minutes: run run waits: AccessDenied; what is finished waits in the spool" in str(reason)
    assert watch_.is_final, "comparing the plan with the queue would not mend it"
    assert watch_.reason(1, enqueuing=False) is watch_.reason(1, enqueuing=False) is None
