"""A run is given up when nothing alive can bring it further, and not before."""

from __future__ import annotations

from typing import Any

from hiddenq.delivery import Consumer, fleet, stuck_reason, uploads_of
from tests.delivery.conftest import FAST, OTHER_SPOOL, SPOOL, Bench, report
from tests.support.waiting import wait_until


def reason(bench: Bench, run: str = "run") -> str | None:
    return stuck_reason(fleet(bench.client), run, uploads_of(bench.client, run))


def die(consumer: Consumer[Any]) -> None:
    """Fall silent, as a process whose machine lost its power."""
    consumer._keeper._closing.set()
    consumer._keeper._thread.join()


def test_a_run_that_nobody_can_finish_says_why(bench: Bench) -> None:
    bench.enqueue(2)
    assert reason(bench) == "batches of run run wait, and no GPU worker that could take them is alive"
    worker = bench.gpu_worker()
    assert reason(bench) == (
        f"batches of run run wait, and no uploader of spool {SPOOL} is alive, which its GPU worker needs"
    )
    uploader = bench.uploader()
    assert reason(bench) is None
    bench.run_all(worker)
    uploader.close(withdraw=True)
    waiting = f"2 shards left in spool {SPOOL}, and no uploader of it is alive"
    assert reason(bench) == waiting
    bench.uploader(OTHER_SPOOL, report=lambda: report("uploader", OTHER_SPOOL, target="u"))
    assert reason(bench) == waiting
    bench.upload_all(bench.uploader())
    assert reason(bench) is None


def test_shards_of_a_machine_that_died_are_waited_for_until_they_are_made_again(bench: Bench) -> None:
    bench.enqueue(2)
    joined = bench.gpu_worker(spool_id=OTHER_SPOOL, report=lambda: report("gpu_worker", OTHER_SPOOL, target="j"))
    bench.run_all(joined, OTHER_SPOOL)
    own, uploader = bench.gpu_worker(), bench.uploader()
    assert reason(bench) == f"2 shards left in spool {OTHER_SPOOL}, and no uploader of it is alive"
    die(joined)
    wait_until(lambda: reason(bench) is None, what="the spool is silent, so its shards will be made again")
    wait_until(lambda: uploads_of(bench.client, "run") == {}, seconds=FAST.spool_dead_seconds + 10)
    bench.run_all(own)
    bench.upload_all(uploader)
    assert reason(bench) is None
    assert fleet(bench.client).runs[0].is_complete


def test_shards_of_a_machine_that_died_are_given_up_if_nobody_can_make_them_again(bench: Bench) -> None:
    bench.enqueue(1)
    joined = bench.gpu_worker()
    bench.run_all(joined)
    die(joined)
    text = f"1 shard left in spool {SPOOL}, which is silent, and no GPU worker that could take them is alive"
    wait_until(lambda: reason(bench) == text)


def test_what_other_runs_left_in_a_spool_is_not_waited_for(bench: Bench) -> None:
    bench.enqueue(1, "run")
    bench.enqueue(1, "run-000001")
    bench.run_all(bench.gpu_worker("run-000001"))
    assert uploads_of(bench.client, "run-000001") == {SPOOL: 1}
    assert uploads_of(bench.client, "run") == {}
    [claim] = bench.uploader().claim()
    assert uploads_of(bench.client, "run-000001") == {SPOOL: 1}, "on its way is not yet there"
    assert claim.message.batch.run == "run-000001"


def test_a_sick_worker_can_finish_nothing(bench: Bench) -> None:
    bench.enqueue(1)
    bench.uploader()
    sick = report("gpu_worker").model_copy(update={"state": "sick"})
    bench.gpu_worker(report=lambda: sick)
    assert reason(bench) == "batches of run run wait, and no GPU worker that could take them is alive"
