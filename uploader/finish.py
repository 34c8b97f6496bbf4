"""The end of a run: index, dead letters, manifest; no twins and nothing half written left.

Invariant: the manifest is written last and describes what was in the store when it was written, because its writer
holds the run's finishing lock until then, and takes the old manifest away before it touches the index. Finishing again
with nothing new changes nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import redis
from redis.exceptions import LockError

from hiddenq import telemetry
from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, ObjectMissing, TransientError, UnknownSchema
from hiddenq.contracts.manifest import BatchPlan, DeadLetter, Manifest
from hiddenq.contracts.messages import LedgerEntry
from hiddenq.contracts.shard import ShardFormat
from hiddenq.delivery import Ledger, RunRecord, dead_batches, dead_letters, mark_finished, self_checks
from hiddenq.delivery.connection import away_errors
from hiddenq.storage import ObjectStore
from hiddenq.storage.runfiles import load_batches, load_manifest
from uploader.index import build_index, indexed_shards
from uploader.leftovers import remove_losers, remove_unfinished
from uploader.runs import check_same_run


def finish_run(client: redis.Redis, record: RunRecord, store: ObjectStore) -> Manifest:
    """Write `index.parquet`, `dead_letters.jsonl` and `manifest.json` for what is committed now.

    `complete` is true if every batch is committed; then the run is marked finished. Concurrent callers take turns.

    Raises:
        RunMismatch: the location's `run.json` is not the run's any more.
        MissingShard: a committed shard is not in the store.
        TransientError: the finishing lock was lost on the way; call again.
        RedisAway, StoreAway: call again later.
    """
    with away_errors(), _finishing(client, record) as still_mine:
        check_same_run(store, record.config)
        entries = Ledger(client, record.run).entries()
        letters, dead = dead_letters(client, record.run), dead_batches(client, record.run)
        batches = load_batches(store)
        remove_losers(store, entries)
        remove_unfinished(client, record.run, store)
        stored_index = _stored_index(store)
        if (existing := _readable_manifest(store)) and _is_final(existing, record, batches, entries, stored_index):
            mark_finished(client, record.run)
            return existing
        index = build_index(store, ShardFormat.of_run(record.config), batches, entries, still_mine=still_mine)
        checks = self_checks(client, record.run)
        manifest = _manifest(record, batches, entries, dead, crc.of_bytes(index)).model_copy(
            update={
                "self_checks": tuple(checks),
                "run_json_checksum": crc.of_bytes(store.get_bytes(names.RUN_JSON)),
            }
        )
        if existing and _same(existing, manifest) and index == stored_index:
            manifest = existing
        else:
            still_mine()
            store.delete(names.MANIFEST)
            store.put_bytes(names.INDEX, index)
            _write_letters(store, letters)
            still_mine()
            store.put_bytes(names.MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
        if manifest.complete:
            mark_finished(client, record.run)
    telemetry.logger().info(
        "run_finished",
        run=record.run,
        complete=manifest.complete,
        batches=manifest.num_batches_committed,
        dead_letters=len(manifest.dead_letters),
    )
    return manifest


def _readable_manifest(store: ObjectStore) -> Manifest | None:
    """The manifest that lies there, if this hiddenq can read it; any other one is replaced."""
    with contextlib.suppress(ObjectMissing, BadMessage, UnknownSchema):
        return load_manifest(store)
    return None


def _manifest(
    record: RunRecord,
    batches: Sequence[BatchPlan],
    entries: Mapping[str, LedgerEntry],
    dead: set[str],
    index_checksum: str,
) -> Manifest:
    config = record.config
    committed = [entries[batch.batch_id] for batch in batches if batch.batch_id in entries]
    return Manifest(
        run=record.run,
        complete=len(committed) == len(batches),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_rows=config.num_rows,
        num_rejected=config.num_rejected,
        num_samples=config.num_samples,
        num_samples_committed=sum(entry.num_samples for entry in committed),
        num_tokens=config.num_tokens,
        num_tokens_committed=sum(entry.num_tokens for entry in committed),
        num_batches=len(batches),
        num_batches_committed=len(committed),
        num_bytes=sum(entry.num_bytes for entry in committed),
        index_checksum=index_checksum,
        plan_digest=config.plan_digest,
        dead_letters=tuple(sorted(dead - entries.keys())),
        self_checks=(),
    )


def _stored_index(store: ObjectStore) -> bytes | None:
    with contextlib.suppress(ObjectMissing):
        return store.get_bytes(names.INDEX)
    return None


def _is_final(
    existing: Manifest,
    record: RunRecord,
    batches: Sequence[BatchPlan],
    entries: Mapping[str, LedgerEntry],
    index: bytes | None,
) -> bool:
    """Whether everything was in already when manifest and index were written, and is the same now.

    Shards are compared by name: one that was lost and made again has the size of the first.
    """
    return (
        existing.complete
        and existing.plan_digest == record.config.plan_digest
        and len(entries) == len(batches) == existing.num_batches_committed
        and index is not None
        and crc.of_bytes(index) == existing.index_checksum
        and indexed_shards(index) == {(entry.key, entry.checksum) for entry in entries.values()}
    )


def _same(existing: Manifest, manifest: Manifest) -> bool:
    """Whether two manifests say the same; when they were written is no difference."""
    return existing == manifest.model_copy(update={"created_at": existing.created_at})


def _write_letters(store: ObjectStore, letters: Sequence[DeadLetter]) -> None:
    if letters:
        lines = "".join(letter.model_dump_json() + "\n" for letter in letters)
        store.put_bytes(names.DEAD_LETTERS, lines.encode())
    else:
        store.delete(names.DEAD_LETTERS)


@contextlib.contextmanager
def _finishing(client: redis.Redis, record: RunRecord) -> Iterator[Callable[[], None]]:
    """Hold the run's finishing lock, renewed by a thread; yields what raises once it is lost."""
    seconds = record.delivery.lease_seconds
    lock = client.lock(f"hiddenq:run:{record.run}:finishing", timeout=seconds, sleep=0.2, thread_local=False)
    lock.acquire()
    done = threading.Event()

    def renew() -> None:
        while not done.wait(seconds / 3):
            with contextlib.suppress(redis.RedisError):
                lock.reacquire()

    def still_mine() -> None:
        try:
            lock.reacquire()
        except LockError as error:
            raise TransientError(f"run {record.run}: another process is finishing it now") from error

    thread = threading.Thread(target=renew, name="finishing", daemon=True)
    thread.start()
    try:
        yield still_mine
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(LockError):
            lock.release()
