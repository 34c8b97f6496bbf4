"""A ledger that someone changed by hand is mended from the store by the next start: nothing is lost or made twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from hiddenq import produce as produce_module
from hiddenq.contracts.errors import UnknownSchema
from hiddenq.delivery import EnqueueReport, Ledger
from hiddenq.produce import produce
from hiddenq.storage import LocalStore, Spool, StoreSettings
from producer import ProducerSettings
from producer.prepare import Prepared
from tests.support.logs import logged
from tests.support.redis_server import RedisServer, redis_client
from tests.uploader.running import finished, invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run

__all__ = ["redis_client"]

LEDGER, TOTALS = "hiddenq:run:small:ledger", "hiddenq:run:small:totals"
GARBAGE = [b"", b"{", b"\xff\xfe", b"null", b"[]", b"{}", b'{"schema_version": 1}', b'"text"']


@pytest.fixture
def run() -> SmallRun:
    return small_run(num_batches=3)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.open(tmp_path / "spool")


@pytest.fixture
def start(
    run: SmallRun, store: LocalStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], EnqueueReport]:
    """What `run` and `produce` do once a run is prepared."""
    monkeypatch.setattr(produce_module, "prepare", lambda *arguments: Prepared(config=run.config, reused=True))
    run.write(store)

    def begin() -> EnqueueReport:
        settings = ProducerSettings(model="m", data=("d",))
        return produce(
            settings, store, StoreSettings(), redis_client, delivery=run.settings, progress=lambda *done: None
        )

    return begin


@pytest.fixture
def complete(
    run: SmallRun, store: LocalStore, spool: Spool, redis_server: RedisServer, redis_client: redis.Redis
) -> Callable[[], None]:
    """What workers and uploaders do until the run's end; the invariant holds then."""

    def end() -> None:
        run.extract(redis_client, spool)
        with running_uploader(redis_server, spool):
            finished(redis_client, run)
        invariant_holds(redis_client, run, store, spool)

    return end


def test_an_entry_that_cannot_be_read_is_proved_in_the_store_again(
    start: Callable[[], EnqueueReport],
    complete: Callable[[], None],
    run: SmallRun,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start()
    complete()
    before = Ledger(redis_client, run.name).entries()
    for garbage in GARBAGE:
        redis_client.hset(LEDGER, "000001", garbage)
        report = start()
        assert (report.num_committed, report.num_enqueued) == (3, 0), f"nothing is made again: {garbage!r}"
        assert Ledger(redis_client, run.name).entries() == before
    told = logged(caplog, "ledger_entries_unreadable")
    assert [line["num_batches"] for line in told] == [1] * len(GARBAGE)
    assert told[0]["last"].startswith("batch 000001: LedgerEntry: not JSON"), told
    complete()


def test_an_entry_that_cannot_be_read_and_whose_shard_is_gone_is_made_again(
    start: Callable[[], EnqueueReport],
    complete: Callable[[], None],
    run: SmallRun,
    store: LocalStore,
    redis_client: redis.Redis,
) -> None:
    start()
    complete()
    store.delete(Ledger(redis_client, run.name).entries()["000001"].key)
    redis_client.hset(LEDGER, "000001", b"garbage")
    report = start()
    assert (report.num_committed, report.num_enqueued) == (2, 1)
    complete()


def test_an_entry_that_cannot_be_read_is_met_in_mid_run_and_its_batch_gets_the_shard_that_comes(
    start: Callable[[], EnqueueReport],
    run: SmallRun,
    store: LocalStore,
    spool: Spool,
    redis_server: RedisServer,
    redis_client: redis.Redis,
) -> None:
    start()
    run.extract(redis_client, spool)
    redis_client.hset(LEDGER, "000001", b"garbage")
    with running_uploader(redis_server, spool) as uploader:
        finished(redis_client, run)
        assert uploader.metric("files_total", result="committed") == 3
    invariant_holds(redis_client, run, store, spool)


def test_totals_are_counted_anew_by_each_start(
    start: Callable[[], EnqueueReport],
    complete: Callable[[], None],
    run: SmallRun,
    redis_client: redis.Redis,
) -> None:
    start()
    complete()
    ledger = Ledger(redis_client, run.name)
    before = ledger.totals()
    changes: dict[str, Callable[[], object]] = {
        "nonsense": lambda: redis_client.hset(TOTALS, "num_batches", "nonsense"),
        "too many": lambda: redis_client.hset(TOTALS, "num_batches", 99),
        "gone": lambda: redis_client.delete(TOTALS),
        "another type": lambda: (redis_client.delete(TOTALS), redis_client.set(TOTALS, "x")),
    }
    for name, change in changes.items():
        change()
        assert start().num_committed == 3
        assert ledger.totals() == before, name


def test_an_entry_of_a_newer_hiddenq_is_left_alone_and_said(
    start: Callable[[], EnqueueReport], run: SmallRun, redis_client: redis.Redis
) -> None:
    newer = json.dumps({"schema_version": 9})
    redis_client.hset(LEDGER, "000001", newer)
    with pytest.raises(UnknownSchema, match=f"{LEDGER} 000001: LedgerEntry: schema version 9 found"):
        start()
    assert redis_client.hget(LEDGER, "000001") == newer.encode()
