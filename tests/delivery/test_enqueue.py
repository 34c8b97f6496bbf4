"""Enqueuing as a reconciliation: at any moment, any number of times, nothing twice and nothing forgotten."""

from __future__ import annotations

import threading

import pytest

from hiddenq.contracts.errors import NonFiniteStates, UsageError
from hiddenq.delivery import EnqueueReport, Ledger, cancel, enqueue, restore_uploads, run_state, save_run
from tests.delivery.conftest import OTHER_SPOOL, Bench, batch, entry, record, shard
from tests.support.redis_proxy import RedisProxy
from tests.support.waiting import wait_until

QUEUE = "rq:queue:hiddenq-extract-run"


def test_again_at_any_moment_only_what_is_not_committed_or_held_is_queued(bench: Bench) -> None:
    made = bench.enqueue(8)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    claims = worker.claim(6)
    for claim in claims[:4]:
        worker.publish(claim, shard(claim))  # 0 to 3 wait in the spool
    for upload in uploader.claim(2):
        uploader.commit(upload, entry(upload.message))  # 0 and 1 are committed
    uploader.claim(1)  # 2 is being uploaded
    worker.fail(claims[4], RuntimeError("delayed"))  # 4 waits for its next attempt; 5 is on a GPU; 6, 7 and 8 wait
    report = enqueue(bench.client, made, [batch(number) for number in range(9)])
    assert report == EnqueueReport(num_enqueued=1, num_committed=2, num_held=6)
    assert bench.client.lrange(QUEUE, 0, -1) == [b"run-000006", b"run-000007", b"run-000008"]


def test_a_finished_run_queues_nothing(bench: Bench) -> None:
    made = bench.enqueue(5)
    bench.run_all(bench.gpu_worker())
    bench.upload_all(bench.uploader())
    assert enqueue(bench.client, made, [batch(number) for number in range(5)]).num_committed == 5
    assert bench.client.llen(QUEUE) == 0


def test_a_lost_reply_queues_nothing_twice(bench: Bench) -> None:
    with RedisProxy(bench.server.port) as proxy:
        client = bench.connect(proxy.url)
        proxy.cut_replies(3, to=b'"fields"')
        enqueue(client, record(), [batch(number) for number in range(1200)])
        assert proxy.num_cut == 3
    assert bench.client.llen(QUEUE) == 1200
    assert len(set(bench.client.lrange(QUEUE, 0, -1))) == 1200


def test_two_producers_at_once_queue_nothing_twice(bench: Bench) -> None:
    batches = [batch(number) for number in range(2000)]
    threads = [threading.Thread(target=enqueue, args=(bench.connect(), record(), batches)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(bench.client.lrange(QUEUE, 0, -1))) == bench.client.llen(QUEUE) == 2000


def test_the_queue_is_bounded_and_the_rest_follows_as_it_drains(bench: Bench) -> None:
    seen: list[EnqueueReport] = []
    batches = [batch(number) for number in range(25)]
    options = {"high_water": 10, "progress": lambda report: seen.append(report)}
    thread = threading.Thread(target=enqueue, args=(bench.client, record(), batches), kwargs=options)
    thread.start()
    wait_until(lambda: bench.client.llen(QUEUE) == 10)
    worker, longest, published = bench.gpu_worker(), 0, 0
    while published < 25:
        longest = max(longest, bench.client.llen(QUEUE))
        for claim in worker.claim(4):
            worker.publish(claim, shard(claim))
            published += 1
    thread.join()
    assert longest <= 10
    assert seen[-1].num_enqueued == 25


def test_a_full_queue_is_left_when_told_to_stop(bench: Bench) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    report = enqueue(bench.client, record(), [batch(number) for number in range(30)], high_water=10, stop=stop)
    assert (report.num_enqueued, report.num_left) == (10, 20)


def test_redis_wiped_in_the_middle_is_made_good_from_the_store_and_the_spool(own_bench: Bench) -> None:
    made = own_bench.enqueue(4)
    worker, uploader = own_bench.gpu_worker(), own_bench.uploader()
    claims = worker.claim(2)
    shards = [shard(claim) for claim in claims]
    for claim, ready in zip(claims, shards, strict=True):
        worker.publish(claim, ready)
    [upload] = uploader.claim()
    uploader.commit(upload, entry(upload.message))
    stored = Ledger(own_bench.client, "run").entries()
    own_bench.server.wipe()
    save_run(own_bench.client, made)
    assert Ledger(own_bench.client, "run").adopt(stored.values()) == 1
    assert Ledger(own_bench.client, "run").adopt(stored.values()) == 0
    assert restore_uploads(own_bench.client, made, shards) == 1  # the other one is committed
    assert restore_uploads(own_bench.client, made, shards) == 0
    report = enqueue(own_bench.client, made, [batch(number) for number in range(4)])
    assert report == EnqueueReport(num_enqueued=2, num_committed=1, num_held=1)
    own_bench.run_all(worker)
    own_bench.upload_all(uploader)
    assert Ledger(own_bench.client, "run").totals().num_batches == 4


def test_a_restored_upload_takes_its_batch_out_of_the_queue(bench: Bench) -> None:
    made = bench.enqueue(2)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    ready = shard(claim)
    worker.hand_back(claim)
    assert restore_uploads(bench.client, made, [ready]) == 1
    assert bench.client.lrange(QUEUE, 0, -1) == [b"run-000001"]


def test_a_cancelled_run_gives_out_nothing_and_can_be_resumed(bench: Bench) -> None:
    made = bench.enqueue(5)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    published, running, failing = worker.claim(3)
    worker.publish(published, shard(published))
    assert cancel(bench.client, "run") == 2
    assert run_state(bench.client, "run") == "cancelled"
    worker.hand_back(running)
    worker.fail(failing, NonFiniteStates("x"))
    assert worker.claim(5) == []
    assert bench.upload_all(uploader) == 1
    save_run(bench.client, made)
    report = enqueue(bench.client, made, [batch(number) for number in range(5)])
    assert (report.num_enqueued, report.num_committed, report.num_dead) == (3, 1, 1)


@pytest.mark.parametrize("gone", ["upload", "extract"])
def test_a_batch_whose_job_someone_deleted_is_queued_again(bench: Bench, gone: str) -> None:
    made = bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    worker.publish(claim, shard(claim, OTHER_SPOOL))
    job = f"run-000000-{claim.execution}" if gone == "upload" else "run-000000"
    bench.client.delete(f"rq:job:{job}")
    assert enqueue(bench.client, made, [batch(0)]).num_enqueued == 1


def test_a_run_that_redis_does_not_know_is_not_cancelled_in_silence(bench: Bench) -> None:
    bench.enqueue(1)
    with pytest.raises(UsageError, match=r"^runn: Redis knows no such run; it knows run"):
        cancel(bench.client, "runn")
    assert bench.client.exists("hiddenq:run:runn") == 0
