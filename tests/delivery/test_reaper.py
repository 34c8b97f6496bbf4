"""Who is called dead, when, and what it costs the batch."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hiddenq.contracts.errors import LeaseLost
from hiddenq.delivery import DeliverySettings, Reaper, dead_letters, retry_dead
from hiddenq.delivery.connection import text
from hiddenq.delivery.reaper import Evidence, Look, Reaping
from hiddenq.delivery.scripts import Scripts
from hiddenq.delivery.transitions import Failure, Transitions, new_executions
from tests.delivery.conftest import FAST, FASTER, SPOOL, Bench, shard
from tests.support.waiting import wait_until


def claim_and_die(
    bench: Bench, num: int = 1, *, stage: str | None = None, settings: DeliverySettings = FAST
) -> list[str]:
    """Claims of a process that is never heard of again."""
    moves = Transitions(bench.client, settings)
    executions = [f"{time.monotonic_ns() % (1 << 32) + index:08x}"[-8:] for index in range(num)]
    for raw in moves.claim("hiddenq-extract-run", worker="dead", host="gone", executions=executions):
        if stage:
            moves.enter(raw.job_id, raw.execution, stage)
    return executions


def test_what_a_dead_process_held_is_claimable_again_and_only_the_gpu_stage_is_charged(bench: Bench) -> None:
    bench.enqueue(2)
    with Reaper(bench.client, FAST):
        claim_and_die(bench)
        claim_and_die(bench, stage="gpu")
        assert bench.client.llen("rq:queue:hiddenq-extract-run") == 0
        began = time.monotonic()
        wait_until(lambda: bench.client.llen("rq:queue:hiddenq-extract-run") == 2)
    assert time.monotonic() - began < FAST.lease_seconds + 2 * FAST.reap_seconds + 1
    claims = bench.gpu_worker().claim(5)
    assert {claim.message.batch_id: claim.attempt for claim in claims} == {"000000": 1, "000001": 2}


def test_a_batch_that_kills_its_process_is_set_aside_after_its_attempts_with_growing_delays(bench: Bench) -> None:
    bench.enqueue(1)
    due: list[float] = []
    with Reaper(bench.client, FASTER):
        for _ in range(FAST.max_attempts):
            wait_until(lambda: bench.client.llen("rq:queue:hiddenq-extract-run") == 1)
            due.append(time.monotonic())
            claim_and_die(bench, stage="gpu", settings=FASTER)
        wait_until(lambda: bench.status("run-000000") == "failed")
    delays = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert delays[0] < delays[1] < delays[2]
    [letter] = dead_letters(bench.client, "run")
    assert [attempt.number for attempt in letter.attempts] == [1, 2, 3, 4]
    assert {(attempt.host, attempt.worker) for attempt in letter.attempts} == {("gone", "dead")}
    assert all("died or lost its lease while this batch was on its GPU" in attempt.error for attempt in letter.attempts)
    assert letter.reason == "died on the GPU 4 times"


def die_holding(bench: Bench, queue: str, worker: str, *, stage: str = "") -> list[str]:
    """Claim all there is, bring the first job to a stage, and be heard of no more; returns the job ids held."""
    moves = Transitions(bench.client, FASTER)
    raws = moves.claim(queue, worker=worker, host="gone", executions=new_executions(5))
    if raws and stage:
        moves.enter(raws[0].job_id, raws[0].execution, stage)
    return [raw.job_id for raw in raws]


def reaped(bench: Bench, num: int, queue: str) -> None:
    """Wait until so many jobs wait again."""
    wait_until(lambda: bench.client.llen(f"rq:queue:{queue}") == num and not bench.client.zcard("hiddenq:leases"))


def run_out(bench: Bench) -> None:
    """The one lease there is ends long ago."""
    [lease] = bench.client.zrange("hiddenq:leases", 0, -1)
    bench.client.zadd("hiddenq:leases", {text(lease): 1})


@pytest.mark.parametrize("kind", ["upload", "extract"])
def test_a_job_that_kills_its_process_off_the_gpu_is_set_aside_and_no_innocent_is_charged(
    bench: Bench, kind: str
) -> None:
    bench.enqueue(3)
    queue = "hiddenq-extract-run"
    if kind == "upload":
        bench.run_all(bench.gpu_worker())
        queue = f"hiddenq-upload-{SPOOL}"
    poison = text(bench.client.lindex(f"rq:queue:{queue}", 0))
    with Reaper(bench.client, FASTER):
        for number in range(FASTER.deaths_until_alone):
            assert poison in die_holding(bench, queue, f"w{number}", stage="put")
            reaped(bench, 3, queue)
        for number in range(FASTER.max_attempts):
            wait_until(lambda: bench.client.zcard("hiddenq:delayed") == 0)
            held = die_holding(bench, queue, f"alone{number}", stage="put")
            while held != [poison]:  # the innocents are as suspect by now, and each is given out alone
                assert len(held) == 1
                moves = Transitions(bench.client, FASTER)
                [lease] = bench.client.zrange("hiddenq:leases", 0, -1)
                execution = text(lease).rpartition(":")[2]
                assert moves.claim(queue, worker=f"alone{number}", host="gone", executions=new_executions(5)) == []
                assert moves.give_back(held[0], execution, Failure(error="", delay_seconds=0)) == "retry"
                bench.client.rpoplpush(f"rq:queue:{queue}", f"rq:queue:{queue}")
                held = die_holding(bench, queue, f"alone{number}", stage="put")
            wait_until(lambda: not bench.client.zcard("hiddenq:leases"))
        wait_until(lambda: bench.status(poison) == "failed")
    [letter] = dead_letters(bench.client, "run")
    assert [attempt.number for attempt in letter.attempts] == [1, 2, 3, 4]
    assert all("while it held nothing but this job, in stage put" in attempt.error for attempt in letter.attempts)
    assert letter.reason == "its process died 4 times"
    innocents = [text(job) for job in bench.client.lrange(f"rq:queue:{queue}", 0, -1)]
    assert len(innocents) == 2
    assert {bench.client.hget(f"rq:job:{job}", "attempts") for job in innocents} == {None}
    assert retry_dead(bench.client, "run") == 1
    assert bench.client.hget(f"rq:job:{poison}", "deaths") is None


def test_a_worker_that_holds_something_waits_for_a_suspect_that_is_to_be_alone(bench: Bench) -> None:
    bench.enqueue(3)
    worker = bench.gpu_worker()
    [first] = worker.claim(1)
    bench.client.hset("rq:job:run-000001", "deaths", FAST.deaths_until_alone)
    assert worker.claim(2) == [], "it would not be alone"
    other = bench.gpu_worker()
    [suspect] = other.claim(2)
    assert suspect.message.batch_id == "000001"
    assert other.claim(2) == []
    assert [claim.message.batch_id for claim in worker.claim(2)] == ["000002"]
    for holder, claim in ((worker, first), (other, suspect)):
        holder.enter(claim, "gpu")
        holder.publish(claim, shard(claim))


def test_a_worker_stopped_past_its_lease_finds_its_result_refused(bench: Bench) -> None:
    bench.enqueue(1)
    stopped = bench.gpu_worker()
    [old] = stopped.claim()
    stopped._keeper.close()  # as SIGSTOP would: no renewal any more
    with Reaper(bench.client, FAST):
        wait_until(lambda: bench.client.llen("rq:queue:hiddenq-extract-run") == 1)
    other = bench.gpu_worker()
    [new] = other.claim()
    with pytest.raises(LeaseLost):
        stopped.publish(old, shard(old))
    other.publish(new, shard(new))
    assert bench.client.hkeys(f"hiddenq:spool:{shard(new).spool_id}:files") == [shard(new).file_name.encode()]


def test_one_living_uploader_reaps_for_a_single_dead_gpu_worker(bench: Bench) -> None:
    bench.enqueue(1)
    bench.uploader()
    claim_and_die(bench, stage="gpu")
    wait_until(lambda: bench.client.llen("rq:queue:hiddenq-extract-run") == 1)


def test_nobody_reaps_before_watching_redis_for_a_whole_lease(bench: Bench) -> None:
    bench.enqueue(1)
    claim_and_die(bench)
    run_out(bench)
    own = 100.0
    reaping = Reaping(bench.client, FAST, clock=lambda: own)
    assert reaping.once() is None
    began, reaped = time.monotonic(), None
    while reaped is None:
        time.sleep(0.1)
        own = 100.0 + time.monotonic() - began
        reaped = reaping.once()
    assert FAST.lease_seconds <= own - 100.0 < FAST.lease_seconds + 1
    assert reaped.num_back == 1


def test_a_jump_of_the_redis_clock_reaps_nobody(bench: Bench) -> None:
    bench.enqueue(1)
    claim_and_die(bench)
    run_out(bench)
    verdict, *_ = Scripts(bench.client).run(
        "reap",
        expected_now=time.time() - 3600,
        tolerance_seconds=1,
        lease_seconds=1,
        max_attempts=4,
        retry_delays=[1],
        spool_dead_seconds=1,
        exc="",
    )
    assert verdict == b"jump"
    assert bench.client.zcard("hiddenq:leases") == 1
    assert bench.client.llen("rq:queue:hiddenq-extract-run") == 0


def test_a_clock_that_went_back_an_hour_neither_holds_leases_nor_loses_delayed_retries(bench: Bench) -> None:
    bench.enqueue(2)
    worker = bench.gpu_worker()
    [first] = worker.claim()
    worker.fail(first, RuntimeError("delayed"))
    claim_and_die(bench)
    for key in ("hiddenq:leases", "hiddenq:delayed"):
        [member] = bench.client.zrange(key, 0, -1)
        bench.client.zincrby(key, 3600, text(member))
    wait_until(lambda: bench.client.llen("rq:queue:hiddenq-extract-run") == 2)


def test_a_delayed_retry_needs_no_scheduler(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    assert worker.fail(claim, RuntimeError("boom")) == "retry"
    assert bench.status("run-000000") == "scheduled"
    assert bench.client.zcard("rq:scheduled:hiddenq-extract-run") == 1
    again = wait_until(lambda: worker.claim())
    assert again[0].attempt == 2
    assert bench.client.zcard("rq:scheduled:hiddenq-extract-run") == 0


def test_two_reapers_at_once_give_back_each_batch_once(bench: Bench) -> None:
    bench.enqueue(50)
    with Reaper(bench.client, FASTER), Reaper(bench.connect(), FASTER), Reaper(bench.connect(), FASTER):
        claim_and_die(bench, 50, settings=FASTER)
        wait_until(lambda: bench.client.llen("rq:queue:hiddenq-extract-run") >= 50)
        time.sleep(3 * FASTER.reap_seconds)
    assert bench.client.llen("rq:queue:hiddenq-extract-run") == 50


WATCH = DeliverySettings(lease_seconds=30, renew_seconds=5, reap_seconds=5)


def watched(*looks: tuple[float, float, str]) -> bool:
    evidence = Evidence(WATCH)
    answer = False
    for own, theirs, server in looks:
        answer = evidence.see(Look(own, theirs, server))
    return answer


def test_a_gap_in_its_own_looks_makes_a_process_watch_anew() -> None:
    steady = [(float(second), 1000.0 + second, "a") for second in range(0, 35, 5)]
    assert watched(*steady)
    assert watched(*steady, (44.0, 1044.0, "a"))
    assert not watched(*steady, (46.0, 1046.0, "a"))


def test_a_restarted_server_makes_a_process_watch_anew() -> None:
    steady = [(float(second), 1000.0 + second, "a") for second in range(0, 35, 5)]
    assert not watched(*steady, (35.0, 1035.0, "b"))


@hypothesis_settings(max_examples=200)
@given(
    jump=st.floats(-7200, 7200).filter(lambda jump: abs(jump) > WATCH.clock_tolerance_seconds + 0.1),
    after=st.floats(0, 29.9),
)
def test_after_any_jump_of_the_clock_a_whole_lease_passes_before_anyone_is_called_dead(
    jump: float, after: float
) -> None:
    evidence = Evidence(WATCH)
    for second in range(0, 40, 5):
        evidence.see(Look(second, 1000.0 + second, "a"))
    now = 40.0
    while now <= 40.0 + after:
        assert not evidence.see(Look(now, 1000.0 + now + jump, "a"))
        now += 4.9


def test_a_lease_that_someone_deleted_is_given_again_and_nothing_is_lost(bench: Bench) -> None:
    bench.enqueue(2)
    living, dead = bench.gpu_worker(settings=FASTER), bench.gpu_worker(settings=FASTER)
    [held], [orphan] = living.claim(), dead.claim()
    dead._keeper.close()
    bench.client.delete("hiddenq:leases", "hiddenq:swept")
    wait_until(lambda: bench.status(orphan.job_id) == "queued", what="the dead one's batch comes back")
    living.publish(held, shard(held))
    assert bench.run_all(living) == 1
