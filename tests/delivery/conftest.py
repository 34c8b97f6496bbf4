"""Fixtures of the delivery tests: durations scaled down, invented batches and shards, a shared invariant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from hiddenq.contracts import names
from hiddenq.contracts.messages import BatchJob, LedgerEntry, ShardReady
from hiddenq.contracts.reports import WorkerReport
from hiddenq.contracts.run import DatasetIdentity, ModelIdentity, RunConfig, TokenizerIdentity
from hiddenq.delivery import (
    Claim,
    Consumer,
    DeliverySettings,
    RunRecord,
    connect,
    enqueue,
    save_run,
    worker_name,
)
from hiddenq.delivery.connection import text
from tests.support.redis_server import RedisServer, own_redis_server, redis_client, redis_server, shared_redis_server
from tests.support.small_disk import small_disk

__all__ = ["own_redis_server", "redis_client", "redis_server", "shared_redis_server", "small_disk"]

FAST = DeliverySettings(
    lease_seconds=1.2,
    renew_seconds=0.2,
    reap_seconds=0.2,
    retry_delays=(0.3, 0.6, 0.9),
    spool_dead_seconds=2.5,
    stop_wait_seconds=1.0,
    stage_seconds={"gpu": 60.0},
)
FASTER = FAST.model_copy(update={"lease_seconds": 0.5, "renew_seconds": 0.1, "reap_seconds": 0.1})
"""For tests in which no living worker could lose a lease to a busy machine."""
SPOOL, OTHER_SPOOL = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
CHECKSUM = "crc64nvme:AAAAAAAAAAA="


def batch(number: int, run: str = "run") -> BatchJob:
    """An invented batch."""
    return BatchJob(
        run=run,
        batch_id=names.batch_id(number),
        token_part=0,
        first_row=2 * number,
        num_samples=2,
        num_tokens=10,
        padded_length=8,
    )


def record(run: str = "run", *, num_batches: int = 10, settings: DeliverySettings = FAST) -> RunRecord:
    """The record of an invented run."""
    model = ModelIdentity(
        model="m", revision=None, config_digest="c", weights_digest="w", architecture="A", num_layers=4,
        hidden_size=8, vocab_size=16, max_positions=None, dtype="float32", quantization=None,
    )  # fmt: skip
    config = RunConfig(
        run=run, hiddenq_version="0", created_at="2026-01-01T00:00:00Z", model=model,
        dataset=DatasetIdentity(files=(), row_schema="text", fingerprint="f", limit=None),
        tokenizer=TokenizerIdentity(digest="t", chat_template_digest=""), target_layer_ids=(1,),
        final_hidden_state=False, storage_dtype="float32", max_length=8, length_policy="drop", token_budget=16,
        max_shard_bytes=1 << 20, shuffle_seed=None, num_rows=2 * num_batches, num_rejected=0,
        num_samples=2 * num_batches, num_tokens=10 * num_batches, num_supervised=num_batches,
        num_padded_tokens=16 * num_batches, num_batches=num_batches, num_token_parts=1, plan_digest="p",
    )  # fmt: skip
    return RunRecord(config=config, location="file:///nowhere", store={}, delivery=settings)


def shard(claim: Claim[BatchJob], spool_id: str = SPOOL) -> ShardReady:
    """The shard that an execution might have written."""
    return ShardReady(
        batch=claim.message,
        spool_id=spool_id,
        file_name=names.shard_file_name(claim.message.batch_id, claim.execution),
        num_bytes=100,
        data_offset=8,
        checksum=CHECKSUM,
        execution=claim.execution,
        worker="w",
    )


def entry(ready: ShardReady) -> LedgerEntry:
    """The ledger entry of a shard."""
    return LedgerEntry(
        batch_id=ready.batch.batch_id,
        execution=ready.execution,
        key=names.STATES_PREFIX + ready.file_name,
        num_bytes=ready.num_bytes,
        data_offset=ready.data_offset,
        checksum=ready.checksum,
        num_samples=ready.batch.num_samples,
        num_tokens=ready.batch.num_tokens,
    )


def report(role: str, spool_id: str = SPOOL, *, target: str = "t", host: str = "h") -> WorkerReport:
    """A worker's report."""
    return WorkerReport.model_validate(
        {"schema_version": 1, "role": role, "name": "n", "target": target, "host": host, "pid": 1, "spool_id": spool_id}
    )


class Bench:
    """One Redis with a run of a few batches, and makers of consumers that are closed at the end."""

    def __init__(self, server: RedisServer, stack: ExitStack) -> None:
        self.server = server
        self._stack = stack
        self.client = self.connect()

    def connect(self, url: str | None = None, **options: Any) -> redis.Redis:
        """A client of hiddenq's own making."""
        client = connect(url or self.server.bare_url, password=self.server.password, **options)
        self._stack.callback(client.close)
        return client

    def enqueue(self, num_batches: int, run: str = "run", settings: DeliverySettings = FAST) -> RunRecord:
        """Make the run known and queue its batches."""
        made = record(run, num_batches=num_batches, settings=settings)
        save_run(self.client, made)
        enqueue(self.client, made, [batch(number, run) for number in range(num_batches)])
        return made

    def gpu_worker(self, run: str = "run", *, spool_id: str = SPOOL, **options: Any) -> Consumer[BatchJob]:
        """A started consumer of batches."""
        options = {"report": lambda: report("gpu_worker", spool_id), "settings": FAST, "client": self.client, **options}
        client = options.pop("client")
        consumer = Consumer(client, names.extract_queue(run), BatchJob, name=worker_name("gpu"), **options)
        return self._stack.enter_context(consumer)

    def uploader(self, spool_id: str = SPOOL, **options: Any) -> Consumer[ShardReady]:
        """A started consumer of shards."""
        options = {"report": lambda: report("uploader", spool_id), "settings": FAST, "client": self.client, **options}
        client = options.pop("client")
        consumer = Consumer(client, names.upload_queue(spool_id), ShardReady, name=worker_name("up"), **options)
        return self._stack.enter_context(consumer)

    def status(self, job_id: str) -> str:
        """RQ's status of a job; "" if there is none."""
        return self.field(job_id, "status")

    def field(self, job_id: str, name: str) -> str:
        """A field of a job's hash; "" if there is none."""
        return text(self.client.hget(f"rq:job:{job_id}", name) or "")

    def upload_all(self, uploader: Consumer[ShardReady]) -> int:
        """Commit whatever waits in the uploader's spool; returns how many were committed."""
        num = 0
        while claims := uploader.claim(20):
            num += sum(uploader.commit(claim, entry(claim.message)) for claim in claims)
        return num

    def run_all(self, worker: Consumer[BatchJob], spool_id: str = SPOOL) -> int:
        """Publish whatever waits in the worker's queue; returns how many were published."""
        num = 0
        while claims := worker.claim(20):
            for claim in claims:
                worker.enter(claim, "gpu")
                worker.publish(claim, shard(claim, spool_id))
                num += 1
        return num


@pytest.fixture
def bench(redis_server: RedisServer) -> Iterator[Bench]:
    """On the shared server."""
    with ExitStack() as stack:
        yield Bench(redis_server, stack)


@pytest.fixture
def own_bench(own_redis_server: RedisServer) -> Iterator[Bench]:
    """On a server that may be killed."""
    with ExitStack() as stack:
        yield Bench(own_redis_server, stack)
