"""Batches that fail for good: how many attempts, what is kept of each, and how they come back."""

from __future__ import annotations

import itertools
import time

import pytest
from rq.job import Job

from hiddenq.contracts.errors import (
    DatasetError,
    NonFiniteStates,
    RedisAway,
    StoreAway,
    StoreRefused,
    TransientError,
)
from hiddenq.delivery import (
    Ledger,
    dead_batches,
    dead_letters,
    drop_dead,
    each_dead_letter,
    enqueue,
    fleet,
    jobs,
    num_dead,
    num_foreign,
    retry_dead,
)
from hiddenq.delivery.dead_letters import CHUNK
from tests.delivery.conftest import FAST, Bench, batch, entry, record, shard
from tests.support.waiting import wait_until


def fail_for_good(bench: Bench, number: int = 0) -> None:
    """All attempts of one batch, the others handed back."""
    worker = bench.gpu_worker()
    while bench.status(f"run-{number:06d}") != "failed":
        for claim in worker.claim(50):
            if claim.message.batch_id == f"{number:06d}":
                try:
                    raise RuntimeError(f"boom {claim.attempt}")
                except RuntimeError as error:
                    worker.fail(claim, error, device="cuda:3")
            else:
                worker.hand_back(claim)
        time.sleep(0.02)


def test_a_poison_batch_is_retried_with_growing_delays_then_set_aside_with_every_attempts_story(bench: Bench) -> None:
    bench.enqueue(3)
    began = time.monotonic()
    fail_for_good(bench, 1)
    assert time.monotonic() - began >= sum(FAST.retry_delays)
    [letter] = dead_letters(bench.client, "run")
    assert letter.batch == batch(1)
    assert letter.reason == "RuntimeError: boom 4"
    assert [attempt.number for attempt in letter.attempts] == [1, 2, 3, 4]
    assert [attempt.error for attempt in letter.attempts] == [f"RuntimeError: boom {number}" for number in range(1, 5)]
    assert all('raise RuntimeError(f"boom' in attempt.traceback for attempt in letter.attempts)
    assert {attempt.device for attempt in letter.attempts} == {"cuda:3"}
    assert all(attempt.host and attempt.worker and len(attempt.execution) == 8 for attempt in letter.attempts)
    times = [attempt.ended_at for attempt in letter.attempts]
    assert times == sorted(times)
    assert {claim.message.batch_id for claim in bench.gpu_worker().claim(9)} == {"000000", "000002"}


