"""What looks leave behind: rates of committed work, and who makes no progress. Pure: no Redis, no clock."""

from __future__ import annotations

import pytest
import redis

from hiddenq.contracts.reports import WorkerReport, WorkerState
from hiddenq.monitor.history import KEY, RATE_SECONDS, History, Point, rate_between
from tests.monitor.made_fleet import SPOOL


def point(at: float, num_tokens: int) -> Point:
    return Point(at=at, num_batches=num_tokens // 100, num_samples=num_tokens // 25, num_tokens=num_tokens, num_bytes=0)


def report(num_batches: int, state: WorkerState = "busy", batch_id: str | None = "000001") -> WorkerReport:
    return WorkerReport(
        role="gpu_worker",
        name="w",
        target="t",
        host="h",
        pid=1,
        spool_id=SPOOL,
        run="demo",
        state=state,
        batch_id=batch_id,
        num_batches=num_batches,
    )


def looks(*seen: tuple[float, int]) -> History:
    """A history of looks at (time, committed tokens)."""
    history = History()
    for at, num_tokens in seen:
        history = history.seen(at=at, totals={"demo": point(at, num_tokens)}, workers=[], num_waiting={})
    return history


def test_the_rate_is_that_of_the_last_five_minutes_and_the_mean_that_of_all() -> None:
    steady = [(float(at), 100 * at) for at in range(0, 1000, 10)]
    faster = [(float(at), 99_000 + 300 * (at - 990)) for at in range(1000, 1400, 10)]
    run = looks(*steady, *faster).runs["demo"]
    assert rate_between(run.points) == pytest.approx((12.0, 300.0))
    mean = rate_between((run.first, run.points[-1]))
    assert mean is not None
    assert 100 < mean[1] < 300
    assert run.points[-1].at - run.points[0].at <= RATE_SECONDS


def test_looks_every_second_are_kept_as_one_every_five_seconds() -> None:
    run = looks(*[(float(at), at) for at in range(1000)]).runs["demo"]
    assert len(run.points) <= RATE_SECONDS / 5 + 2
    assert run.points[-1].at == 999


def test_one_look_knows_no_rate() -> None:
    assert rate_between(looks((5.0, 100)).runs["demo"].points) is None


def test_a_pause_does_not_spoil_the_mean() -> None:
    """An hour of work, a night without, an hour of work at the same rate."""
    first = [(float(at), 10 * at) for at in range(0, 3601, 60)]
    second = [(float(at), 36_000 + 10 * (at - 40_000)) for at in range(40_000, 43_601, 60)]
    run = looks(*first, *second).runs["demo"]
    mean = rate_between((run.first, run.points[-1]))
    assert mean is not None
    assert mean[1] == pytest.approx(10.0)


def test_a_ledger_that_began_anew_begins_a_new_history() -> None:
    run = looks((0.0, 500), (10.0, 900), (20.0, 100), (30.0, 200)).runs["demo"]
    assert run.first.num_tokens == 100
    assert rate_between(run.points) == pytest.approx((0.4, 10.0))


def test_only_a_finished_batch_ends_a_stall() -> None:
    history, one = History(), report(5)
    for at in (0.0, 100.0, 200.0):
        history = history.seen(at=at, totals={}, workers=[one], num_waiting={})
    assert history.stalled_seconds(one, 200.0) == 200
    done = report(6)
    history = history.seen(at=210.0, totals={}, workers=[done], num_waiting={})
    assert history.stalled_seconds(done, 210.0) == 0


def test_a_restarted_worker_begins_anew() -> None:
    history = History().seen(at=0.0, totals={}, workers=[report(50)], num_waiting={})
    history = history.seen(at=500.0, totals={}, workers=[report(0)], num_waiting={})
    assert history.stalled_seconds(report(0), 500.0) == 0


@pytest.mark.parametrize(
    ("state", "batch_id", "num_waiting", "stalls"),
    [
        ("busy", "000001", 0, True),
        ("idle", None, 7, True),  # there is work, and it takes none
        ("sick", None, 7, True),
        ("idle", None, 0, False),  # the end of a run
        ("starting", None, 7, False),
        ("paused", None, 7, False),
        ("waiting", "000001", 7, False),
        ("draining", "000001", 7, False),
    ],
)
def test_a_worker_stalls_only_while_it_could_finish_something(
    state: WorkerState, batch_id: str | None, num_waiting: int, stalls: bool
) -> None:
    history, one = History(), report(5, state, batch_id)
    for at in (0.0, 300.0):
        history = history.seen(at=at, totals={}, workers=[one], num_waiting={"demo": num_waiting})
    assert (history.stalled_seconds(one, 300.0) > 0) == stalls


def test_time_in_a_state_counts_from_its_beginning() -> None:
    history = History()
    states: tuple[tuple[float, WorkerState], ...] = ((0, "starting"), (50, "starting"), (60, "idle"), (90, "idle"))
    for at, state in states:
        history = history.seen(at=at, totals={}, workers=[report(0, state)], num_waiting={})
    assert history.state_seconds(report(0, "idle"), 90.0) == 30


def test_a_history_of_another_version_is_begun_anew(redis_client: redis.Redis) -> None:
    redis_client.set(KEY, '{"schema_version": 99}')
    assert History.load(redis_client) == History()
    looks((5.0, 100)).save(redis_client)
    assert History.load(redis_client).runs["demo"].first.num_tokens == 100
