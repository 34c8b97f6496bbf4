"""Redis away, in every way it can be: workers wait, finished work is kept, nobody is charged."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import redis

from hiddenq.contracts.errors import RedisAway
from hiddenq.contracts.messages import BatchJob
from hiddenq.delivery import Claim, Consumer, DeliverySettings, Ledger, connect, enqueue
from tests.delivery.conftest import FAST, Bench, batch, entry, record, shard
from tests.support.redis_proxy import RedisProxy
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


def publish_in_thread(worker: Consumer[BatchJob], claim: Claim[BatchJob]) -> threading.Thread:
    thread = threading.Thread(target=lambda: worker.publish(claim, shard(claim)))
    thread.start()
    return thread


@pytest.mark.parametrize("outage_seconds", [4, 20, 300])
def test_redis_killed_and_back_loses_no_finished_work(own_bench: Bench, outage_seconds: float) -> None:
    away_seconds = outage_seconds * FAST.lease_seconds / DeliverySettings().lease_seconds
    own_bench.enqueue(3)
    worker, uploader = own_bench.gpu_worker(), own_bench.uploader()
    claims = worker.claim(3)
    for claim in claims:
        worker.enter(claim, "gpu")
    own_bench.server.kill()
    threads = [publish_in_thread(worker, claim) for claim in claims]
    wait_until(lambda: worker.redis_away)
    time.sleep(away_seconds)
    own_bench.server.start()
    for thread in threads:
        thread.join()
    assert own_bench.upload_all(uploader) == 3
    assert not worker.redis_away
    assert {own_bench.client.hget(f"rq:job:run-{number:06d}", "attempts") for number in range(3)} == {None}


def test_after_a_long_absence_living_workers_renew_before_anyone_reaps(own_bench: Bench) -> None:
    own_bench.enqueue(1)
    worker, other = own_bench.gpu_worker(), own_bench.gpu_worker()
    [claim] = worker.claim()
    worker.enter(claim, "gpu")
    own_bench.server.restart(away_seconds=2 * FAST.lease_seconds)
    wait_until(lambda: (own_bench.client.zscore("hiddenq:leases", f"run-000000:{claim.execution}") or 0) > time.time())
    assert other.claim() == []
    worker.publish(claim, shard(claim))


def test_a_black_holed_redis_is_noticed_and_survived(bench: Bench) -> None:
    bench.enqueue(1)
    with RedisProxy(bench.server.port) as proxy:
        client = bench.connect(proxy.url, timeout_seconds=0.4)
        worker = bench.gpu_worker(client=client)
        [claim] = worker.claim()
        proxy.black_hole()
        thread = publish_in_thread(worker, claim)
        wait_until(lambda: worker.redis_away)
        proxy.heal()
        thread.join()
        assert bench.status("run-000000") == "finished"


def test_a_stage_deadline_stands_still_while_redis_is_away(own_bench: Bench) -> None:
    settings = FAST.model_copy(update={"stage_seconds": {"write": 0.6}})
    own_bench.enqueue(1)
    worker = own_bench.gpu_worker(settings=settings)
    [claim] = worker.claim()
    worker.enter(claim, "write")
    own_bench.server.kill()
    thread = publish_in_thread(worker, claim)  # the process would end here, if the deadline went on
    time.sleep(1.5)
    own_bench.server.start()
    thread.join()
    assert own_bench.status("run-000000") == "finished"


def test_a_stage_deadline_stands_still_while_the_store_is_away(bench: Bench) -> None:
    settings = FAST.model_copy(update={"stage_seconds": {"put": 0.5}})
    bench.enqueue(1)
    worker = bench.gpu_worker(settings=settings)
    [claim] = worker.claim()
    worker.enter(claim, "put")
    with worker.pause_deadlines():
        time.sleep(1.2)
    worker.publish(claim, shard(claim))


def full(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)


def not_full(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 0)


def test_a_full_redis_drops_no_job_and_charges_nobody(own_bench: Bench) -> None:
    own_bench.enqueue(30)
    worker, uploader = own_bench.gpu_worker(), own_bench.uploader()
    held = worker.claim(5)
    full(own_bench.server)
    threads = [publish_in_thread(worker, claim) for claim in held]
    with pytest.raises(RedisAway, match="OutOfMemory"):
        enqueue(own_bench.client, record(), [batch(40)], stop=_set_soon())
    time.sleep(0.5)
    not_full(own_bench.server)
    for thread in threads:
        thread.join()
    own_bench.run_all(worker)
    own_bench.upload_all(uploader)
    assert Ledger(own_bench.client, "run").totals().num_batches == 30
    assert {own_bench.client.hget(f"rq:job:run-{number:06d}", "attempts") for number in range(30)} == {None}


def _set_soon() -> threading.Event:
    event = threading.Event()
    threading.Timer(0.3, event.set).start()
    return event


def test_a_redis_that_cannot_persist_is_waited_for(small_disk: Path) -> None:
    server = RedisServer(small_disk / "redis")
    filler = small_disk / "filler"
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        bench = Bench(server, stack)
        bench.enqueue(1)
        worker = bench.gpu_worker()
        [claim] = worker.claim()
        fill(filler)
        with server.client() as client, pytest.raises(redis.ResponseError, match="MISCONF Errors writing to the AOF"):
            write_for_ever(client)
        with pytest.raises(RedisAway, match="MISCONF"):
            connect(server.url, wait_seconds=0.1)
        thread = publish_in_thread(worker, claim)
        wait_until(lambda: worker.redis_away)
        filler.unlink()
        thread.join()
        assert bench.status("run-000000") == "finished"
        assert bench.client.hget("rq:job:run-000000", "attempts") is None


def write_for_ever(client: redis.Redis) -> None:
    """Until an error ends it."""
    while True:
        client.set("more", "x" * 100_000)


def fill(path: Path) -> None:
    """Take all that the disk has left."""
    with path.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 65536)
            file.flush()


@pytest.mark.parametrize("refusal", ["readonly", "too few replicas"])
def test_a_redis_that_refuses_writes_is_waited_for(own_bench: Bench, refusal: str) -> None:
    own_bench.enqueue(1)
    worker = own_bench.gpu_worker()
    [claim] = worker.claim()
    with own_bench.server.client() as client:
        if refusal == "readonly":
            client.replicaof("127.0.0.1", 1)
        else:
            client.config_set("min-replicas-to-write", 1)
        thread = publish_in_thread(worker, claim)
        wait_until(lambda: worker.redis_away)
        assert thread.is_alive()
        if refusal == "readonly":
            client.replicaof("NO", "ONE")
        else:
            client.config_set("min-replicas-to-write", 0)
        thread.join()
    assert own_bench.status("run-000000") == "finished"


def test_a_stopping_worker_does_not_wait_for_redis_to_claim(own_bench: Bench) -> None:
    worker = own_bench.gpu_worker()
    own_bench.server.kill()
    thread = threading.Timer(0.3, worker.stopping.set)
    thread.start()
    assert worker.claim() == []


def test_a_lease_must_outlive_several_renewals() -> None:
    with pytest.raises(ValueError, match="one lost renewal would cost the lease"):
        DeliverySettings(lease_seconds=10, renew_seconds=5)


def test_an_uploader_keeps_its_verified_upload_until_redis_is_back(own_bench: Bench) -> None:
    own_bench.enqueue(1)
    own_bench.run_all(own_bench.gpu_worker())
    uploader = own_bench.uploader()
    [claim] = uploader.claim()
    own_bench.server.kill()
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(uploader.commit(claim, entry(claim.message))))
    thread.start()
    wait_until(lambda: uploader.redis_away)
    own_bench.server.start()
    thread.join()
    assert verdicts == [True]
