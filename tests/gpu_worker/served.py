"""Runs that a worker can serve: a tiny model, made-up samples, a real producer, a real Redis."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from gpu_worker import WorkerSettings, serve
from hiddenq.contracts import names
from hiddenq.contracts.run import RunConfig
from hiddenq.delivery import DeliverySettings, RunRecord, enqueue, fleet, save_run
from hiddenq.storage import ObjectStore, Spool, StoreSettings, open_store
from hiddenq.storage.runfiles import load_batches
from producer import ProducerSettings, prepare
from tests.support.waiting import wait_until

FAST = DeliverySettings(
    lease_seconds=3.0, renew_seconds=0.5, reap_seconds=0.2, retry_delays=(0.1,), max_attempts=2,
    stage_seconds={"gpu": 60.0},
)  # fmt: skip
LENGTHS = (90, 3, 40, 8, 17, 60, 40, 33, 12, 5, 1, 75, 20, 28)
"""Of a run's samples, where a test names no others."""


@dataclass(kw_only=True)
class Served:
    """One run, enqueued, and where its shards go."""

    config: RunConfig
    record: RunRecord
    store: ObjectStore
    spool: Spool
    settings: WorkerSettings
    client: redis.Redis

    @property
    def num_batches(self) -> int:
        """Batches of the run."""
        return self.config.num_batches

    def worker(self) -> Any:
        """What the worker last said of itself; None before it did."""
        found = [worker.report for worker in fleet(self.client).workers if worker.report.role == "gpu_worker"]
        return found[0] if found else None


def make_run(
    folder: Path,
    model: Path,
    redis_url: str,
    client: redis.Redis,
    lengths: Sequence[int],
    *,
    name: str = "run",
    delivery: DeliverySettings = FAST,
    token_budget: int = 160,
    **settings: Any,
) -> Served:
    """Plan a run over random samples of those lengths and enqueue it."""
    data = folder / f"{name}.jsonl"
    source = random.Random(0)
    rows = [{"input_ids": [source.randrange(3, 400) for _ in range(length)]} for length in lengths]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = open_store(folder / name)
    prepared = prepare(
        ProducerSettings(
            model=str(model),
            data=(str(data),),
            target_layers="0,2",
            token_budget=token_budget,
            max_length=token_budget,
            processes=1,
            run=name,
            **settings,
        ),
        store,
    )
    record = RunRecord(
        config=prepared.config,
        location=store.uri,
        store=StoreSettings().model_dump(mode="json"),
        delivery=delivery,
    )
    save_run(client, record)
    enqueue(client, record, (batch.job(record.run) for batch in load_batches(store)))
    spool = Spool.open(folder / "spool")
    return Served(
        config=prepared.config,
        record=record,
        store=store,
        spool=spool,
        settings=WorkerSettings(redis_url=redis_url, spool=folder / "spool", run=prepared.config.run),
        client=client,
    )


def serve_until(served: Served, condition: Callable[[], object], **changes: Any) -> int:
    """Serve in this process until a condition holds, then SIGTERM; returns the exit status."""
    failures: list[BaseException] = []

    def stop() -> None:
        try:
            wait_until(condition, seconds=40, what="the worker did not get there")
        except BaseException as error:
            failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=stop)
    watcher.start()
    try:
        return serve(served.settings.model_copy(update=changes))
    finally:
        watcher.join()
        if failures:
            raise failures[0]


def published(run: Served) -> dict[str, Path]:
    """Shards in the spool by batch."""
    return {entry.file_name.partition("-")[0]: run.spool.path(entry.file_name) for entry in run.spool.files()}


def queue_state(run: Served) -> Any:
    """The run's extract queue, as the fleet shows it."""
    wanted = names.extract_queue(run.config.run)
    return next(queue for queue in fleet(run.client).queues if queue.queue == wanted)


def assert_nothing_is_held(run: Served) -> None:
    """No job is started, no bytes are reserved: the invariant that every end of a worker keeps."""
    assert queue_state(run).num_started == 0
    assert run.spool.usage().reserved_bytes == 0
