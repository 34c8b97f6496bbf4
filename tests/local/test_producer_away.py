"""A Redis that goes away under the producer is waited for, at whatever step it is missed."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from hiddenq import produce as produce_module
from hiddenq.delivery import DeliverySettings, Ledger, connect
from hiddenq.produce import ProducerProcess, produce
from hiddenq.storage import LocalStore, Spool, StoreSettings
from producer import ProducerSettings
from producer.prepare import Prepared
from tests.local.conftest import chats, write_rows
from tests.support.redis_server import RedisServer, own_redis_server
from tests.support.waiting import wait_until
from tests.uploader.running import running_uploader
from tests.uploader.small_run import small_run

__all__ = ["own_redis_server"]


def knocks(port: int, num: int) -> None:
    """Return when somebody has tried so often to reach a Redis that is not there."""
    with contextlib.closing(socket.create_server(("127.0.0.1", port))) as listener:
        listener.settimeout(30)
        for _ in range(num):
            listener.accept()[0].close()


def has_enqueued(producer: ProducerProcess) -> bool:
    producer.poll()
    return not producer.is_enqueuing


@pytest.mark.slow
def test_a_producer_that_starts_again_while_redis_is_away_waits_and_enqueues(
    own_redis_server: RedisServer, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_URL", own_redis_server.url)
    monkeypatch.setenv("HIDDENQ_REDIS_WAIT_SECONDS", "0.1")
    data = write_rows(tmp_path / "chats.jsonl", chats(6))
    settings = ProducerSettings(model=str(models["llama"]), data=(str(data),), target_layers="1", processes=1)
    with ProducerProcess(settings, str(tmp_path / "out"), StoreSettings(), DeliverySettings()) as producer:
        record = producer.wait_for_record()
        wait_until(lambda: has_enqueued(producer))
        own_redis_server.kill()
        producer.start_again()
        knocks(own_redis_server.port, 4)
        producer.poll()
        assert producer.is_enqueuing, "it waits"
        own_redis_server.start()
        wait_until(lambda: has_enqueued(producer))
        assert producer.num_starts == 2
        assert producer.report is not None
        assert producer.report.num_held == record.config.num_batches, "what Redis kept is not queued again"


def test_a_redis_that_restarts_while_a_plan_is_made_costs_no_run(
    own_redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store, spool = small_run(num_batches=3), LocalStore(tmp_path / "out"), Spool.open(tmp_path / "spool")
    run.write(store)
    run.put_into_spool(spool, run.batches[0].job(run.name), "abcdef01")
    (store.folder / "states").mkdir()
    spool.path("000000-abcdef01.safetensors").rename(store.folder / "states" / "000000-abcdef01.safetensors")

    def come_back() -> None:
        knocks(own_redis_server.port, 2)
        own_redis_server.start()

    returning = threading.Thread(target=come_back)

    def prepare_while_redis_dies(*arguments: object) -> Prepared:
        own_redis_server.kill()
        returning.start()
        return Prepared(config=run.config, reused=True)

    monkeypatch.setattr(produce_module, "prepare", prepare_while_redis_dies)
    with contextlib.closing(connect(own_redis_server.url)) as client:
        settings = ProducerSettings(model="m", data=("d",))
        report = produce(settings, store, StoreSettings(), client, delivery=run.settings, progress=lambda *done: None)
        returning.join()
        assert (report.num_committed, report.num_enqueued) == (1, 2)
        assert set(Ledger(client, run.name).entries()) == {"000000"}
        run.extract(client, spool)
        with running_uploader(own_redis_server, spool):
            wait_until(lambda: Ledger(client, run.name).totals().num_batches == 3)
