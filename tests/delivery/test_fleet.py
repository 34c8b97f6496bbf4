"""What the fleet's snapshot says, and what draining and forgetting mean."""

from __future__ import annotations

import json

import pytest

from hiddenq.contracts import names
from hiddenq.contracts.errors import NonFiniteStates, RunMismatch, UsageError
from hiddenq.contracts.manifest import SelfCheck
from hiddenq.contracts.messages import BatchJob
from hiddenq.delivery import (
    Consumer,
    LocationLock,
    batch_seconds,
    drain,
    fleet,
    forget,
    list_runs,
    load_run,
    mark_finished,
    record_self_check,
    run_state,
    save_run,
    self_checks,
    worker_name,
)
from tests.delivery.conftest import FAST, SPOOL, Bench, entry, record, report, shard
from tests.support.waiting import wait_until


def test_a_snapshot_counts_every_job_once_and_changes_nothing(bench: Bench) -> None:
    bench.enqueue(8)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    published, committed, delayed, dead, _running = worker.claim(5)
    for claim in (committed, published):
        worker.publish(claim, shard(claim))
    [upload] = uploader.claim()
    uploader.commit(upload, entry(upload.message))
    worker.fail(delayed, RuntimeError("x"))
    worker.fail(dead, NonFiniteStates("x"))
    keys = sorted(bench.client.keys("rq:*"))
    seen = fleet(bench.client)
    assert sorted(bench.client.keys("rq:*")) == keys
    extract, upload_queue = seen.queues
    assert (extract.num_waiting, extract.num_started, extract.num_delayed, extract.num_dead) == (3, 1, 1, 1)
    assert (extract.run, extract.spool_id) == ("run", None)
    assert 0 <= extract.oldest_seconds < 20
    assert (upload_queue.num_waiting, upload_queue.run, upload_queue.spool_id) == (1, None, SPOOL)
    [run] = seen.runs
    assert (run.state, run.totals.num_batches, run.num_dead, run.is_complete) == ("live", 1, 1, False)
    assert {(status.report.role, status.live, status.drained) for status in seen.workers} == {
        ("gpu_worker", True, False),
        ("uploader", True, False),
    }
    assert [(spool.spool_id, spool.alive) for spool in seen.spools] == [(SPOOL, True)]
    assert seen.memory_bytes > 0


