"""Spool, queue, ledger and store compared: orphans are adopted or removed, and nothing that lives is touched."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis
import structlog
from structlog.testing import LogCapture

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.messages import ShardReady
from hiddenq.delivery import (
    KEEP_ENDED_SECONDS,
    Ledger,
    enqueue,
    execution_is_dead,
    mark_finished,
    save_run,
    spool_file_names,
)
from hiddenq.storage import LocalStore, Spool, StoreObserver
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.running import RunningUploader, finished, invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run
from uploader import UploaderSettings, reconcile
from uploader.reconcile import Reconciler
from uploader.runs import Runs
from uploader.upload import ledger_entry


@pytest.fixture
def run(redis_client: redis.Redis, store: LocalStore) -> SmallRun:
    made = small_run(num_batches=3)
    made.start(redis_client, store)
    return made


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """What is logged."""
    capture = LogCapture()
    monkeypatch.setattr(telemetry, "logger", lambda: structlog.wrap_logger(None, processors=[capture]))
    return capture


@pytest.fixture
def reconciler(redis_client: redis.Redis, spool: Spool, run: SmallRun, log: LogCapture) -> Reconciler:
    runs = Runs(redis_client, spool, UploaderSettings(spool=spool.folder), StoreObserver())

    def is_dead(execution: str) -> bool:
        return execution_is_dead(redis_client, execution, run.settings)

    return Reconciler(redis_client, spool, runs, run.settings, threading.Event(), is_dead)


def events(log: LogCapture) -> list[str]:
    return [entry["event"] for entry in log.entries if entry["event"] != "store_probed"]


def age(spool: Spool, shard: ShardReady, seconds: float = 100) -> None:
    """Make a file as old as one of a long dead execution."""
    when = time.time() - seconds
    os.utime(spool.path(shard.file_name), (when, when))


def orphan(run: SmallRun, spool: Spool, number: int, execution: str = "abcdef01") -> ShardReady:
    """A shard whose worker died between rename and publish, long ago."""
    shard = run.put_into_spool(spool, run.batches[number].job(run.name), execution)
    age(spool, shard)
    return shard


def test_an_orphan_of_an_open_batch_is_adopted_and_saves_the_gpu_its_work(
    redis_server: RedisServer, redis_client: redis.Redis, run: SmallRun, spool: Spool, store: LocalStore
) -> None:
    shards = [orphan(run, spool, number) for number in range(3)]
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    entries = Ledger(redis_client, run.name).entries()
    assert {entry.execution for entry in entries.values()} == {shard.execution for shard in shards}
    invariant_holds(redis_client, run, store, spool)


def test_a_redis_that_lost_everything_costs_no_shard_that_lies_in_the_spool(
    redis_server: RedisServer, redis_client: redis.Redis, run: SmallRun, spool: Spool, store: LocalStore
) -> None:
    shards = run.extract(redis_client, spool)
    redis_client.flushall()
    save_run(redis_client, run.record(store))
    enqueue(redis_client, run.record(store), [batch.job(run.name) for batch in run.batches])
    for shard in shards:
        age(spool, shard)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    assert {entry.checksum for entry in Ledger(redis_client, run.name).entries().values()} == {
        shard.checksum for shard in shards
    }
    invariant_holds(redis_client, run, store, spool)


def test_an_orphan_of_a_committed_batch_is_removed(
    redis_client: redis.Redis, reconciler: Reconciler, run: SmallRun, spool: Spool, log: LogCapture
) -> None:
    shard = orphan(run, spool, 0)
    other = shard.model_copy(update={"execution": "bbbbbbbb"})
    Ledger(redis_client, run.name).adopt([ledger_entry(names.shard_key("000000", "bbbbbbbb"), other)])
    reconciler.once()
    assert spool.files() == []
    assert "orphan_removed" in events(log)


def test_an_orphan_whose_batch_is_on_a_gpu_is_removed(
    redis_client: redis.Redis, reconciler: Reconciler, run: SmallRun, spool: Spool, log: LogCapture
) -> None:
    with run.worker(redis_client, spool) as consumer:
        (claim,) = consumer.claim(1)
        shard = orphan(run, spool, int(claim.message.batch_id))
        reconciler.once()
        assert spool.files() == []
        assert events(log) == ["orphan_removed"]
        assert shard.file_name not in spool_file_names(redis_client, spool.spool_id)
        consumer.hand_back(claim)


def test_what_a_living_execution_needs_is_never_touched(
    redis_client: redis.Redis, reconciler: Reconciler, run: SmallRun, spool: Spool
) -> None:
    with run.worker(redis_client, spool) as consumer:
        renamed, reserved, fresh = consumer.claim(3)
        shard = run.put_into_spool(spool, renamed.message, renamed.execution)  # renamed, not yet published
        age(spool, shard)
        name = names.shard_file_name(reserved.message.batch_id, reserved.execution)
        assert spool.reserve(name, 100) is not None
        temporary = spool.folder / f".tmp-{reserved.execution}-{name}"
        os.utime(temporary, (1, 1))
        young = run.put_into_spool(spool, fresh.message, "abcdef01")  # nobody's, but young
        reconciler.once()
        assert [entry.file_name for entry in spool.files()] == sorted([shard.file_name, young.file_name])
        assert temporary.exists()
        consumer.publish(renamed, shard)
        age(spool, shard, 1000)
        reconciler.once()
        assert shard.file_name in [entry.file_name for entry in spool.files()], "it waits for its upload"


def test_temporaries_of_dead_executions_are_removed(reconciler: Reconciler, spool: Spool, log: LogCapture) -> None:
    assert spool.reserve("000000-abcdef01.safetensors", 100) is not None
    temporary = spool.folder / ".tmp-abcdef01-000000-abcdef01.safetensors"
    reconciler.once()
    assert temporary.exists(), "it is young"
    os.utime(temporary, (1, 1))
    reconciler.once()
    assert not temporary.exists()
    assert events(log) == ["temporary_removed"]
    assert spool.usage().num_bytes == 0


def test_an_orphan_from_before_the_host_was_started_is_not_trusted(
    reconciler: Reconciler, run: SmallRun, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(run, spool, 0)
    monkeypatch.setattr(reconcile, "boot_time", lambda: time.time() - 50)
    reconciler.once()
    assert spool.files() == []


def test_boot_time_is_in_the_past() -> None:
    assert 0 < reconcile.boot_time() < time.time()


def test_an_orphan_that_is_damaged_or_of_an_unknown_run_is_set_aside(
    redis_client: redis.Redis, reconciler: Reconciler, run: SmallRun, spool: Spool, log: LogCapture
) -> None:
    damaged = orphan(run, spool, 0)
    spool.path(damaged.file_name).write_bytes(b"x" * 100)
    age(spool, damaged)
    stranger = small_run(name="stranger", num_batches=2)
    unknown = orphan(stranger, spool, 1)
    reconciler.once()
    assert [entry.file_name for entry in spool.files()] == [unknown.file_name], "the run may yet come back"
    assert (spool.folder / "quarantine" / damaged.file_name).exists()
    age(spool, unknown, 2 * reconcile.UNKNOWN_RUN_SECONDS)
    reconciler.once()
    assert spool.files() == []
    assert events(log) == ["orphan_damaged", "orphan_set_aside"]
    reason = (spool.folder / "quarantine" / f"{unknown.file_name}.reason").read_text()
    assert reason == "Redis knows no run 'stranger'\n"


def test_an_orphan_of_no_batch_of_its_run_is_removed(reconciler: Reconciler, run: SmallRun, spool: Spool) -> None:
    bigger = small_run(num_batches=4)
    orphan(bigger, spool, 3)
    reconciler.once()
    assert spool.files() == []


def test_a_run_whose_location_refuses_does_not_keep_the_others_from_being_looked_after(
    redis_client: redis.Redis,
    reconciler: Reconciler,
    run: SmallRun,
    spool: Spool,
    tmp_path: Path,
    log: LogCapture,
) -> None:
    broken = small_run(name="a-broken-one", num_batches=1)
    place = LocalStore(tmp_path / "broken")
    broken.start(redis_client, place)
    left = orphan(broken, spool, 0)
    place.delete(names.RUN_JSON)
    adopted = orphan(run, spool, 0, "bbbbbbbb")
    reconciler.once()
    assert events(log) == ["run_left_alone", "run_left_alone", "orphan_adopted"]
    assert spool_file_names(redis_client, spool.spool_id) == {adopted.file_name}
    assert spool.path(left.file_name).exists()


def test_a_dead_letters_shard_does_not_fill_the_spool_even_if_its_uploader_died_before_it_could_set_it_aside(
    redis_client: redis.Redis,
    reconciler: Reconciler,
    run: SmallRun,
    spool: Spool,
    redis_server: RedisServer,
    log: LogCapture,
) -> None:
    (shard,) = run.extract(redis_client, spool, limit=1)
    running = RunningUploader(redis_server, spool)
    with closing(running.client), running.consumer as consumer:
        for _ in range(run.settings.max_attempts):
            (claim,) = wait_until(lambda: consumer.claim(1))
            consumer.fail(claim, RuntimeError("a fault of ours"))
        reconciler.once()
    assert "dead_upload_set_aside" in events(log)
    assert spool.files() == []
    assert (spool.folder / "quarantine" / shard.file_name).exists()


def test_what_waits_in_a_spool_is_adopted_at_once_when_redis_lost_its_data_and_not_made_again(
    redis_client: redis.Redis, reconciler: Reconciler, run: SmallRun, store: LocalStore, spool: Spool
) -> None:
    shards = run.extract(redis_client, spool, limit=2)
    reconciler.once()
    redis_client.flushall()
    save_run(redis_client, run.record(store))
    reconciler.once()
    assert spool_file_names(redis_client, spool.spool_id) == {shard.file_name for shard in shards}
    report = enqueue(redis_client, run.record(store), [batch.job(run.name) for batch in run.batches])
    assert (report.num_held, report.num_enqueued) == (2, len(run.batches) - 2)


def test_a_run_that_ended_is_closed_after_a_while_and_opened_again_when_it_is_asked_for(
    redis_client: redis.Redis, spool: Spool, run: SmallRun
) -> None:
    now = [0.0]
    settings = UploaderSettings(spool=spool.folder)
    runs = Runs(redis_client, spool, settings, StoreObserver(), clock=lambda: now[0])
    opened = runs.get(run.name)
    now[0] += KEEP_ENDED_SECONDS
    runs.let_go()
    assert runs.get(run.name) is opened, "it goes on"
    mark_finished(redis_client, run.name)
    runs.let_go()
    assert runs.get(run.name) is opened, "its last upload may be under way"
    now[0] += KEEP_ENDED_SECONDS
    runs.let_go()
    assert runs.opened() == {}
    assert runs.get(run.name).config == opened.config
