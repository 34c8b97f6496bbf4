"""A spool mounted in the wrong place, or copied, is found by its id or refused; no shard is lost, no batch made again
twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hiddenq.contracts.errors import SpoolGone
from hiddenq.delivery import Ledger, Reaper, connect, uploads_of
from hiddenq.storage import LocalStore, Spool
from tests.support.command import make_command
from tests.support.redis_server import RedisServer, own_redis_server
from tests.support.waiting import wait_until
from tests.uploader.running import finished, invariant_holds, running_uploader
from tests.uploader.small_run import FAST, SmallRun, small_run

__all__ = ["own_redis_server"]

SILENT_SOON = FAST.model_copy(update={"spool_dead_seconds": 2.0})


@pytest.fixture
def run() -> SmallRun:
    return small_run(num_batches=3)


@pytest.fixture
def other_fleet(own_redis_server: RedisServer) -> Iterator[redis.Redis]:
    client = connect(own_redis_server.url)
    yield client
    client.close()


def remakes(client: redis.Redis, run: SmallRun) -> list[int]:
    found = (client.hget(f"rq:job:{run.name}-{batch.batch_id}", "remakes") for batch in run.batches)
    return [int(number or 0) for number in found]


def test_the_spool_of_another_host_is_found_by_its_id_and_serves_both(
    run: SmallRun,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run.start(redis_client, store)
    shards = run.extract(redis_client, spool)
    monkeypatch.setenv("HIDDENQ_HOST", "another-host")
    mounted_there = Spool.open(spool.folder)
    assert mounted_there.spool_id == spool.spool_id
    with running_uploader(redis_server, spool), running_uploader(redis_server, mounted_there):
        finished(redis_client, run)
    committed = {entry.execution for entry in Ledger(redis_client, run.name).entries().values()}
    assert committed == {shard.execution for shard in shards}
    assert remakes(redis_client, run) == [0, 0, 0]
    invariant_holds(redis_client, run, store, spool)


def test_the_spool_of_another_fleet_is_left_alone_and_that_fleet_uploads_it(
    run: SmallRun,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    own_redis_server: RedisServer,
    other_fleet: redis.Redis,
    spool: Spool,
    store: LocalStore,
    tmp_path: Path,
) -> None:
    run.start(redis_client, store)
    theirs, their_store = small_run(name="theirs", num_batches=2), LocalStore(tmp_path / "theirs")
    theirs.start(other_fleet, their_store)
    shards = run.extract(redis_client, spool)
    with running_uploader(own_redis_server, spool) as mistaken:  # it was given our spool
        theirs.extract(other_fleet, spool)
        finished(other_fleet, theirs)
        wait_until(lambda: (look := mistaken.uploader._oversight) and look.done(), what="it looked for orphans")
        assert {entry.file_name for entry in spool.files()} == {shard.file_name for shard in shards}
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    assert remakes(redis_client, run) == [0, 0, 0]
    invariant_holds(redis_client, run, store, spool)
    invariant_holds(other_fleet, theirs, their_store, spool)


def test_an_empty_folder_in_the_place_of_a_spool_has_its_batches_made_again_once_and_what_returns_is_twins(
    run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    run.settings = SILENT_SOON
    run.start(redis_client, store)
    run.extract(redis_client, spool)
    spool.folder.rename(tmp_path / "unmounted")
    instead = Spool.open(spool.folder)
    assert instead.spool_id != spool.spool_id
    with Reaper(redis_client, SILENT_SOON), running_uploader(redis_server, instead):
        wait_until(lambda: uploads_of(redis_client, run.name) == {}, what="its shards are to be made again")
        assert len(run.extract(redis_client, instead)) == 3
        finished(redis_client, run)
    back = Spool.open(tmp_path / "unmounted")
    assert back.spool_id == spool.spool_id
    assert len(back.files()) == 3
    with running_uploader(redis_server, back):
        wait_until(lambda: back.files() == [], what="twins are removed")
    assert remakes(redis_client, run) == [1, 1, 1]
    invariant_holds(redis_client, run, store, back)


def test_a_copy_of_a_spool_in_use_is_refused_in_one_line_and_costs_the_first_one_nothing(
    run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore, tmp_path: Path
) -> None:
    run.settings = FAST.model_copy(update={"lease_seconds": 60.0})  # the first is alive, however slow this machine is
    run.start(redis_client, store)
    shards = run.extract(redis_client, spool, limit=1)
    copy = Path(shutil.copytree(spool.folder, tmp_path / "copy"))
    hiddenq = make_command(tmp_path, HIDDENQ_REDIS_URL=redis_server.url)
    with running_uploader(redis_server, spool, delivery=run.settings):
        ended = hiddenq("upload", "--spool", copy, "--uploaders", "1")
        assert ended.status == 2, ended
        [line] = [line for line in ended.err.splitlines() if line.startswith("hiddenq: ")]
        assert f"--spool {copy}: it has the id of a spool that process " in line
        assert f"in {spool.folder}, another folder" in line
        assert f"delete {copy}/spool_id and start again" in line
        shards += run.extract(redis_client, spool)
        finished(redis_client, run)
    committed = {entry.execution for entry in Ledger(redis_client, run.name).entries().values()}
    assert committed == {shard.execution for shard in shards}
    assert remakes(redis_client, run) == [0, 0, 0]
    invariant_holds(redis_client, run, store, spool)


@pytest.mark.parametrize("instead", ["nothing", "an empty folder", "another spool"])
def test_a_spool_that_is_unmounted_under_its_uploader_ends_it_and_nothing_is_made_again(
    instead: str, run: SmallRun, redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore,
    tmp_path: Path,
) -> None:  # fmt: skip
    run.start(redis_client, store)
    with running_uploader(redis_server, spool) as uploader:
        folder = spool.folder
        # The same spool in another place, where shards reach it and the uploader does not.
        elsewhere = Spool.open(tmp_path / "away").folder
        (folder / "spool_id").replace(elsewhere / "spool_id")
        away = Spool.open(elsewhere)
        if instead == "nothing":
            folder.rename(tmp_path / "old")
        elif instead == "another spool":
            Spool.open(folder)
        run.extract(redis_client, away)
        error = uploader.join()
    assert isinstance(error, SpoolGone)
    assert f"spool {spool.spool_id} does not lie there any more" in str(error)
    assert remakes(redis_client, run) == [0, 0, 0]
    with pytest.raises(SpoolGone, match="mount it again and start again: its shards are waited for"):
        spool.reserve("000000-0123abcd.safetensors", 100)
    with running_uploader(redis_server, away):  # it is mounted again
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, away)
