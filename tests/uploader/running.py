"""An uploader in a thread or a process of its own, and the invariant that every test ends on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from hiddenq.contracts import names
from hiddenq.contracts.messages import ShardReady
from hiddenq.delivery import Consumer, DeliverySettings, Ledger, connect, dead_letters, fleet, run_state, worker_name
from hiddenq.storage import ObjectStore, Spool, SpoolPresence
from hiddenq.storage.runfiles import load_manifest
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.small_run import FAST, SmallRun
from uploader import UploaderSettings
from uploader.service import Uploader
from uploader.status import UploaderStatus


class RunningUploader:
    """An uploader in a thread."""

    def __init__(
        self, server: RedisServer, spool: Spool, *, delivery: DeliverySettings = FAST, **settings: Any
    ) -> None:
        self.client = connect(server.url)
        self.registry = CollectorRegistry()
        name = worker_name("uploader")
        self.status = UploaderStatus(self.registry, spool, index=0, name=name)
        self.consumer = Consumer(
            self.client,
            names.upload_queue(spool.spool_id),
            ShardReady,
            name=name,
            settings=delivery,
            report=self.status.report,
            presence=SpoolPresence(spool.folder, spool.spool_id),
        )
        options = {"spool": spool.folder, "metrics_port": 0, "reconcile_seconds": 0.5, "nice": 0, **settings}
        self.uploader = Uploader(self.client, self.consumer, spool, self.status, UploaderSettings(**options))
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)

    def start(self) -> None:
        self.consumer.start()
        self._thread.start()

    def stop(self) -> None:
        self.consumer.stopping.set()
        self._thread.join()
        self.consumer.close()
        self.client.close()

    def join(self) -> BaseException | None:
        """Wait for its end; returns what it ended with."""
        self._thread.join(30)
        return self.error

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"hiddenq_uploader_{name}", labels) or 0.0

    def _work(self) -> None:
        try:
            self.uploader.work()
        except BaseException as error:
            self.error = error


@contextmanager
def running_uploader(server: RedisServer, spool: Spool, **settings: Any) -> Iterator[RunningUploader]:
    """An uploader for the time of a `with` block."""
    running = RunningUploader(server, spool, **settings)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def finished(client: redis.Redis, run: SmallRun) -> None:
    """Wait for a run's end."""
    wait_until(lambda: run_state(client, run.name) == "finished", what="the run is finished")


def invariant_holds(client: redis.Redis, run: SmallRun, store: ObjectStore, spool: Spool) -> None:
    """Every batch in one committed shard, checksums match, spool empty, nothing left over, manifest complete."""
    entries = Ledger(client, run.name).entries()
    assert sorted(entries) == [batch.batch_id for batch in run.batches]
    assert sorted(info.key for info in store.list(names.STATES_PREFIX)) == sorted(
        entry.key for entry in entries.values()
    )
    for entry in entries.values():
        assert store.checksum(entry.key) == entry.checksum
    assert spool.files() == []
    assert spool.usage().num_bytes == 0
    assert [q for q in fleet(client).queues if q.num_waiting + q.num_started + q.num_delayed + q.num_dead] == []
    assert dead_letters(client, run.name) == []
    manifest = load_manifest(store)
    assert manifest is not None
    assert manifest.complete
    assert manifest.num_batches_committed == len(run.batches)
