"""Where each sample lies: the rows of `index.parquet`, from token parts, batch list and ledger.

Invariant: no shard is opened. A shard's layout follows from its samples' lengths and the run's format, and its checksum
is in the ledger, so the index is a pure function of what is committed: finishing twice gives the same bytes.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hiddenq.contracts.errors import DamagedShard
from hiddenq.contracts.manifest import INDEX_COLUMNS, BatchPlan
from hiddenq.contracts.messages import LedgerEntry
from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage import ObjectStore
from hiddenq.storage.runfiles import read_token_rows

READ_TOKENS = 8 << 20
"""Tokens read at once."""
_TYPES = {"num_tokens": pa.int32(), "num_supervised": pa.int32(), "shard_key": pa.string(), "checksum": pa.string()}
_SCHEMA = pa.schema([(name, _TYPES.get(name, pa.int64())) for name in INDEX_COLUMNS])


def build_index(
    store: ObjectStore,
    shard_format: ShardFormat,
    batches: Sequence[BatchPlan],
    entries: Mapping[str, LedgerEntry],
    *,
    still_mine: Callable[[], None] = lambda: None,
) -> bytes:
    """The bytes of `index.parquet`: one row for each sample of a committed batch, sorted by sample id.

    `still_mine` is called now and then, and may raise to give up.
    """
    committed = [batch for batch in batches if batch.batch_id in entries]
    tables: list[pa.Table] = []
    for group in _groups(committed):
        still_mine()
        tables += _tables(store, shard_format, group, entries)
    table = pa.concat_tables(tables) if tables else _SCHEMA.empty_table()
    buffer = io.BytesIO()
    pq.write_table(table.sort_by("sample_id"), buffer, compression="zstd")
    return buffer.getvalue()


def indexed_shards(index: bytes) -> set[tuple[str, str]]:
    """Key and checksum of each shard that an index names."""
    table = pq.read_table(io.BytesIO(index), columns=["shard_key", "checksum"]).group_by(["shard_key", "checksum"])
    return {(row["shard_key"], row["checksum"]) for row in table.aggregate([]).to_pylist()}


def _groups(batches: Sequence[BatchPlan]) -> Iterator[list[BatchPlan]]:
    """Batches whose rows follow one another in one token part, up to so many tokens."""
    group: list[BatchPlan] = []
    for batch in sorted(batches, key=lambda batch: (batch.token_part, batch.first_row)):
        last = group[-1] if group else None
        if last and not (
            batch.token_part == last.token_part
            and batch.first_row == last.first_row + last.num_samples
            and sum(member.num_tokens for member in group) + batch.num_tokens <= READ_TOKENS
        ):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _tables(
    store: ObjectStore, shard_format: ShardFormat, group: Sequence[BatchPlan], entries: Mapping[str, LedgerEntry]
) -> Iterator[pa.Table]:
    rows = iter(
        read_token_rows(store, group[0].token_part, group[0].first_row, sum(batch.num_samples for batch in group))
    )
    for batch in group:
        samples = list(itertools.islice(rows, batch.num_samples))
        entry = entries[batch.batch_id]
        lengths = np.array([len(sample.input_ids) for sample in samples], np.int64)
        sizes = lengths * shard_format.bytes_per_token
        if entry.num_bytes != entry.data_offset + int(sizes.sum()):
            raise DamagedShard(
                f"{entry.key}: expected {entry.data_offset + int(sizes.sum())} bytes for batch {batch.batch_id}, "
                f"the ledger says {entry.num_bytes}"
            )
        columns = {
            "sample_id": np.array([sample.sample_id for sample in samples], np.int64),
            "shard_key": [entry.key] * len(samples),
            "num_tokens": lengths,
            "num_supervised": np.array([int(sample.loss_mask.sum()) for sample in samples]),
            "byte_offset": entry.data_offset + np.cumsum(sizes) - sizes,
            "num_bytes": sizes,
            "data_offset": np.full(len(samples), entry.data_offset, np.int64),
            "checksum": [entry.checksum] * len(samples),
        }
        yield pa.table({name: pa.array(columns[name], _SCHEMA.field(name).type) for name in INDEX_COLUMNS})
