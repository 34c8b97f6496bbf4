"""Where each sample of a run lies: shard, byte range, length.

Invariant: an index that was accepted can't send a read outside a shard of its own run, because every row's range
follows from its length and the run's format, every key is rebuilt from a batch and an execution, and nothing that a
file claims is used before it was checked. Tensors are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard
from hiddenq.contracts.manifest import INDEX_COLUMNS, BatchPlan
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.reader.headers import ShardHeader, read_header
from hiddenq.storage import ObjectInfo, ObjectStore

MAX_INDEX_ROW_BYTES = 1 << 10
"""A row has about 120: eight columns, two of them short strings."""
MAX_INDEX_FRAME_BYTES = 16 << 20
"""What an index may take beside its rows."""
_INTEGERS = [name for name in INDEX_COLUMNS if name not in ("shard_key", "checksum")]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """One entry a sample, sorted by sample id; all arrays are int64 [N]."""

    sample_ids: Integers
    num_tokens: Integers
    num_supervised: Integers | None
    """None for a run that is still going: its shards' headers do not say."""
    byte_offset: Integers
    """Of the sample's first byte in its shard's file."""
    num_bytes: Integers
    shard: Integers
    """Position in `shard_keys`."""
    shard_keys: tuple[str, ...]
    data_offsets: tuple[int, ...]
    checksums: tuple[str, ...]
    """By shard; empty strings for a run that is still going."""

    def position(self, sample_id: int) -> int:
        """Position of a sample in the arrays.

        Raises:
            KeyError: no such sample.
        """
        at = int(np.searchsorted(self.sample_ids, sample_id))
        if at == len(self.sample_ids) or self.sample_ids[at] != sample_id:
            raise KeyError(sample_id)
        return at


def load_index(store: ObjectStore, info: ObjectInfo, config: RunConfig) -> SampleIndex:
    """The index of a finished run, which is not even read if it is larger than this run's can be.

    Raises:
        DamagedShard: it is no parquet file, lacks a column, or a row contradicts `run.json`.
    """
    if info.num_bytes > index_limit(config):
        raise DamagedShard(f"{names.INDEX}: {info.num_bytes} bytes are too many for {config.num_samples} samples")
    return read_index(store.get_bytes(names.INDEX), config)


