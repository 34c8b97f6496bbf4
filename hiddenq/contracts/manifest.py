"""`manifest.json`, the batch list, rejects, dead letters, and the columns of `index.parquet`.

Invariant: the manifest is written last, so its presence means that everything it counts is in the store.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hiddenq.contracts.base import Frozen, Versioned
from hiddenq.contracts.messages import BatchId, BatchJob, RunId

INDEX_COLUMNS = (
    "sample_id",  # int64
    "shard_key",  # string, relative to the location
    "num_tokens",  # int32
    "num_supervised",  # int32
    "byte_offset",  # int64, of the sample's first byte in the shard
    "num_bytes",  # int64, of the whole sample
    "data_offset",  # int64, bytes of the shard's header
    "checksum",  # string, of the whole shard
)
"""Columns of `index.parquet`, one row a sample, sorted by sample_id."""

RejectReason = Literal[
    "not_json",
    "not_an_object",
    "wrong_schema",
    "empty",
    "unknown_role",
    "role_order",
    "null_content",
    "bad_content",
    "multimodal",
    "template_error",
    "mask_unsure",
    "nothing_supervised",
    "too_long",
    "token_out_of_range",
    "bad_loss_mask",
    "special_token",
    "bad_text",
]
"""Why a row can't be used: the fixed set of names in `rejected.jsonl`."""


class Rejected(Frozen):
    """One line of `rejected.jsonl`."""

    row: int = Field(ge=0)
    reason: RejectReason
    detail: str
    file: str = ""
    """The data file that holds it, as it was named."""
    line: int = 0
    """Where in that file, from 1: its line, or in a columnar file its row; 0 in what older versions wrote."""


class BatchPlan(Frozen):
    """One line of `tokens/batches.jsonl`: a batch as planned."""

    batch_id: BatchId
    token_part: int
    first_row: int
    num_samples: int
    num_tokens: int
    padded_length: int

    def job(self, run: RunId) -> BatchJob:
        """The message that asks for this batch."""
        return BatchJob(run=run, **self.model_dump())


class Attempt(Frozen):
    """One failed execution of a batch."""

    number: int
    execution: str
    worker: str
    host: str
    device: str
    ended_at: str
    """UTC, ISO 8601, by the Redis server's clock."""
    error: str
    """Class and message, one line."""
    traceback: str


class DeadLetter(Frozen):
    """A batch set aside after its last attempt: one line of `dead_letters.jsonl`."""

    batch: BatchJob
    queue: str
    reason: str
    attempts: tuple[Attempt, ...]


class SelfCheck(Frozen):
    """One sample of a run recomputed alone and compared with what its batch gave."""

    batch_id: BatchId
    sample_id: int
    num_tokens: int
    padded_length: int
    worker: str
    max_relative_difference: float
    """Largest difference over layers, relative to the layer's largest magnitude."""
    worst_layer: str


class Manifest(Versioned):
    """The content of `manifest.json`."""

    schema_version: int = 1
    run: RunId
    complete: bool
    """True when every kept row is in a committed shard."""
    created_at: str
    num_rows: int
    num_rejected: int
    num_samples: int
    num_samples_committed: int
    num_tokens: int
    num_tokens_committed: int
    num_batches: int
    num_batches_committed: int
    num_bytes: int
    """Bytes of all committed shards."""
    index_checksum: str
    plan_digest: str
    run_json_checksum: str = ""
    """Of `run.json` as it lay there when the manifest was written."""
    dead_letters: tuple[BatchId, ...]
    self_checks: tuple[SelfCheck, ...]
