"""An uploader process's loop, in a thread, against a real Redis: from spool to store to ledger."""

from __future__ import annotations

import redis

from hiddenq.contracts import names
from hiddenq.delivery import run_state
from hiddenq.storage import LocalStore, Spool
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.uploader.running import invariant_holds, running_uploader
from tests.uploader.small_run import small_run


def test_every_shard_ends_in_the_store_in_the_ledger_and_no_longer_in_the_spool(
    redis_server: RedisServer, redis_client: redis.Redis, spool: Spool, store: LocalStore
) -> None:
    run = small_run(num_batches=7)
    run.start(redis_client, store)
    with running_uploader(redis_server, spool):
        run.extract(redis_client, spool)
        wait_until(lambda: run_state(redis_client, run.name) == "finished")
    invariant_holds(redis_client, run, store, spool)
    for shard in run.published.values():
        key = names.shard_key(shard.batch.batch_id, shard.execution)
        assert store.checksum(key) == shard.checksum
