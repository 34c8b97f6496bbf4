"""A shard that is damaged, gone, late or refused: its batch is still committed once, from whole bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard
from hiddenq.delivery import Ledger, dead_letters, retry_dead
from hiddenq.storage import LocalStore, Spool
from hiddenq.storage.runfiles import load_manifest
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.running import RunningUploader, finished, invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run
from uploader.upload import check_header, ledger_entry


@pytest.mark.parametrize("damage", ["flipped", "cut", "grown", "header", "replaced by a link"])
def test_a_file_that_is_not_what_the_worker_recorded_is_set_aside_and_its_batch_made_again(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path, damage: str
) -> None:
    run = small_run(num_batches=3)
    run.start(redis_client, store)
    first = run.extract(redis_client, spool)
    path = spool.path(first[1].file_name)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-2] ^= 4
    elif damage == "cut":
        del data[-1]
    elif damage == "grown":
        data += b"x"
    elif damage == "header":
        data[:8] = b"\xff" * 8
    path.write_bytes(data)
    if damage == "replaced by a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with running_uploader(redis_server, spool) as uploader:
        again = wait_until(lambda: run.extract(redis_client, spool))
        finished(redis_client, run)
        assert uploader.metric("files_total", result="quarantined") == 1
    assert [shard.batch.batch_id for shard in again] == [first[1].batch.batch_id]
    assert (spool.folder / "quarantine" / first[1].file_name).is_symlink() == (damage == "replaced by a link")
    assert (spool.folder / "quarantine" / f"{first[1].file_name}.reason").read_text().startswith(first[1].file_name)
    invariant_holds(redis_client, run, store, spool)


def test_a_file_cut_anywhere_is_told_by_its_size_or_header_before_a_byte_is_sent(spool: Spool) -> None:
    run = small_run(num_batches=1)
    shard = run.put_into_spool(spool, run.batches[0].job(run.name), "abcdef01")
    data = spool.path(shard.file_name).read_bytes()
    with spool.open_shard(shard.file_name) as file:
        check_header(file, shard)
    for size in (0, 4, 8, 20, len(data) - 1):
        spool.path(shard.file_name).write_bytes(data[:size])
        for told in (shard, shard.model_copy(update={"num_bytes": max(1, size)})):
            with spool.open_shard(shard.file_name) as file, pytest.raises(DamagedShard, match=shard.file_name):
                check_header(file, told)


def test_a_file_that_is_gone_is_made_again_twice_and_then_a_dead_letter_that_a_retry_mends(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=2)
    run.start(redis_client, store)
    lost = names.batch_id(1)
    with running_uploader(redis_server, spool) as uploader:
        for _ in range(3):
            for shard in wait_until(lambda: _publish_and_lose(run, redis_client, spool, lost)):
                assert shard == lost
        wait_until(lambda: dead_letters(redis_client, run.name))
        manifest = wait_until(lambda: load_manifest(store))
        assert uploader.metric("files_total", result="missing") == 3
        assert (manifest.complete, manifest.dead_letters) == (False, (lost,))
        assert "made again 2 times" in store.get_bytes(names.DEAD_LETTERS).decode()
        retry_dead(redis_client, run.name)
        run.extract(redis_client, spool)
        finished(redis_client, run)
    assert store.stat(names.DEAD_LETTERS) is None
    invariant_holds(redis_client, run, store, spool)


def _publish_and_lose(run: SmallRun, client: redis.Redis, spool: Spool, lost: str) -> list[str]:
    """Do the GPU's work; the file of batch `lost` is gone when its upload job is queued."""
    gone = []
    with run.worker(client, spool) as consumer:
        for claim in consumer.claim(10):
            shard = run.put_into_spool(spool, claim.message, claim.execution)
            if shard.batch.batch_id == lost:
                spool.delete(shard.file_name)
                gone.append(lost)
            consumer.publish(claim, shard)
    return gone


def test_a_shard_already_in_the_store_is_committed_even_if_its_file_is_gone(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=1)
    run.start(redis_client, store)
    (shard,) = run.extract(redis_client, spool)
    key = names.shard_key(shard.batch.batch_id, shard.execution)
    store.put_file(key, spool.path(shard.file_name), checksum=shard.checksum, num_bytes=shard.num_bytes)
    spool.delete(shard.file_name)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_a_twin_is_deleted_and_changes_nothing(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    run = small_run(num_batches=2)
    run.start(redis_client, store)
    (late, other) = run.extract(redis_client, spool)
    winner = run.put_into_spool(Spool.open(tmp_path / "other"), late.batch, "abcdef01")
    key = names.shard_key(winner.batch.batch_id, winner.execution)
    file = tmp_path / "other" / winner.file_name
    store.put_file(key, file, checksum=winner.checksum, num_bytes=winner.num_bytes)
    Ledger(redis_client, run.name).adopt([ledger_entry(key, winner)])
    with running_uploader(redis_server, spool) as uploader:
        finished(redis_client, run)
        assert uploader.metric("files_total", result="twin") == 1
    invariant_holds(redis_client, run, store, spool)
    assert Ledger(redis_client, run.name).entries()[late.batch.batch_id].execution == "abcdef01"
    assert store.stat(names.shard_key(other.batch.batch_id, other.execution))


def test_a_twin_that_lost_while_it_was_sent_is_removed_from_the_store(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(num_batches=1)
    run.start(redis_client, store)
    (shard,) = run.extract(redis_client, spool)
    put_file = LocalStore.put_file

    def put_and_lose(self: LocalStore, key: str, path: Path, *, checksum: str, num_bytes: int) -> object:
        info = put_file(self, key, path, checksum=checksum, num_bytes=num_bytes)
        rival = shard.model_copy(update={"execution": "abcdef01"})
        rival_key = names.shard_key(rival.batch.batch_id, rival.execution)
        put_file(self, rival_key, path, checksum=checksum, num_bytes=num_bytes)
        Ledger(redis_client, run.name).adopt([ledger_entry(rival_key, rival)])
        return info

    monkeypatch.setattr(LocalStore, "put_file", put_and_lose)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_an_upload_that_fails_again_and_again_is_a_dead_letter_and_frees_the_spool(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(num_batches=2)
    run.start(redis_client, store)
    shards = run.extract(redis_client, spool)
    put_file, broken = LocalStore.put_file, {shards[0].file_name}

    def fail(self: LocalStore, key: str, path: Path, *, checksum: str, num_bytes: int) -> object:
        if path.name in broken:
            raise RuntimeError("a fault of ours")
        return put_file(self, key, path, checksum=checksum, num_bytes=num_bytes)

    monkeypatch.setattr(LocalStore, "put_file", fail)
    with running_uploader(redis_server, spool) as uploader:
        manifest = wait_until(lambda: load_manifest(store))
        assert manifest.dead_letters == (shards[0].batch.batch_id,)
        assert uploader.metric("errors_total", error="RuntimeError") == 4
        wait_until(lambda: spool.usage().num_bytes == 0)
        letter = dead_letters(redis_client, run.name)[0]
        assert [attempt.error for attempt in letter.attempts] == ["RuntimeError: a fault of ours"] * 4
        broken.clear()
        retry_dead(redis_client, run.name)
        wait_until(lambda: run.extract(redis_client, spool))
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_a_claim_lost_while_waiting_leaves_the_file_to_the_other_uploader(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=1)
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    running = RunningUploader(redis_server, spool)
    claim = running.consumer.claim(1)[0]
    running.consumer.hand_back(claim)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    running.uploader._upload.handle(claim)
    running.consumer.close()
    running.client.close()
    invariant_holds(redis_client, run, store, spool)
