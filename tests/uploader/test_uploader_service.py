"""An uploader's loop against a real Redis: from spool to store to ledger, one run or several."""

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
from hiddenq.contracts.errors import RunMismatch, StoreRefused, UsageError
from hiddenq.delivery import Ledger, fleet
from hiddenq.storage import LocalStore, Spool
from hiddenq.storage.runfiles import load_manifest
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.running import finished, invariant_holds, running_uploader
from tests.uploader.small_run import small_run
from uploader import UploaderSettings, serve


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
    with urllib.request.urlopen(f"http://{worker.report.metrics_address}/metrics", timeout=60) as answer:
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
