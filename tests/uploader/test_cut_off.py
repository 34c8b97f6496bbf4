"""A host that was cut off and comes back, and one that has another name now: one shard a batch, none lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from hiddenq.contracts import names
from hiddenq.delivery import Ledger, Reaper, uploads_of
from hiddenq.storage import LocalStore, Spool
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.running import finished, invariant_holds, running_uploader
from tests.uploader.small_run import FAST, small_run

CUT_OFF = FAST.model_copy(update={"spool_dead_seconds": 2.0})


@pytest.mark.parametrize("committed_meanwhile", [True, False])
def test_the_shards_of_a_host_that_comes_back_are_twins_and_one_of_each_is_committed(
    redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path, committed_meanwhile: bool
) -> None:
    run, store = small_run(num_batches=3), LocalStore(tmp_path / "out")
    run.settings = CUT_OFF
    run.start(redis_client, store)
    cut_off, other = Spool.open(tmp_path / "cut-off"), Spool.open(tmp_path / "other")
    first = {shard.execution for shard in run.extract(redis_client, cut_off)}
    with Reaper(redis_client, CUT_OFF):
        wait_until(lambda: uploads_of(redis_client, run.name) == {}, what="its shards are to be made again")
    second = {shard.execution for shard in run.extract(redis_client, other)}
    assert len(second) == 3
    if committed_meanwhile:
        with running_uploader(redis_server, other):
            finished(redis_client, run)
    for entry in cut_off.files():
        os.utime(cut_off.path(entry.file_name), (1, 1))
    with running_uploader(redis_server, cut_off), running_uploader(redis_server, other):  # it is back
        finished(redis_client, run)
        wait_until(lambda: cut_off.files() == [], what="twins are removed")
    committed = {entry.execution for entry in Ledger(redis_client, run.name).entries().values()}
    assert committed <= first | second
    if committed_meanwhile:
        assert committed == second
    assert len(list(store.list(names.STATES_PREFIX))) == 3
    for spool in (cut_off, other):
        invariant_holds(redis_client, run, store, spool)
    remakes = {redis_client.hget(f"rq:job:{run.name}-{batch.batch_id}", "remakes") for batch in run.batches}
    assert remakes == {b"1"}


def test_a_container_with_a_new_name_goes_on_with_the_spool_it_finds(
    redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = small_run(num_batches=2), LocalStore(tmp_path / "out")
    run.start(redis_client, store)
    monkeypatch.setenv("HIDDENQ_HOST", "old-container")
    shards = run.extract(redis_client, Spool.open(tmp_path / "spool"))
    (tmp_path / "spool").rename(tmp_path / "mounted-elsewhere")
    monkeypatch.setenv("HIDDENQ_HOST", "new-container")
    spool = Spool.open(tmp_path / "mounted-elsewhere")
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    committed = {entry.execution for entry in Ledger(redis_client, run.name).entries().values()}
    assert committed == {shard.execution for shard in shards}, "nothing was made again"
    invariant_holds(redis_client, run, store, spool)
