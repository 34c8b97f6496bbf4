"""A small run at any location, and a stand-in for its GPU worker: real token parts, real shards of random bytes.

Invariant: what it publishes went through the real delivery core, so an uploader can't tell it from a worker.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import redis
from safetensors.numpy import save

from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.contracts.reports import WorkerReport
from hiddenq.contracts.run import DatasetIdentity, ModelIdentity, RunConfig, TokenizerIdentity
from hiddenq.contracts.shard import ShardFormat, layout_shard
from hiddenq.delivery import Consumer, DeliverySettings, RunRecord, enqueue, save_run, worker_name
from hiddenq.storage import ObjectStore, Spool
from hiddenq.storage.runfiles import encode_batches, write_run_json

FAST = DeliverySettings(
    lease_seconds=1.5, renew_seconds=0.3, reap_seconds=0.3, retry_delays=(0.1, 0.2), spool_dead_seconds=60
)


@dataclass
class SmallRun:
    """A run whose batches are `num_samples` samples each, and what its shards hold."""

    config: RunConfig
    batches: list[BatchPlan]
    rows: list[list[tuple[int, np.ndarray, np.ndarray]]]
    """(sample_id, input_ids, loss_mask) by batch."""
    settings: DeliverySettings = FAST
    published: dict[str, ShardReady] = field(default_factory=dict)
    """The newest shard of each batch, by its id."""

    @property
    def name(self) -> str:
        return self.config.run

    def record(self, store: ObjectStore, store_settings: dict[str, Any] | None = None) -> RunRecord:
        return RunRecord(config=self.config, location=store.uri, store=store_settings or {}, delivery=self.settings)

    def write(self, store: ObjectStore) -> None:
        """Everything that a producer leaves, `run.json` last."""
        samples = [row for batch in self.rows for row in batch]
        lengths = [len(ids) for _, ids, _ in samples]
        part: dict[str, np.ndarray] = {
            "offsets": np.cumsum([0, *lengths]).astype(np.int64),
            "sample_ids": np.array([sample_id for sample_id, _, _ in samples], np.int64),
            "input_ids": np.concatenate([ids for _, ids, _ in samples]).astype(np.int32),
            "loss_mask": np.concatenate([mask for _, _, mask in samples]).astype(np.uint8),
        }
        store.put_bytes(names.token_part_key(0), save(part))
        store.put_bytes(names.BATCHES, encode_batches(self.batches))
        write_run_json(store, self.config)

    def start(self, client: redis.Redis, store: ObjectStore, store_settings: dict[str, Any] | None = None) -> None:
        """Write it, make it known and queue its batches."""
        self.write(store)
        record = self.record(store, store_settings)
        save_run(client, record)
        enqueue(client, record, [batch.job(self.name) for batch in self.batches])

    def shard_bytes(self, batch_id: str) -> tuple[bytes, int]:
        """A shard of a batch with random states, and its data offset."""
        number = int(batch_id)
        shard_format = ShardFormat.of_run(self.config)
        layout = layout_shard(
            shard_format,
            [(sample_id, len(ids)) for sample_id, ids, _ in self.rows[number]],
            {"run": self.name, "batch_id": batch_id},
        )
        return layout.header + os.urandom(layout.num_bytes - layout.data_offset), layout.data_offset

    def put_into_spool(self, spool: Spool, batch: BatchJob, execution: str) -> ShardReady:
        """Write a shard's file as a worker does."""
        data, data_offset = self.shard_bytes(batch.batch_id)
        name = names.shard_file_name(batch.batch_id, execution)
        file = spool.reserve(name, len(data))
        assert file is not None, "the spool is over its marks"
        assert os.write(file.fd, data) == len(data)
        file.publish()
        return ShardReady(
            batch=batch,
            spool_id=spool.spool_id,
            file_name=name,
            num_bytes=len(data),
            data_offset=data_offset,
            checksum=crc.of_bytes(data),
            execution=execution,
            worker="test",
        )

    def worker(self, client: redis.Redis, spool: Spool) -> Consumer[BatchJob]:
        """A GPU worker's consumer."""
        name = worker_name("gpu")
        report = WorkerReport(
            role="gpu_worker", name=name, target=name, host="test", pid=os.getpid(), spool_id=spool.spool_id
        )
        return Consumer(
            client, names.extract_queue(self.name), BatchJob, name=name, settings=self.settings, report=lambda: report
        )

    def extract(self, client: redis.Redis, spool: Spool, limit: int = 1000) -> list[ShardReady]:
        """Do the GPU's work for up to `limit` batches."""
        shards: list[ShardReady] = []
        with self.worker(client, spool) as consumer:
            while len(shards) < limit and (claims := consumer.claim(1)):
                for claim in claims:
                    consumer.enter(claim, "gpu")
                    shard = self.put_into_spool(spool, claim.message, claim.execution)
                    consumer.publish(claim, shard)
                    self.published[claim.message.batch_id] = shard
                    shards.append(shard)
        return shards


def small_run(
    *, name: str = "small", num_batches: int = 4, num_samples: int = 3, hidden_size: int = 16, seed: int = 0
) -> SmallRun:
    """A run of `num_batches` batches; sample ids are shuffled over them."""
    random_source = random.Random(seed)
    ids = random_source.sample(range(num_batches * num_samples * 2), num_batches * num_samples)
    rows, batches, first = [], [], 0
    for number in range(num_batches):
        batch = []
        for sample_id in ids[number * num_samples : (number + 1) * num_samples]:
            length = random_source.randint(2, 30)
            mask = np.array([random_source.randint(0, 1) for _ in range(length)], np.uint8)
            batch.append((sample_id, np.arange(length, dtype=np.int32), mask))
        lengths = [len(input_ids) for _, input_ids, _ in batch]
        batches.append(
            BatchPlan(
                batch_id=names.batch_id(number),
                token_part=0,
                first_row=first,
                num_samples=num_samples,
                num_tokens=sum(lengths),
                padded_length=max(lengths),
            )
        )
        rows.append(batch)
        first += num_samples
    num_tokens = sum(batch.num_tokens for batch in batches)
    config = RunConfig(
        run=name,
        hiddenq_version="0",
        created_at="2026-01-01T00:00:00Z",
        model=ModelIdentity(
            model="m", revision=None, config_digest="c", weights_digest="w", architecture="A", num_layers=4,
            hidden_size=hidden_size, vocab_size=100, max_positions=None, dtype="bfloat16", quantization=None,
        ),
        dataset=DatasetIdentity(files=(), row_schema="text", fingerprint="f", limit=None),
        tokenizer=TokenizerIdentity(digest="d", chat_template_digest="t"),
        target_layer_ids=(1, 2),
        final_hidden_state=True,
        storage_dtype="bfloat16",
        max_length=64,
        length_policy="truncate",
        token_budget=1000,
        max_shard_bytes=1 << 30,
        shuffle_seed=None,
        num_rows=num_batches * num_samples + 1,
        num_rejected=1,
        num_samples=num_batches * num_samples,
        num_tokens=num_tokens,
        num_supervised=sum(int(mask.sum()) for batch in rows for _, _, mask in batch),
        num_padded_tokens=sum(batch.padded_length * num_samples for batch in batches),
        num_batches=num_batches,
        num_token_parts=1,
        plan_digest="p",
    )  # fmt: skip
    return SmallRun(config, batches, rows)