def test_a_dead_worker_stays_expected_until_it_is_forgotten(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    worker._keeper.close()
    status = wait_until(lambda: [status for status in fleet(bench.client).workers if not status.live])[0]
    assert status.report.host == "h"
    assert status.age_seconds > FAST.lease_seconds
    assert forget(bench.client, "h") == 1
    assert fleet(bench.client).workers == ()


def test_a_worker_that_ended_because_its_work_was_done_is_not_expected_back(bench: Bench) -> None:
    worker = bench.gpu_worker()
    worker.close(withdraw=True)
    assert fleet(bench.client).workers == ()


def test_a_drained_host_finishes_what_it_holds_and_starts_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENQ_HOST", "h")
    bench.enqueue(3)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    assert drain(bench.client, "h") == 1
    wait_until(worker.stopping.is_set)
    assert worker.claim() == []
    worker.publish(claim, shard(claim))
    assert all(status.drained for status in fleet(bench.client).workers)
    again = Consumer(
        bench.client,
        names.extract_queue("run"),
        BatchJob,
        name=worker_name("gpu"),
        settings=FAST,
        report=lambda: report("gpu_worker"),
    )
    with pytest.raises(UsageError, match="host h is drained; `hiddenq forget h` lets it work again"):
        again.start()
    forget(bench.client, "h")
    with again:
        assert again.claim()


def test_runs_are_found_by_name_or_because_there_is_only_one(bench: Bench) -> None:
    with pytest.raises(UsageError, match=r"no run is live here; start one with `hiddenq run` or `hiddenq produce`$"):
        load_run(bench.client)
    first, second = record("first"), record("second")
    save_run(bench.client, first)
    assert load_run(bench.client) == first
    save_run(bench.client, second)
    with pytest.raises(UsageError, match="live runs are first, second"):
        load_run(bench.client)
    with pytest.raises(UsageError, match="--run third: Redis knows no such run; it knows first, second"):
        load_run(bench.client, "third")
    mark_finished(bench.client, "first")
    assert load_run(bench.client) == second
    assert run_state(bench.client, "first") == "finished"
    assert run_state(bench.client, "third") is None
    assert list_runs(bench.client) == [first, second]


UNREADABLE = {
    "no JSON": ("{", r"record: Invalid JSON"),
    "a bomb": ("[" * 100_000, r"record: Invalid JSON"),
    "other fields": ('{"x": 1}', r"config: Field required"),
    "another run's": (record("other").model_dump_json(), "it is that of run other"),
    "a newer one": (
        record("broken").model_dump_json().replace('"schema_version":1', '"schema_version":2'),
        "version 2",
    ),
    "another type": (None, "hiddenq:run:broken in Redis holds a list, where hiddenq keeps a hash"),
    "nothing": ("", "Redis knows no such run; it knows whole"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_run_whose_record_nobody_can_read_troubles_no_other_run(bench: Bench, kind: str) -> None:
    content, why = UNREADABLE[kind]
    save_run(bench.client, whole := record("whole"))
    bench.client.sadd("hiddenq:runs", "broken")
    if content is None:
        bench.client.rpush("hiddenq:run:broken", "x")
    else:
        bench.client.hset("hiddenq:run:broken", mapping={"record": content, "state": "live"})
    assert list_runs(bench.client) == [whole] == [load_run(bench.client)]
    assert [run.record for run in fleet(bench.client).runs] == [whole]
    with pytest.raises(UsageError, match=f"--run broken: .*{why}"):
        load_run(bench.client, "broken")
    if content is not None:
        save_run(bench.client, record("broken"))
        assert load_run(bench.client, "broken") == record("broken"), "starting it again mends it"


def test_self_checks_and_batch_times_are_kept_with_the_run(bench: Bench) -> None:
    bench.enqueue(3)
    check = SelfCheck(
        batch_id="000001", sample_id=2, num_tokens=5, padded_length=8, worker="w", max_relative_difference=1e-6,
        worst_layer="3",
    )  # fmt: skip
    record_self_check(bench.client, "run", check)
    assert self_checks(bench.client, "run") == [check]
    bench.run_all(bench.gpu_worker())
    assert len(batch_seconds(bench.client, "run")) == 3
    assert all(0 <= seconds < 20 for seconds in batch_seconds(bench.client, "run"))


def lock(bench: Bench, location: str = "s3://bucket/run") -> LocationLock:
    return LocationLock(bench.client, location, settings=FAST, command="hiddenq worker --redis-url redis://host")


def test_the_second_run_on_a_location_is_told_who_has_it_and_how_to_join(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock(bench), lock(bench, "s3://bucket/other"):
        monkeypatch.setenv("HIDDENQ_HOST", "another-host")
        text = r"s3://bucket/run is being run by process \d+ on .*; to join it: hiddenq worker --redis-url redis://host"
        with pytest.raises(RunMismatch, match=text) as caught, lock(bench):
            pass
        assert caught.value.exit_status == 2
        begun = fleet(bench.client).now
        wait_until(lambda: fleet(bench.client).now > begun + 1.5 * FAST.lease_seconds)
        with pytest.raises(RunMismatch), lock(bench):
            pass
    with lock(bench):
        pass


def test_a_location_is_free_at_once_when_its_owner_on_this_host_is_gone(bench: Bench) -> None:
    first = lock(bench)
    first.__enter__()
    first._closing.set()
    value = json.dumps({**json.loads(first._value), "pid": 4_194_399})  # above the largest pid
    bench.client.set("hiddenq:owner:s3://bucket/run", value)
    with lock(bench):
        pass
