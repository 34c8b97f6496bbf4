"""Shards that are lost between the GPU and the store: made again, but never more than twice."""

from __future__ import annotations

import pytest

from hiddenq.contracts.errors import LeaseLost
from hiddenq.delivery import Ledger, Reaper, dead_letters, fleet, retry_dead, spool_file_names
from tests.delivery.conftest import FAST, FASTER, OTHER_SPOOL, SPOOL, Bench, entry, shard
from tests.support.waiting import wait_until

QUEUE = "rq:queue:hiddenq-extract-run"


def test_a_host_gone_for_good_has_its_uncommitted_batches_made_again_elsewhere(bench: Bench) -> None:
    bench.enqueue(3)
    gone, gone_uploader = bench.gpu_worker(), bench.uploader()
    assert bench.run_all(gone) == 3
    [committed, started] = gone_uploader.claim(2)
    gone_uploader.commit(committed, entry(committed.message))
    gone.close()
    gone_uploader._keeper.close()  # died with an upload under its hands
    with Reaper(bench.client, FAST):
        wait_until(lambda: bench.client.llen(QUEUE) == 2)
    other, uploader = bench.gpu_worker(spool_id=OTHER_SPOOL), bench.uploader(OTHER_SPOOL)
    assert bench.run_all(other, OTHER_SPOOL) == 2
    assert bench.upload_all(uploader) == 2
    assert Ledger(bench.client, "run").totals().num_batches == 3
    assert spool_file_names(bench.client, SPOOL) == set()
    with pytest.raises(LeaseLost, match="is not committed"):  # the host was only cut off, and comes back
        gone_uploader.commit(started, entry(started.message))
    assert bench.client.zcard("rq:failed:hiddenq-extract-run") == 0


def test_a_spool_with_a_heartbeat_keeps_its_shards_however_long_they_wait(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    bench.run_all(worker)
    bench.client.zadd("hiddenq:spools", {OTHER_SPOOL: 1})
    with Reaper(bench.client, FAST):
        first = fleet(bench.client).now
        wait_until(lambda: fleet(bench.client).now > first + FAST.spool_dead_seconds + 0.5)
    assert bench.client.llen(QUEUE) == 0
    assert len(spool_file_names(bench.client, SPOOL)) == 1


def test_a_lost_file_is_made_again_twice_at_most_then_set_aside_with_its_story(bench: Bench) -> None:
    bench.enqueue(1)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    verdicts = []
    for _ in range(FAST.max_remakes + 1):
        bench.run_all(worker)
        [claim] = uploader.claim()
        verdicts.append(uploader.remake(claim, f"MissingShard: {claim.message.file_name} is not in the spool"))
    assert verdicts == ["remade", "remade", "dead"]
    [letter] = dead_letters(bench.client, "run")
    assert letter.reason.startswith("made again 2 times; at last: MissingShard: 000000-")
    assert [attempt.number for attempt in letter.attempts] == [1, 2, 3]
    assert {attempt.worker for attempt in letter.attempts} == {uploader.name}
    assert retry_dead(bench.client, "run") == 1
    bench.run_all(worker)
    assert bench.upload_all(uploader) == 1


def test_a_batch_that_is_on_its_way_already_is_not_made_again(bench: Bench) -> None:
    bench.enqueue(1)
    first, second, uploader = bench.gpu_worker(), bench.gpu_worker(spool_id=OTHER_SPOOL), bench.uploader()
    bench.run_all(first)
    [lost] = uploader.claim()
    bench.client.hset("rq:job:run-000000", mapping={"status": "queued"})  # its spool was taken for dead meanwhile
    bench.client.rpush(QUEUE, "run-000000")
    assert bench.run_all(second, OTHER_SPOOL) == 1
    assert uploader.remake(lost, "MissingShard: gone") == "held"
    assert bench.client.llen(QUEUE) == 0


def test_a_committed_batch_is_not_made_again(bench: Bench) -> None:
    bench.enqueue(1)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    bench.run_all(worker)
    [claim] = uploader.claim()
    other = entry(claim.message).model_copy(update={"execution": "f" * 8})
    Ledger(bench.client, "run").adopt([other])
    assert uploader.remake(claim, "MissingShard: gone") == "committed"
    assert bench.client.llen(QUEUE) == 0


def test_a_shard_is_made_again_even_if_redis_lost_its_batch(bench: Bench) -> None:
    bench.enqueue(1)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    bench.run_all(worker)
    bench.client.delete("rq:job:run-000000")
    [claim] = uploader.claim()
    assert uploader.remake(claim, "DamagedShard: checksum") == "remade"
    assert worker.claim()[0].message == claim.message.batch


def test_files_that_an_upload_still_needs_are_named_until_their_end(bench: Bench) -> None:
    bench.enqueue(3)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    claims = worker.claim(3)
    for claim in claims:
        worker.publish(claim, shard(claim))
    all_names = {shard(claim).file_name for claim in claims}
    assert spool_file_names(bench.client, SPOOL) == all_names
    committed, remade, failed = uploader.claim(3)
    uploader.commit(committed, entry(committed.message))
    uploader.remake(remade, "MissingShard: gone")
    uploader.fail(failed, RuntimeError("once"))
    assert spool_file_names(bench.client, SPOOL) == {failed.message.file_name}


def test_what_a_dead_execution_left_may_be_swept_but_only_on_strong_evidence(bench: Bench) -> None:
    bench.enqueue(2)
    worker, watcher = bench.gpu_worker(), bench.uploader(settings=FASTER)
    [living] = worker.claim()
    assert not watcher.execution_is_dead("0badc0de")  # it has not watched for long enough
    wait_until(lambda: watcher.execution_is_dead("0badc0de"))
    assert not watcher.execution_is_dead(living.execution)
    worker._keeper.close()
    wait_until(lambda: watcher.execution_is_dead(living.execution))


def test_a_spool_that_is_gone_for_a_day_and_empty_is_forgotten(bench: Bench) -> None:
    bench.enqueue(1)
    bench.run_all(bench.gpu_worker())
    bench.client.zadd("hiddenq:spools", {OTHER_SPOOL: fleet(bench.client).now - 90_000})
    bench.client.sadd("rq:queues", f"rq:queue:hiddenq-upload-{OTHER_SPOOL}")
    wait_until(lambda: [spool.spool_id for spool in fleet(bench.client).spools] == [SPOOL])
    assert {queue.spool_id for queue in fleet(bench.client).queues} == {None, SPOOL}
