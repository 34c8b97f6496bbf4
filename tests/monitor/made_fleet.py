"""A fleet without GPUs and store: real consumers on a real Redis that move batches without computing them.

Everything that the monitor reads is written by the delivery core itself: queues, leases, reports, the ledger.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.messages import BatchJob, LedgerEntry, ShardReady
from hiddenq.contracts.reports import WorkerReport
from hiddenq.contracts.run import DatasetIdentity, ModelIdentity, RunConfig, TokenizerIdentity
from hiddenq.delivery import Consumer, DeliverySettings, RunRecord, enqueue, save_run, worker_name

SPOOL = str(uuid.UUID(int=7))
CHECKSUM = "crc64nvme:AAAAAAAAAAA="
SHARD_BYTES = 4096


def made_record(run: str = "demo", num_batches: int = 6, delivery: DeliverySettings | None = None) -> RunRecord:
    """A run of batches of 4 samples and 100 tokens, padded to 30."""
    config = RunConfig(
        run=run,
        hiddenq_version="0.1.0",
        created_at="2026-01-02T03:04:05Z",
        model=ModelIdentity(
            model="made/model",
            revision=None,
            config_digest="0" * 32,
            weights_digest="1" * 32,
            architecture="MadeForCausalLM",
            num_layers=6,
            hidden_size=16,
            vocab_size=97,
            max_positions=None,
            dtype="bfloat16",
            quantization=None,
        ),
        dataset=DatasetIdentity(files=(), row_schema="input_ids", fingerprint="3" * 32, limit=None),
        tokenizer=TokenizerIdentity(digest="", chat_template_digest=""),
        target_layer_ids=(1, 3),
        final_hidden_state=True,
        storage_dtype="bfloat16",
        max_length=30,
        length_policy="drop",
        token_budget=120,
        max_shard_bytes=1 << 30,
        shuffle_seed=None,
        num_rows=4 * num_batches,
        num_rejected=0,
        num_samples=4 * num_batches,
        num_tokens=100 * num_batches,
        num_supervised=50 * num_batches,
        num_padded_tokens=120 * num_batches,
        num_batches=num_batches,
        num_token_parts=1,
        plan_digest="4" * 32,
    )
    return RunRecord(config=config, location="file:///made", store={}, delivery=delivery or DeliverySettings())


def made_batches(record: RunRecord) -> list[BatchJob]:
    """The run's plan."""
    return [
        BatchJob(
            run=record.run,
            batch_id=names.batch_id(number),
            token_part=0,
            first_row=4 * number,
            num_samples=4,
            num_tokens=100,
            padded_length=30,
        )
        for number in range(record.config.num_batches)
    ]


def start_run(client: redis.Redis, record: RunRecord) -> None:
    """Make the run known and queue all of it."""
    save_run(client, record)
    enqueue(client, record, made_batches(record))


class MadeWorker:
    """A GPU worker whose GPU is the caller; `say` changes what it reports."""

    def __init__(self, client: redis.Redis, record: RunRecord, device: str = "cuda:0", **report: Any) -> None:
        self._said: dict[str, Any] = {
            "target": f"{SPOOL}:{device}",
            "host": telemetry.host_name(),
            "pid": 4242,
            "spool_id": SPOOL,
            "run": record.run,
            "device": device,
            "state": "idle",
            "spool_bytes": 0,
            "spool_files": 0,
            "spool_high_bytes": 1 << 30,
            "disk_free_bytes": 100 << 30,
        } | report
        self.num_batches = 0
        self.consumer = Consumer(
            client,
            names.extract_queue(record.run),
            BatchJob,
            name=worker_name("gpu"),
            settings=record.delivery,
            report=self.report,
        )

    def report(self) -> WorkerReport:
        """What it says now."""
        return WorkerReport(
            role="gpu_worker",
            name=self.consumer.name,
            num_batches=self.num_batches,
            num_samples=4 * self.num_batches,
            num_tokens=100 * self.num_batches,
            num_padded_tokens=120 * self.num_batches,
            **self._said,
        )

    def say(self, **report: Any) -> None:
        """Report this from now on, at once."""
        self._said |= report
        self.beat()

    def beat(self) -> None:
        """A heartbeat now."""
        self.consumer._keeper.beat()

    def extract(self) -> BatchJob | None:
        """Run one batch to its end; None if none waits."""
        claims = self.consumer.claim(1)
        if not claims:
            return None
        claim = claims[0]
        self.consumer.enter(claim, "gpu")
        shard = ShardReady(
            batch=claim.message,
            spool_id=SPOOL,
            file_name=names.shard_file_name(claim.message.batch_id, claim.execution),
            num_bytes=SHARD_BYTES,
            data_offset=64,
            checksum=CHECKSUM,
            execution=claim.execution,
            worker=self.consumer.name,
        )
        self.consumer.publish(claim, shard)
        self.num_batches += 1
        return claim.message


class MadeUploader:
    """An uploader whose store takes everything."""

    def __init__(self, client: redis.Redis, record: RunRecord, **report: Any) -> None:
        self._said: dict[str, Any] = {"host": telemetry.host_name(), "pid": 4243, "spool_id": SPOOL} | report
        self.consumer = Consumer(
            client,
            names.upload_queue(SPOOL),
            ShardReady,
            name=worker_name("uploader"),
            settings=record.delivery,
            report=self.report,
        )

    def report(self) -> WorkerReport:
        """What it says now."""
        return WorkerReport(
            role="uploader",
            name=self.consumer.name,
            target=f"{SPOOL}:uploader-0",
            **self._said,
        )

    def upload(self) -> bool:
        """Commit one shard; False if none waits."""
        claims = self.consumer.claim(1)
        if not claims:
            return False
        claim = claims[0]
        shard = claim.message
        self.consumer.enter(claim, "put")
        entry = LedgerEntry(
            batch_id=shard.batch.batch_id,
            execution=shard.execution,
            key=names.shard_key(shard.batch.batch_id, shard.execution),
            num_bytes=shard.num_bytes,
            data_offset=shard.data_offset,
            checksum=shard.checksum,
            num_samples=shard.batch.num_samples,
            num_tokens=shard.batch.num_tokens,
        )
        self.consumer.commit(claim, entry)
        return True


@contextmanager
def made_fleet(client: redis.Redis, record: RunRecord) -> Iterator[tuple[MadeWorker, MadeUploader]]:
    """A started run with one GPU worker and one uploader."""
    start_run(client, record)
    worker, uploader = MadeWorker(client, record), MadeUploader(client, record)
    with worker.consumer, uploader.consumer:
        yield worker, uploader
