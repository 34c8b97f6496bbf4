"""The end of a run: the index says where every sample lies, the manifest comes last, and finishing twice is once."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import redis

from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, MissingShard, RunMismatch, StoreAway
from hiddenq.contracts.manifest import INDEX_COLUMNS, SelfCheck
from hiddenq.contracts.shard import ShardFormat
from hiddenq.delivery import Ledger, record_self_check, run_state
from hiddenq.storage import LocalStore, Spool
from hiddenq.storage.runfiles import load_manifest
from tests.uploader.small_run import SmallRun, small_run
from uploader import finish_run, rebuild_ledger
from uploader import index as index_module
from uploader.upload import ledger_entry


def commit(run: SmallRun, client: redis.Redis, spool: Spool, store: LocalStore, num_batches: int = 1000) -> None:
    """Do the work of GPU and uploader for up to so many batches."""
    for shard in run.extract(client, spool, limit=num_batches):
        key = names.shard_key(shard.batch.batch_id, shard.execution)
        store.put_file(key, spool.path(shard.file_name), checksum=shard.checksum, num_bytes=shard.num_bytes)
        Ledger(client, run.name).adopt([ledger_entry(key, shard)])
        spool.delete(shard.file_name)


@pytest.fixture
def run(redis_client: redis.Redis, store: LocalStore) -> SmallRun:
    made = small_run(num_batches=5, num_samples=4)
    made.start(redis_client, store)
    return made


def test_the_index_says_where_each_sample_lies(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "READ_TOKENS", 150)  # token rows are read in several steps
    commit(run, redis_client, spool, store)
    manifest = finish_run(redis_client, run.record(store), store)
    data = store.get_bytes(names.INDEX)
    assert manifest.index_checksum == crc.of_bytes(data)
    table = pq.read_table(io.BytesIO(data))
    assert tuple(table.column_names) == INDEX_COLUMNS
    rows = {row["sample_id"]: row for row in table.to_pylist()}
    assert list(rows) == sorted(rows)
    expected = {sample_id: (ids, mask) for batch in run.rows for sample_id, ids, mask in batch}
    assert rows.keys() == expected.keys()
    shard_format = ShardFormat.of_run(run.config)
    for sample_id, (ids, mask) in expected.items():
        row = rows[sample_id]
        assert row["num_tokens"] == len(ids)
        assert row["num_supervised"] == mask.sum()
        assert row["num_bytes"] == len(ids) * shard_format.bytes_per_token
        assert row["checksum"] == store.checksum(row["shard_key"])
        header = json.loads(store.get_bytes(row["shard_key"], 8, row["data_offset"]))
        offsets = [span["data_offsets"] for name, span in header.items() if name.startswith(f"{sample_id}.")]
        assert min(begin for begin, _ in offsets) + row["data_offset"] == row["byte_offset"]
        assert max(end for _, end in offsets) + row["data_offset"] == row["byte_offset"] + row["num_bytes"]


def test_the_manifest_counts_what_is_in_and_marks_the_run_finished(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    check = SelfCheck(
        batch_id="000001",
        sample_id=3,
        num_tokens=5,
        padded_length=8,
        worker="w",
        max_relative_difference=0.01,
        worst_layer="1",
    )
    record_self_check(redis_client, run.name, check)
    commit(run, redis_client, spool, store)
    manifest = finish_run(redis_client, run.record(store), store)
    assert manifest == load_manifest(store)
    assert manifest.complete
    assert manifest.self_checks == (check,)
    assert (manifest.num_rows, manifest.num_rejected) == (run.config.num_rows, 1)
    assert (manifest.num_batches, manifest.num_batches_committed) == (5, 5)
    assert (manifest.num_samples, manifest.num_samples_committed) == (20, 20)
    assert manifest.num_tokens == manifest.num_tokens_committed == run.config.num_tokens
    assert manifest.num_bytes == sum(info.num_bytes for info in store.list("states/"))
    assert manifest.plan_digest == "p"
    assert run_state(redis_client, run.name) == "finished"


def test_an_unfinished_run_says_so_and_a_later_finish_mends_it(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store, num_batches=3)
    manifest = finish_run(redis_client, run.record(store), store)
    assert (manifest.complete, manifest.num_batches_committed, manifest.num_samples_committed) == (False, 3, 12)
    assert run_state(redis_client, run.name) == "live"
    assert pq.read_table(io.BytesIO(store.get_bytes(names.INDEX))).num_rows == 12
    commit(run, redis_client, spool, store)
    assert finish_run(redis_client, run.record(store), store).complete
    assert pq.read_table(io.BytesIO(store.get_bytes(names.INDEX))).num_rows == 20


def test_finishing_again_changes_nothing_and_concurrent_finishers_make_one(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, redis_client, spool, store)
    written: list[str] = []
    put_bytes = LocalStore.put_bytes

    def note(self: LocalStore, key: str, data: bytes) -> None:
        written.append(key)
        put_bytes(self, key, data)

    monkeypatch.setattr(LocalStore, "put_bytes", note)
    with ThreadPoolExecutor(4) as pool:
        manifests = list(pool.map(lambda _: finish_run(redis_client, run.record(store), store), range(4)))
    assert len({manifest.model_dump_json() for manifest in manifests}) == 1
    assert written == [names.INDEX, names.MANIFEST]
    before = (store.folder / names.MANIFEST).stat().st_mtime_ns
    finish_run(redis_client, run.record(store), store)
    assert (store.folder / names.MANIFEST).stat().st_mtime_ns == before


def test_a_shard_that_was_lost_after_the_end_and_made_again_is_the_one_that_the_index_names(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store)
    first = finish_run(redis_client, run.record(store), store)
    ledger = Ledger(redis_client, run.name)
    lost = ledger.entries()["000001"]
    store.delete(lost.key)
    ledger.forget([lost])
    shard = run.put_into_spool(spool, run.batches[1].job(run.name), "0badcafe")
    key = names.shard_key("000001", shard.execution)
    store.put_file(key, spool.path(shard.file_name), checksum=shard.checksum, num_bytes=shard.num_bytes)
    ledger.adopt([ledger_entry(key, shard)])
    assert shard.num_bytes == lost.num_bytes, "nothing but its name tells it from the first"
    second = finish_run(redis_client, run.record(store), store)
    assert second.complete
    assert second.index_checksum == crc.of_bytes(store.get_bytes(names.INDEX)) != first.index_checksum
    named = set(pq.read_table(io.BytesIO(store.get_bytes(names.INDEX)))["shard_key"].to_pylist())
    assert named == {info.key for info in store.list(names.STATES_PREFIX)}
    assert finish_run(redis_client, run.record(store), store) == second


def test_a_run_json_that_was_changed_on_the_way_is_never_signed_by_a_manifest(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store)
    whole = store.get_bytes(names.RUN_JSON)
    changed = run.config.model_copy(update={"max_length": run.config.max_length + 1})
    store.put_bytes(names.RUN_JSON, changed.to_json().encode())
    with pytest.raises(RunMismatch, match=r"run\.json there .* is not that of run small: max_length: "):
        finish_run(redis_client, run.record(store), store)
    assert load_manifest(store) is None
    store.put_bytes(names.RUN_JSON, whole)
    assert finish_run(redis_client, run.record(store), store).complete


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_an_index_that_is_gone_or_damaged_is_written_again(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore, damage: str
) -> None:
    commit(run, redis_client, spool, store)
    finish_run(redis_client, run.record(store), store)
    index = store.get_bytes(names.INDEX)
    store.delete(names.INDEX)
    if damage == "cut":
        store.put_bytes(names.INDEX, index[:-1])
    assert finish_run(redis_client, run.record(store), store).complete
    assert store.get_bytes(names.INDEX) == index


def test_losing_twins_are_removed_and_open_batches_are_left_alone(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store, num_batches=4)
    committed = {info.key for info in store.list("states/")}
    twin, open_shard = names.shard_key("000000", "abcdef01"), names.shard_key("000004", "abcdef01")
    store.put_bytes(twin, b"x")
    store.put_bytes(open_shard, b"x")
    finish_run(redis_client, run.record(store), store)
    assert {info.key for info in store.list("states/")} == committed | {open_shard}


def test_what_a_killed_uploader_left_half_written_is_gone_at_the_end_and_what_one_still_writes_is_not(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store, num_batches=4)
    [under_way] = run.extract(redis_client, spool, limit=1)
    for shard in run.published.values():
        if shard is not under_way:  # `commit` does no more than the store's part
            job = names.upload_job_id(run.name, shard.batch.batch_id, shard.execution)
            redis_client.hset(f"rq:job:{job}", "status", "finished")
    states = store.folder / "states"
    dead = states / f".tmp-00000001-{run.published['000000'].file_name}"
    twin = states / f".tmp-00000002-{names.shard_file_name('000001', 'abcdef01')}"
    live = states / f".tmp-00000003-{under_way.file_name}"
    another = store.folder / ".tmp-00000004-owner.json"
    for path in (dead, twin, live, another):
        path.write_bytes(b"half")
    assert not finish_run(redis_client, run.record(store), store).complete
    assert {path for path in (dead, twin, live, another) if path.exists()} == {live, another}


def test_no_manifest_counts_a_shard_that_is_not_there(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store)
    key = next(store.list("states/")).key
    data = store.get_bytes(key)
    store.delete(key)
    with pytest.raises(MissingShard, match=rf"committed shards are gone from the store \(1, first {key}\)"):
        finish_run(redis_client, run.record(store), store)
    store.put_bytes(key, data[:-1])
    with pytest.raises(MissingShard, match=f"{key}: committed with {len(data)} bytes, found {len(data) - 1}"):
        finish_run(redis_client, run.record(store), store)
    assert load_manifest(store) is None


def test_a_store_that_goes_away_between_index_and_manifest_leaves_no_manifest(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, redis_client, spool, store, num_batches=2)
    finish_run(redis_client, run.record(store), store)
    commit(run, redis_client, spool, store)
    put_bytes = LocalStore.put_bytes

    def away(self: LocalStore, key: str, data: bytes) -> None:
        if key == names.MANIFEST:
            raise StoreAway("away")
        put_bytes(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_bytes", away)
        with pytest.raises(StoreAway):
            finish_run(redis_client, run.record(store), store)
    assert load_manifest(store) is None, "an old one would contradict the new index"
    assert finish_run(redis_client, run.record(store), store).complete


def test_the_ledger_is_rebuilt_from_the_store_alone(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store)
    entries = list(Ledger(redis_client, run.name).entries().values())
    seen: list[tuple[int, int]] = []
    assert rebuild_ledger(store, run.config, progress=lambda done, total: seen.append((done, total))) == entries
    assert seen[-1] == (5, 5)
    redis_client.flushall()
    run.start(redis_client, store)
    assert Ledger(redis_client, run.name).adopt(rebuild_ledger(store, run.config)) == 5
    assert finish_run(redis_client, run.record(store), store).complete


def test_only_whole_shards_of_their_batch_are_adopted(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    commit(run, redis_client, spool, store)
    keys = [info.key for info in store.list("states/")]
    flipped, cut, other, gone = keys[:4]
    path = store.folder / flipped
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:  # its recorded checksum stays beside it
        file.write(data)
    (store.folder / cut).write_bytes(store.get_bytes(cut)[:-1])
    (store.folder / other).write_bytes(store.get_bytes(keys[4]))
    store.delete(gone)
    store.put_bytes("states/000004-ffffffff.safetensors", store.get_bytes(keys[4]))
    store.put_bytes("states/000009-ffffffff.safetensors", store.get_bytes(keys[4]))
    store.put_bytes("states/notes.txt", b"x")
    (entry,) = rebuild_ledger(store, run.config)
    assert entry.batch_id == "000004"


def test_a_flip_that_nothing_beside_the_shard_would_tell_is_told_by_the_index(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store)
    finish_run(redis_client, run.record(store), store)
    key = next(store.list("states/")).key
    data = bytearray(store.get_bytes(key))
    data[-1] ^= 1
    store.delete(key)
    store.put_bytes(key, bytes(data))
    assert len(rebuild_ledger(store, run.config)) == 4


def test_of_two_whole_shards_the_one_in_the_index_is_adopted(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    commit(run, redis_client, spool, store)
    finish_run(redis_client, run.record(store), store)
    key = next(store.list("states/")).key
    store.put_bytes(names.shard_key("000000", "00000000"), store.get_bytes(key))
    assert rebuild_ledger(store, run.config)[0].key == key
    store.delete(names.INDEX)
    assert rebuild_ledger(store, run.config)[0].key == names.shard_key("000000", "00000000")


def test_a_ledger_that_contradicts_the_token_parts_is_found_out(
    run: SmallRun, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    (shard,) = run.extract(redis_client, spool, limit=1)
    key = names.shard_key(shard.batch.batch_id, shard.execution)
    store.put_bytes(key, bytes(shard.num_bytes))
    entry = ledger_entry(key, shard)
    Ledger(redis_client, run.name).adopt([entry.model_copy(update={"data_offset": entry.data_offset + 8})])
    with pytest.raises(DamagedShard, match=f"{key}: expected {shard.num_bytes + 8} bytes for batch 000000"):
        finish_run(redis_client, run.record(store), store)


def test_an_index_of_nothing_has_its_columns(run: SmallRun, redis_client: redis.Redis, store: LocalStore) -> None:
    manifest = finish_run(redis_client, run.record(store), store)
    assert (manifest.complete, manifest.num_batches_committed) == (False, 0)
    table = pq.read_table(io.BytesIO(store.get_bytes(names.INDEX)))
    assert tuple(table.column_names) == INDEX_COLUMNS
    assert table.num_rows == 0
    assert np.issubdtype(table["sample_id"].to_numpy().dtype, np.int64)
