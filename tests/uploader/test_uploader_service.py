"""An uploader's loop against a real Redis: from spool to store to ledger, whatever state it finds."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, RunMismatch, StoreRefused, UsageError
from hiddenq.delivery import Ledger, dead_letters, fleet, retry_dead
from hiddenq.storage import LocalStore, Spool
from hiddenq.storage.runfiles import load_manifest
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.running import RunningUploader, finished, invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run
from uploader import UploaderSettings, serve
from uploader.upload import check_header, ledger_entry


def test_every_shard_ends_in_the_store_and_in_the_ledger_and_no_longer_in_the_spool(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=7)
    run.start(redis_client, store)
    with running_uploader(redis_server, spool) as uploader:
        run.extract(redis_client, spool)
        finished(redis_client, run)
        report = uploader.status.report()
        assert (report.num_batches, report.num_tokens) == (7, run.config.num_tokens)
        assert report.target == f"{spool.spool_id}:0"
        assert report.tokens_per_second > 0
        assert set(report.stage_seconds) == {"put", "commit", "delete"}
        assert uploader.metric("files_total", result="committed") == 7
        assert uploader.metric("uploaded_bytes_total") == report.num_bytes
        for stage in ("put", "commit", "delete"):
            assert uploader.metric("stage_seconds_count", stage=stage) == 7
        assert uploader.metric("store_away") == 0
    invariant_holds(redis_client, run, store, spool)
    for shard in run.published.values():
        assert store.checksum(names.shard_key(shard.batch.batch_id, shard.execution)) == shard.checksum


def test_two_runs_share_a_spool_and_two_uploaders_share_its_queue(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, tmp_path: Path
) -> None:
    runs = [small_run(name=name, num_batches=5, seed=seed) for seed, name in enumerate(("one", "two"))]
    stores = [LocalStore(tmp_path / run.name) for run in runs]
    for run, store in zip(runs, stores, strict=True):
        run.start(redis_client, store)
        run.extract(redis_client, spool)
    with running_uploader(redis_server, spool), running_uploader(redis_server, spool, index=1):
        for run in runs:
            finished(redis_client, run)
    for run, store in zip(runs, stores, strict=True):
        invariant_holds(redis_client, run, store, spool)


def test_a_run_that_lost_a_shard_after_its_end_is_finished_again_by_the_same_process(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=3)
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
        ledger = Ledger(redis_client, run.name)
        lost = ledger.entries()["000001"]
        store.delete(lost.key)
        ledger.forget([lost])
        run.start(redis_client, store)
        assert [shard.batch.batch_id for shard in run.extract(redis_client, spool)] == ["000001"]
        finished(redis_client, run)
    index = pq.read_table(io.BytesIO(store.get_bytes(names.INDEX)))
    assert set(index["shard_key"].to_pylist()) == {info.key for info in store.list(names.STATES_PREFIX)}
    invariant_holds(redis_client, run, store, spool)


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


def test_a_location_that_is_another_runs_here_ends_the_process_and_hands_the_shard_back(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=1)
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    store.delete(names.RUN_JSON)
    with running_uploader(redis_server, spool) as uploader:
        error = uploader.join()
    assert isinstance(error, RunMismatch)
    assert "no run.json there as" in str(error)
    assert "a local folder must be the same on every machine (shared), or use s3://" in str(error)
    subprocess.run(["mv", store.uri, f"{store.uri}-elsewhere"], check=True)
    with running_uploader(redis_server, spool) as uploader:
        error = uploader.join()
    assert isinstance(error, RunMismatch)
    assert not store.folder.exists()
    small_run(num_batches=1, hidden_size=32).write(store)
    with running_uploader(redis_server, spool) as uploader:
        error = uploader.join()
    assert isinstance(error, RunMismatch)
    assert "is not that of run small: model.hidden_size: 16 there, 32 asked for" in str(error)
    run.write(store)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_an_uploader_can_be_confined_to_a_prefix(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    run = small_run(num_batches=1)
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    with running_uploader(redis_server, spool, allowed_prefix=f"{tmp_path}/ou") as uploader:
        error = uploader.join()
    assert isinstance(error, StoreRefused)
    assert f"may only write below {tmp_path}/ou (--allowed-prefix)" in str(error)
    with running_uploader(redis_server, spool, allowed_prefix=f"{tmp_path}/"):
        finished(redis_client, run)


def test_kept_copies_are_a_run_of_their_own(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    run = small_run(num_batches=3)
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    with running_uploader(redis_server, spool, keep_local=tmp_path / "kept"):
        finished(redis_client, run)
        mirror = LocalStore(tmp_path / "kept" / run.name)
        wait_until(lambda: load_manifest(mirror))
    assert [info.key for info in mirror.list()] == [info.key for info in store.list()]
    for info in store.list():
        assert mirror.get_bytes(info.key) == store.get_bytes(info.key)
    assert spool.files() == []


def test_a_redis_that_is_away_is_waited_for_with_the_file_kept(
    own_redis_server: RedisServer, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=6)
    with own_redis_server.client() as client:
        run.start(client, store)
        run.extract(client, spool)
    with running_uploader(own_redis_server, spool, num_concurrent=1) as uploader:
        wait_until(lambda: uploader.metric("files_total", result="committed") >= 1)
        own_redis_server.restart(away_seconds=0.5)
        with own_redis_server.client() as client:
            finished(client, run)
            invariant_holds(client, run, store, spool)
        assert uploader.error is None


def test_a_process_serves_its_metrics_is_nice_and_asked_to_stop_exits_143(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=2)
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    program = f"""
import sys
from pathlib import Path
from uploader import UploaderSettings, serve
sys.exit(serve(UploaderSettings(spool=Path({str(spool.folder)!r}), metrics_port={free_port()})))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "HIDDENQ_REDIS_URL": redis_server.url}
    )
    finished(redis_client, run)
    (worker,) = [worker for worker in fleet(redis_client).workers if worker.report.role == "uploader"]
    with urllib.request.urlopen(f"http://{worker.report.metrics_address}/metrics", timeout=10) as answer:
        assert 'hiddenq_uploader_files_total{result="committed"} 2.0' in answer.read().decode()
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10, "it never takes a processor from a GPU worker"
    process.terminate()
    assert process.wait(20) == 143
    invariant_holds(redis_client, run, store, spool)


def test_no_uploader_imports_torch() -> None:
    program = "import sys; import uploader; assert 'torch' not in sys.modules; assert 'boto3' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_concurrent": 0}, "num_concurrent 0: expected 1 or more"),
        ({"nice": 20}, "--nice 20: expected 0 to 19"),
        ({"reconcile_seconds": 0}, "reconcile_seconds 0: expected a positive number"),
    ],
)
def test_settings_that_can_not_be_are_refused(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        UploaderSettings(spool=tmp_path, **settings)


def test_a_start_without_redis_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIDDENQ_REDIS_URL", raising=False)
    with pytest.raises(UsageError, match="no Redis address"):
        serve(UploaderSettings(spool=tmp_path / "spool"))


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