def test_what_is_nobodys_fault_uses_up_no_attempt(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    for error in (RedisAway("r"), StoreAway("503 for an hour"), StoreRefused("403"), DatasetError("x")) * 2:
        [claim] = wait_until(worker.claim)
        assert claim.attempt == 1
        assert worker.fail(claim, error) == "retry"
        bench.client.zadd("hiddenq:delayed", {"run-000000": 0})


def test_a_permanent_error_is_a_dead_letter_at_once(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    assert worker.fail(claim, NonFiniteStates("sample 3, layer 7: 5 values are not finite")) == "dead"
    [letter] = dead_letters(bench.client, "run")
    assert letter.reason.endswith("sample 3, layer 7: 5 values are not finite")


def test_a_transient_error_is_charged(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    assert worker.fail(claim, TransientError("once")) == "retry"
    assert wait_until(worker.claim)[0].attempt == 2


def test_retry_gives_all_attempts_back_and_drop_forgets_the_job_but_not_the_batch(bench: Bench) -> None:
    made = bench.enqueue(2)
    worker = bench.gpu_worker()
    for claim in worker.claim(2):
        worker.fail(claim, NonFiniteStates("x"))
    assert enqueue(bench.client, made, [batch(0), batch(1)]).num_dead == 2
    assert retry_dead(bench.client, "run", ["000001"]) == 1
    [claim] = worker.claim(5)
    assert (claim.message.batch_id, claim.attempt) == ("000001", 1)
    assert drop_dead(bench.client, "run") == 1
    assert dead_letters(bench.client, "run") == []
    assert enqueue(bench.client, made, [batch(0)]).num_enqueued == 1


def test_a_failed_upload_is_a_dead_letter_of_its_run_and_can_be_retried(bench: Bench) -> None:
    made = bench.enqueue(1)
    bench.run_all(bench.gpu_worker())
    uploader = bench.uploader()
    [claim] = uploader.claim()
    assert uploader.fail(claim, BadDisk("permanent")) == "dead"
    [letter] = dead_letters(bench.client, "run")
    assert letter.queue.startswith("hiddenq-upload-")
    assert letter.batch == batch(0)
    assert enqueue(bench.client, made, [batch(0)]).num_dead == 1
    assert retry_dead(bench.client, "run") == 1
    assert bench.upload_all(uploader) == 1


class BadDisk(NonFiniteStates):
    """Some permanent error."""


def test_a_dead_letter_whose_batch_is_in_after_all_is_none(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    worker.fail(claim, NonFiniteStates("x"))
    Ledger(bench.client, "run").adopt([entry(shard(claim))])
    assert dead_letters(bench.client, "run") == []
    assert enqueue(bench.client, record(), [batch(0)]).num_committed == 1


def test_rqs_own_requeue_of_a_dead_letter_works(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    worker.fail(claim, NonFiniteStates("x"))
    Job.fetch("run-000000", connection=bench.client, serializer="json").requeue()
    assert dead_letters(bench.client, "run") == []
    assert [claim.message.batch_id for claim in worker.claim(2)] == ["000000"]
    assert bench.client.zcard("hiddenq:run:run:dead") == 0


def push(bench: Bench, batch_id: str) -> None:
    """A message that says it is the run's, however it came into Redis."""
    job_id = f"run-{batch_id}"
    fields = jobs.job_fields(batch(0)) | {"batch_id": batch_id}
    bench.client.hset(f"rq:job:{job_id}", items=list(itertools.chain(*fields.items())))
    bench.client.rpush("rq:queue:hiddenq-extract-run", job_id)


@pytest.mark.parametrize("batch_id", ["000002", "900000", "0000001", "1e0000", "-00001"])
def test_a_message_that_is_no_batch_of_the_plan_is_listed_and_dropped_and_never_counts_for_the_run(
    bench: Bench, batch_id: str
) -> None:
    made = bench.enqueue(2)
    push(bench, batch_id)
    worker = bench.gpu_worker()
    [first, _] = worker.claim(9)
    worker.fail(first, NonFiniteStates("x"))
    assert bench.status(f"run-{batch_id}") == "failed"
    assert (num_dead(bench.client, "run"), num_foreign(bench.client, "run")) == (1, 1)
    assert dead_batches(bench.client, "run") == {"000000"}
    assert [letter.batch for letter in dead_letters(bench.client, "run")] == [batch(0)]
    [run] = fleet(bench.client).runs
    assert run.num_dead == 1
    assert retry_dead(bench.client, "run") == 1
    assert num_foreign(bench.client, "run") == 1
    assert drop_dead(bench.client, "run", [batch_id]) == 1
    assert num_foreign(bench.client, "run") == 0
    assert enqueue(bench.client, made, [batch(0), batch(1)]).num_enqueued == 0


def test_many_dead_letters_are_counted_at_once_and_read_piece_by_piece(bench: Bench) -> None:
    num = CHUNK + 100
    bench.enqueue(num)
    worker = bench.gpu_worker()
    while claims := worker.claim(100):
        for claim in claims:
            worker.fail(claim, NonFiniteStates("x"))
    assert num_dead(bench.client, "run") == num
    bench.client.config_resetstat()
    first = dead_letters(bench.client, "run", limit=3)
    assert [letter.batch.batch_id for letter in first] == ["000000", "000001", "000002"]
    assert bench.client.info("commandstats")["cmdstat_xrange"]["calls"] == 3, "not all were read"
    assert dead_batches(bench.client, "run") == {batch(number).batch_id for number in range(num)}
    assert dead_batches(bench.client, "run", queue="another") == set()
    [letter] = each_dead_letter(bench.client, "run", ["000500"])
    assert letter.batch.batch_id == "000500"
    assert retry_dead(bench.client, "run", ["000500", "000501"]) == 2
    assert drop_dead(bench.client, "run") == num - 2
