"""The ledger anew, from the store alone.

Invariant: an object is adopted only after it was shown to be a whole shard of its batch: its header names exactly the
samples planned, its size is the header's, and its checksum, confirmed by the store or by reading every byte, is the one
recorded with it (and in the index, if the run has one). Anything else is left for the batch to be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, ObjectMissing
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.contracts.messages import LedgerEntry
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat, header_num_bytes, parse_header
from hiddenq.storage import ObjectInfo, ObjectStore
from hiddenq.storage.runfiles import load_batches

NUM_THREADS = 8
_FIRST_READ_BYTES = 64 << 10


def rebuild_ledger(
    store: ObjectStore, config: RunConfig, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[LedgerEntry]:
    """Entries for every batch that has a whole shard in the store, in plan order.

    Of several shards of one batch the one in `index.parquet` counts, else the first by name.
    `progress` is called with objects looked at, and objects in all.
    """
    store.probe()  # a store that verifies checksums is asked for them; every other one is read
    plans = {batch.batch_id: batch for batch in load_batches(store)}
    indexed = _indexed(store)
    shards = [info for info in store.list(names.STATES_PREFIX) if _batch_of(info.key) in plans]
    shards.sort(key=lambda info: (_batch_of(info.key), info.key not in indexed, info.key))
    shard_format = ShardFormat.of_run(config)
    found: dict[str, LedgerEntry] = {}
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="adopt") as pool:

        def look(info: ObjectInfo) -> LedgerEntry | None:
            return _entry(store, shard_format, info, plans[_batch_of(info.key)], indexed)

        for number, entry in enumerate(pool.map(look, shards), start=1):
            if entry:
                found.setdefault(entry.batch_id, entry)
            progress(number, len(shards))
    return [found[batch_id] for batch_id in plans if batch_id in found]


def _entry(
    store: ObjectStore, shard_format: ShardFormat, info: ObjectInfo, plan: BatchPlan, indexed: Mapping[str, str]
) -> LedgerEntry | None:
    """The entry of one object, None (and a log line) if it is no whole shard of the batch."""
    parsed = names.parse_shard_name(info.key)
    assert parsed is not None, info.key
    log = telemetry.logger().bind(batch=plan.batch_id, key=info.key)
    try:
        data_offset = _data_offset(store, shard_format, info, plan)
        stated = store.stat(info.key)
        checksum = store.checksum(info.key)
        for where, recorded in (("beside it", stated and stated.checksum), ("in the index", indexed.get(info.key))):
            if recorded and recorded != checksum:
                raise DamagedShard(f"{info.key}: checksum {checksum} found, {recorded} recorded {where}")
    except (DamagedShard, ObjectMissing) as error:
        log.warning("shard_not_adopted", error=str(error), next="the batch is made again")
        return None
    log.debug("shard_adopted")
    return LedgerEntry(
        batch_id=plan.batch_id,
        execution=parsed[1],
        key=info.key,
        num_bytes=info.num_bytes,
        data_offset=data_offset,
        checksum=checksum,
        num_samples=plan.num_samples,
        num_tokens=plan.num_tokens,
    )


def _data_offset(store: ObjectStore, shard_format: ShardFormat, info: ObjectInfo, plan: BatchPlan) -> int:
    head = store.get_bytes(info.key, 0, min(_FIRST_READ_BYTES, info.num_bytes))
    size = header_num_bytes(head[:8], name=info.key)
    if size > len(head):
        head = store.get_bytes(info.key, 0, min(size, info.num_bytes))
    specs, metadata = parse_header(head[:size], name=info.key, num_bytes=info.num_bytes)
    samples = {name.partition(".")[0] for name in specs}
    num_tokens = sum(spec.shape[0] for spec in specs.values() if spec.name.endswith(".input_ids"))
    expected = (plan.num_samples, plan.num_tokens, size + plan.num_tokens * shard_format.bytes_per_token)
    if (len(samples), num_tokens, info.num_bytes) != expected:
        raise DamagedShard(
            f"{info.key}: expected {expected[0]} samples, {expected[1]} tokens, {expected[2]} bytes; "
            f"found {len(samples)}, {num_tokens}, {info.num_bytes}"
        )
    if metadata.get("batch_id", plan.batch_id) != plan.batch_id:
        raise DamagedShard(f"{info.key}: its header says batch {metadata['batch_id']}, expected {plan.batch_id}")
    return size


def _batch_of(key: str) -> str:
    parsed = names.parse_shard_name(key)
    return parsed[0] if parsed and key == names.shard_key(*parsed) else ""


def _indexed(store: ObjectStore) -> dict[str, str]:
    """Checksums by key from the run's index; {} if it has none yet."""
    try:
        table = pq.read_table(pa.BufferReader(store.get_bytes(names.INDEX)), columns=["shard_key", "checksum"])
    except ObjectMissing:
        return {}
    except (pa.ArrowException, OSError, ValueError) as error:
        telemetry.logger().warning("index_unreadable", error=str(error), next="rebuilt from the shards")
        return {}
    pairs: Iterable[tuple[str, str]] = zip(table["shard_key"].to_pylist(), table["checksum"].to_pylist(), strict=True)
    return dict(pairs)
