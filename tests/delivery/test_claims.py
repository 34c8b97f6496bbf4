"""Claims, fences and replies that get lost.

Invariant under test: a claim ends exactly once, by the execution that owns it, however often it asks.
"""

from __future__ import annotations

import threading

import pytest

from hiddenq.contracts.errors import LeaseLost
from hiddenq.delivery import Ledger
from tests.delivery.conftest import FAST, Bench, entry, shard
from tests.support.redis_proxy import RedisProxy
from tests.support.waiting import wait_until


def test_a_batch_goes_from_the_queue_to_the_ledger(bench: Bench) -> None:
    bench.enqueue(5)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    assert bench.run_all(worker) == 5
    assert bench.upload_all(uploader) == 5
    totals = Ledger(bench.client, "run").totals()
    assert (totals.num_batches, totals.num_samples, totals.num_tokens, totals.num_bytes) == (5, 10, 50, 500)
    assert worker.claim() == [] == uploader.claim()


def test_claims_come_in_order_and_none_is_given_twice(bench: Bench) -> None:
    bench.enqueue(7)
    first, second = bench.gpu_worker(), bench.gpu_worker()
    ids = [claim.message.batch_id for claim in first.claim(3) + second.claim(10)]
    assert ids == [f"{number:06d}" for number in range(7)]


def test_an_id_queued_twice_is_run_once_and_a_deleted_job_is_dropped(bench: Bench) -> None:
    bench.enqueue(3)
    bench.client.rpush("rq:queue:hiddenq-extract-run", "run-000000", "run-000001", "run-000099")
    bench.client.delete("rq:job:run-000002")
    assert [claim.message.batch_id for claim in bench.gpu_worker().claim(10)] == ["000000", "000001"]
    assert bench.client.llen("rq:queue:hiddenq-extract-run") == 0


def test_a_committed_batch_is_finished_without_being_run(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    Ledger(bench.client, "run").adopt([entry(shard(claim))])
    worker.hand_back(claim)
    assert worker.claim() == []
    assert bench.status("run-000000") == "finished"


def test_only_the_owner_can_publish(bench: Bench) -> None:
    bench.enqueue(1)
    late, winner = bench.gpu_worker(), bench.gpu_worker()
    [old] = late.claim()
    winner.hand_back(old)
    [new] = winner.claim()
    assert new.execution != old.execution
    with pytest.raises(
        LeaseLost, match=r"run-000000: execution [0-9a-f]{8} lost its lease .* is not published; delete it"
    ):
        late.publish(old, shard(old))
    with pytest.raises(LeaseLost, match="could not enter gpu"):
        late.enter(old, "gpu")
    assert late.fail(old, RuntimeError("too late")) == "lost"
    winner.publish(new, shard(new))
    assert bench.client.lrange(f"rq:queue:hiddenq-upload-{shard(new).spool_id}", 0, -1) == [
        f"run-000000-{new.execution}".encode()
    ]


def test_the_first_shard_in_the_ledger_wins_and_the_other_is_a_twin(bench: Bench) -> None:
    bench.enqueue(1)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    [claim] = worker.claim()
    ready = shard(claim)
    worker.publish(claim, ready)
    other = entry(ready).model_copy(update={"execution": "0" * 8})
    Ledger(bench.client, "run").adopt([other])
    [upload] = uploader.claim()
    assert uploader.commit(upload, entry(ready)) is False
    assert Ledger(bench.client, "run").get("000000") == other
    assert Ledger(bench.client, "run").totals().num_batches == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_reply_that_is_lost_changes_nothing(bench: Bench, times: int) -> None:
    bench.enqueue(2)
    with RedisProxy(bench.server.port) as proxy:
        client = bench.connect(proxy.url)
        worker, uploader = bench.gpu_worker(client=client), bench.uploader(client=client)
        proxy.cut_replies(times, to=b'"executions"')
        [claim] = worker.claim()
        proxy.cut_replies(times, to=b'"stage"')
        worker.enter(claim, "gpu")
        proxy.cut_replies(times, to=b'"upload_job"')
        worker.publish(claim, shard(claim))
        [upload] = uploader.claim()
        proxy.cut_replies(times, to=b'"shard_execution"')
        assert uploader.commit(upload, entry(upload.message))
        assert proxy.num_cut == 4 * times
        [second] = worker.claim()
        proxy.cut_replies(times, to=b'"delay_seconds"')
        worker.hand_back(second)
        proxy.heal()
    assert Ledger(bench.client, "run").totals().num_batches == 1
    assert bench.client.lrange("rq:queue:hiddenq-extract-run", 0, -1) == [b"run-000001"]
    assert bench.client.zcard("hiddenq:leases") == 0


def test_leaving_hands_back_at_once_and_charges_nobody(bench: Bench) -> None:
    bench.enqueue(3)
    leaving, staying = bench.gpu_worker(), bench.gpu_worker()
    for claim in leaving.claim(3):
        leaving.enter(claim, "gpu")
    leaving.close()
    claims = staying.claim(5)
    assert {claim.message.batch_id for claim in claims} == {"000000", "000001", "000002"}
    assert {claim.attempt for claim in claims} == {1}


def test_a_process_that_a_stall_ends_claims_nothing_that_it_hands_back(bench: Bench) -> None:
    bench.enqueue(2)
    stalled, other = bench.gpu_worker(), bench.gpu_worker()
    stalled.claim(2)
    stalled._departure.leave(withdraw=False)  # by the keeper's thread, while others go on
    assert stalled.claim(2) == []
    assert len(other.claim(2)) == 2


def test_a_lease_is_renewed_for_as_long_as_the_process_lives(bench: Bench) -> None:
    bench.enqueue(1)
    worker, other = bench.gpu_worker(), bench.gpu_worker()
    [claim] = worker.claim()
    begun = bench.client.zscore("hiddenq:leases", f"run-000000:{claim.execution}")
    assert begun
    wait_until(
        lambda: (
            (bench.client.zscore("hiddenq:leases", f"run-000000:{claim.execution}") or 0)
            > begun + 1.5 * FAST.lease_seconds
        )
    )
    assert not worker.lost(claim)
    assert other.claim() == []
    worker.publish(claim, shard(claim))


def test_several_runs_share_a_redis_without_mixing(bench: Bench) -> None:
    bench.enqueue(2, "one")
    bench.enqueue(3, "two")
    one, any_run = bench.gpu_worker("one"), bench.gpu_worker("one")
    any_run.listen(["hiddenq-extract-one", "hiddenq-extract-two"])
    assert {claim.message.run for claim in one.claim(10)} == {"one"}
    assert {claim.message.run for claim in any_run.claim(10)} == {"two"}


def test_a_batch_that_was_charged_before_is_on_the_gpu_alone(bench: Bench) -> None:
    bench.enqueue(3)
    worker = bench.gpu_worker()
    [suspect] = worker.claim()
    worker.fail(suspect, RuntimeError("once"))
    first, second = worker.claim(2)
    worker.enter(first, "gpu")
    worker.enter(second, "gpu")  # innocents share it
    [suspect] = wait_until(worker.claim)
    entering = threading.Thread(target=worker.enter, args=(suspect, "gpu"))
    entering.start()
    worker.publish(first, shard(first))
    entering.join(0.2)
    assert entering.is_alive()
    worker.enter(second, "write")
    entering.join()
    late = threading.Thread(target=worker.enter, args=(second, "gpu"))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    worker.publish(suspect, shard(suspect))
    late.join()
