"""What must be true when a run has ended, whatever happened on the way.

every sample in exactly one committed shard, whose checksum in the store is the recorded one
no object besides those shards, no file in any spool but what a poison batch left in quarantine
nothing waiting, started, delayed or leased in Redis
every batch that is not committed is a dead letter with a story for each attempt
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Set
from pathlib import Path

import pyarrow.parquet as pq
import redis

from hiddenq.contracts import names
from hiddenq.delivery import Ledger, dead_letters, fleet
from hiddenq.storage import ObjectStore, Spool
from hiddenq.storage.runfiles import load_manifest
from tests.fault.parts import SETTINGS
from tests.uploader.small_run import SmallRun


class Broken(AssertionError):
    """A promise was not kept."""


def holds(client: redis.Redis, run: SmallRun, store: ObjectStore, spools: Iterable[Path], poison: Set[str]) -> None:
    """Check all of it.

    Raises:
        Broken: something is not as promised.
    """
    _one_shard_a_batch(client, run, store, poison)
    _every_sample_once(run, store, poison)
    _nothing_left(client, spools, poison)
    _failures_explained(client, run, poison)


def _one_shard_a_batch(client: redis.Redis, run: SmallRun, store: ObjectStore, poison: Set[str]) -> None:
    entries = Ledger(client, run.name).entries()
    expected = {batch.batch_id for batch in run.batches} - poison
    _same("committed batches", set(entries), expected)
    _same("batches in the totals", Ledger(client, run.name).totals().num_batches, len(expected))
    _same(
        "objects in the store",
        sorted(info.key for info in store.list(names.STATES_PREFIX)),
        sorted(entry.key for entry in entries.values()),
    )
    for entry in entries.values():
        _same(f"checksum of {entry.key}", store.checksum(entry.key), entry.checksum)


def _every_sample_once(run: SmallRun, store: ObjectStore, poison: Set[str]) -> None:
    index = pq.read_table(io.BytesIO(store.get_bytes(names.INDEX)))
    expected = sorted(
        sample_id
        for batch, rows in zip(run.batches, run.rows, strict=True)
        if batch.batch_id not in poison
        for sample_id, _, _ in rows
    )
    _same("samples in the index", index.column("sample_id").to_pylist(), expected)
    manifest = load_manifest(store)
    if manifest is None:
        raise Broken("there is no manifest")
    _same("dead letters in the manifest", set(manifest.dead_letters), set(poison))
    _same("complete", manifest.complete, not poison)


def _nothing_left(client: redis.Redis, spools: Iterable[Path], poison: Set[str]) -> None:
    for queue in fleet(client).queues:
        found = (queue.num_waiting, queue.num_started, queue.num_delayed)
        _same(f"waiting, started, delayed in {queue.queue}", found, (0, 0, 0))
    for key in ("hiddenq:leases", "hiddenq:delayed"):
        _same(key, client.zcard(key), 0)
    _same("executions", client.keys("rq:execution:*"), [])
    for folder in spools:
        usage = Spool.open(folder).usage()
        _same(f"files, bytes in {folder}", (usage.num_files, usage.num_bytes), (0, 0))
        set_aside = {path.name.partition("-")[0] for path in (folder / "quarantine").glob("*.safetensors")}
        if set_aside - poison:
            raise Broken(f"in quarantine of {folder}: {sorted(set_aside - poison)}")


def _failures_explained(client: redis.Redis, run: SmallRun, poison: Set[str]) -> None:
    letters = {letter.batch.batch_id: letter for letter in dead_letters(client, run.name)}
    _same("dead letters", set(letters), set(poison))
    for letter in letters.values():
        numbers = [attempt.number for attempt in letter.attempts]
        _same(f"attempts of {letter.batch.batch_id}", numbers, list(range(1, SETTINGS.max_attempts + 1)))
        if not all(attempt.traceback and attempt.host and attempt.worker for attempt in letter.attempts):
            raise Broken(f"an attempt of {letter.batch.batch_id} has no story: {letter.attempts}")


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        if isinstance(found, set) and isinstance(expected, set):
            raise Broken(f"{what}: too many: {sorted(found - expected)}; missing: {sorted(expected - found)}")
        raise Broken(f"{what}: found {str(found)[:2000]}, expected {str(expected)[:2000]}")
