"""A local location that is not there for a while (unmounted, moved, read-only): nothing is lost, stored elsewhere or
charged, who waits says why, and the run goes on when it is back.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import StoreAway
from hiddenq.delivery import Ledger, RunRecord, refusals
from hiddenq.storage import LocalStore, Spool
from tests.support.redis_server import RedisServer
from tests.support.small_disk import small_disk
from tests.support.waiting import wait_until
from tests.uploader.running import RunningUploader, finished, invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run
from uploader import finish_run, upload

__all__ = ["small_disk"]


@pytest.fixture(autouse=True)
def _tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "LONGEST_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(refusals, "FIRST_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(refusals, "LONGEST_WAIT_SECONDS", 0.5)


@pytest.fixture
def run() -> SmallRun:
    return small_run(num_batches=4)


def begun(client: redis.Redis, run: SmallRun, store: LocalStore, spool: Spool) -> None:
    """One shard of it is committed."""
    run.extract(client, spool, limit=1)
    wait_until(lambda: len(Ledger(client, run.name).entries()) == 1, what="the first commit")


def waits_for(uploader: RunningUploader, text: str) -> None:
    wait_until(lambda: text in uploader.status.report().detail, what=f"it says: {text}")
    assert uploader.status.report().state == "waiting"


def nothing_charged(client: redis.Redis, run: SmallRun) -> bool:
    jobs = [names.upload_job_id(run.name, batch, shard.execution) for batch, shard in run.published.items()]
    jobs += [f"{run.name}-{batch}" for batch in run.published]
    return all(not client.hget(f"rq:job:{job}", field) for job in jobs for field in ("attempts", "remakes"))


def moved_away(out: Path) -> Callable[[], None]:
    away = out.rename(out.with_name("away"))

    def come_back() -> None:
        away.rename(out)

    return come_back


def unmounted(out: Path) -> Callable[[], None]:
    back = moved_away(out)
    out.mkdir()  # the mount point

    def mount() -> None:
        assert list(out.iterdir()) == [], "nothing was stored below the mount point"
        out.rmdir()
        back()

    return mount


def a_file_instead(out: Path) -> Callable[[], None]:
    back = moved_away(out)
    out.write_text("no folder")

    def come_back() -> None:
        out.unlink()
        back()

    return come_back


@pytest.mark.parametrize("goes", [moved_away, unmounted, a_file_instead])
def test_a_location_that_is_not_there_is_waited_for_and_nothing_is_stored_in_its_place(
    goes: Callable[[Path], Callable[[], None]],
    run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore,
) -> None:  # fmt: skip
    run.start(redis_client, store)
    with running_uploader(redis_server, spool) as uploader:
        begun(redis_client, run, store, spool)
        come_back = goes(store.folder)
        run.extract(redis_client, spool)
        waits_for(uploader, f"{store.folder}: run.json is not there any more (unmounted, moved or removed?)")
        assert len(Ledger(redis_client, run.name).entries()) == 1
        assert nothing_charged(redis_client, run)
        come_back()
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_another_run_mounted_in_the_place_of_a_location_gets_nothing_of_it(
    run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    run.start(redis_client, store)
    other = LocalStore(tmp_path / "other")
    small_run(name="other").write(other)
    with running_uploader(redis_server, spool) as uploader:
        begun(redis_client, run, store, spool)
        back = moved_away(store.folder)
        other.folder.rename(store.folder)
        run.extract(redis_client, spool)
        waits_for(uploader, f"{store.folder}/run.json is not the one that was there before (another disk mounted?)")
        assert not (store.folder / "states").exists()
        assert nothing_charged(redis_client, run)
        store.folder.rename(other.folder)
        back()
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_a_location_that_becomes_read_only_is_waited_for(
    run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, small_disk: Path
) -> None:
    store = LocalStore(small_disk / "out")
    run.start(redis_client, store)
    with running_uploader(redis_server, spool) as uploader:
        begun(redis_client, run, store, spool)
        remount(small_disk, "ro")
        try:
            run.extract(redis_client, spool)
            waits_for(uploader, "the file system is read-only; mount it writable")
            assert nothing_charged(redis_client, run)
        finally:
            remount(small_disk, "rw")
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_the_end_of_a_run_waits_for_its_location_as_long_as_it_is_told(
    run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run.start(redis_client, store)
    with running_uploader(redis_server, spool):
        run.extract(redis_client, spool)
        finished(redis_client, run)
    record: RunRecord = run.record(store)
    store.anchor(names.RUN_JSON)
    back = moved_away(store.folder)
    with pytest.raises(StoreAway, match=r"run\.json is not there any more"):
        finish_run(redis_client, record, store)
    assert not store.folder.exists()
    back()
    assert finish_run(redis_client, record, store.patient(60)).complete


def remount(disk: Path, how: str) -> None:
    """Waits for who is writing just now."""
    command = ["mount", "-o", f"remount,{how}", str(disk)]
    wait_until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, what=str(command))