def read_index(data: bytes, config: RunConfig) -> SampleIndex:
    """The index from the bytes of `index.parquet`.

    Raises:
        DamagedShard: it is no parquet file, lacks a column, or a row contradicts `run.json`.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        if file.metadata.num_rows > config.num_samples:
            raise DamagedShard(
                f"{names.INDEX}: {file.metadata.num_rows} rows, the run has {config.num_samples} samples; expected the "
                f"index of run {config.run}"
            )
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > index_limit(config):
            raise DamagedShard(f"{names.INDEX}: unpacked it is larger than that of {config.num_samples} samples")
        table = file.read(columns=[name for name in INDEX_COLUMNS if name in file.schema_arrow.names])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamagedShard(f"{names.INDEX}: not a readable index: {error}") from error
    missing = [name for name in INDEX_COLUMNS if name not in table.column_names]
    if missing:
        raise DamagedShard(f"{names.INDEX}: column {missing[0]} is missing; found {', '.join(table.column_names)}")
    if any(table[name].null_count for name in INDEX_COLUMNS):
        raise DamagedShard(f"{names.INDEX}: a column holds nulls")
    if bad := [name for name in _INTEGERS if not pa.types.is_integer(table.schema.field(name).type)]:
        raise DamagedShard(f"{names.INDEX}: {bad[0]}: expected integers, found {table.schema.field(bad[0]).type}")
    columns = {name: table[name].to_numpy().astype(np.int64, copy=False) for name in _INTEGERS}
    order = np.argsort(columns["sample_id"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    encoded = table["shard_key"].combine_chunks().dictionary_encode()
    shard = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)[order]
    shard_keys = tuple(str(key) for key in encoded.dictionary.to_pylist())
    first = np.zeros(len(shard_keys), np.int64)
    first[shard[::-1]] = np.arange(len(shard))[::-1]
    checksums = table["checksum"].combine_chunks().take(pa.array(order[first])).to_pylist() if len(shard) else []
    index = SampleIndex(
        sample_ids=columns["sample_id"],
        num_tokens=columns["num_tokens"],
        num_supervised=columns["num_supervised"],
        byte_offset=columns["byte_offset"],
        num_bytes=columns["num_bytes"],
        shard=shard,
        shard_keys=shard_keys,
        data_offsets=tuple(int(size) for size in columns["data_offset"][first]),
        checksums=tuple(str(checksum) for checksum in checksums),
    )
    _check(index, config)
    return index


def index_limit(config: RunConfig) -> int:
    """Bytes that the index of a run may have, packed or unpacked."""
    return MAX_INDEX_FRAME_BYTES + config.num_samples * MAX_INDEX_ROW_BYTES


def scan_shards(store: ObjectStore, config: RunConfig, batches: Sequence[BatchPlan], *, threads: int) -> SampleIndex:
    """The index of a run that is still going, from the headers of the shards that are there.

    Of two shards of one batch the first by name counts; the other is a twin that the run will remove.

    Raises:
        DamagedShard: a shard's header is not what the run writes.
    """
    planned = {batch.batch_id: batch for batch in batches}
    chosen: dict[str, ObjectInfo] = {}
    for info in store.list(names.STATES_PREFIX):
        parsed = names.parse_shard_name(info.key)
        if parsed and info.key == names.shard_key(*parsed) and parsed[0] in planned:
            chosen.setdefault(parsed[0], info)
    shard_format = ShardFormat.of_run(config)
    with ThreadPoolExecutor(threads, thread_name_prefix="scan") as pool:
        headers = list(
            pool.map(
                lambda batch_id: read_header(store, chosen[batch_id], shard_format, planned[batch_id].num_samples),
                chosen,
            )
        )
    return _index_of_headers(headers, shard_format, config)


def _index_of_headers(headers: Iterable[ShardHeader], shard_format: ShardFormat, config: RunConfig) -> SampleIndex:
    headers = list(headers)
    rows: list[tuple[int, int, int, int]] = []
    for number, header in enumerate(headers):
        position = header.data_offset
        for sample_id, num_tokens in header.samples:
            rows.append((sample_id, num_tokens, position, number))
            position += num_tokens * shard_format.bytes_per_token
    table = np.array(sorted(rows), np.int64).reshape(-1, 4)
    index = SampleIndex(
        sample_ids=table[:, 0],
        num_tokens=table[:, 1],
        num_supervised=None,
        byte_offset=table[:, 2],
        num_bytes=table[:, 1] * shard_format.bytes_per_token,
        shard=table[:, 3],
        shard_keys=tuple(header.key for header in headers),
        data_offsets=tuple(header.data_offset for header in headers),
        checksums=tuple("" for _ in headers),
    )
    _check(index, config)
    return index


def _check(index: SampleIndex, config: RunConfig) -> None:
    bytes_per_token = ShardFormat.of_run(config).bytes_per_token
    for key in index.shard_keys:
        parsed = names.parse_shard_name(key)
        if parsed is None or key != names.shard_key(*parsed):
            raise DamagedShard(f"{names.INDEX}: {key[:80]!r} is no shard's key")
    rules = {
        "a sample id is negative or twice there": (np.diff(index.sample_ids, prepend=-1) <= 0),
        f"a length is not in 1…{config.max_length}": (index.num_tokens < 1) | (index.num_tokens > config.max_length),
        "a size does not follow from its length": index.num_bytes != index.num_tokens * bytes_per_token,
        "a sample starts inside the header": index.byte_offset < np.array(index.data_offsets, np.int64)[index.shard]
        if len(index.shard)
        else np.zeros(0, bool),
    }
    for text, broken in rules.items():
        if broken.any():
            sample_id = index.sample_ids[int(np.argmax(broken))]
            raise DamagedShard(f"{names.INDEX}: {text} (sample {sample_id}); expected the index of run {config.run}")
