"""`hiddenq failed`: what a person sees of dead letters, and can do about them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hiddenq.contracts.errors import BadMessage, NonFiniteStates
from hiddenq.delivery import enqueue, num_dead
from tests.delivery.conftest import Bench, batch, record
from tests.support.command import exit_status

Failed = Callable[..., tuple[int, str]]


@pytest.fixture
def failed(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Failed:
    """`hiddenq failed …` on a run with three dead letters; returns the exit status and what it printed."""
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", bench.server.password)
    monkeypatch.setenv("COLUMNS", "160")
    bench.enqueue(4)
    worker = bench.gpu_worker()
    for claim in worker.claim(3):
        worker.fail(claim, NonFiniteStates(f"NaN in layer 7 [of {claim.message.batch_id}]"), device="cuda:3")

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = exit_status(["failed", *arguments, "--redis-url", bench.server.bare_url])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def test_list_names_each_with_its_reason_and_says_how_many_more_there_are(failed: Failed) -> None:
    status, said = failed("list")
    assert status == 0
    assert [line.split()[0] for line in said.splitlines()] == ["batch", "000000", "000001", "000002"]
    assert "NaN in layer 7 [of 000001]" in said
    status, said = failed("list", "--limit", "1")
    assert [line.split()[0] for line in said.splitlines()] == ["batch", "000000", "and"]
    assert "and 2 more: --limit 0 shows all" in said
    letters = json.loads(failed("list", "--json")[1])
    assert [letter["batch"]["batch_id"] for letter in letters] == ["000000", "000001", "000002"]


def test_what_is_no_batch_of_the_plan_is_listed_with_its_reason_and_said_to_count_for_nothing(
    failed: Failed, bench: Bench
) -> None:
    enqueue(bench.client, record(num_batches=4), [batch(900_000)])
    worker = bench.gpu_worker()
    for claim in worker.claim(3):
        if claim.message.batch_id == "900000":
            worker.fail(claim, BadMessage("not one of them"))
    status, said = failed("list")
    assert status == 0
    assert [line.split()[0] for line in said.splitlines()] == ["batch", "000000", "000001", "000002", "900000", "1"]
    assert "not one of them" in said
    assert "1 of them are no batches of the run's plan and count for nothing: `hiddenq failed drop` them" in said
    assert num_dead(bench.client, "run") == 3
    assert failed("drop", "900000") == (0, "1 dead letter dropped\n")
    assert "900000" not in failed("list")[1]


def test_show_tells_every_attempts_story(failed: Failed) -> None:
    status, said = failed("show", "000002")
    assert status == 0
    for part in ("attempt 1, 20", "cuda:3", "NonFiniteStates: NaN in layer 7 [of 000002]"):
        assert part in said
    assert failed("show", "000003") == (
        2,
        "hiddenq: 000003: no dead letter of run run; `hiddenq failed list` has them\n",
    )


@pytest.mark.parametrize("action", ["show", "retry", "drop"])
def test_a_batch_without_a_dead_letter_is_said_and_nothing_is_done(action: str, failed: Failed, bench: Bench) -> None:
    known = ["000001"] if action != "show" else []
    assert failed(action, *known, "999999") == (
        2,
        "hiddenq: 999999: no dead letter of run run; `hiddenq failed list` has them\n",
    )
    assert num_dead(bench.client, "run") == 3


def test_retry_queues_again_and_drop_forgets(failed: Failed, bench: Bench) -> None:
    assert failed("retry", "000001") == (0, "1 batch queued again\n")
    assert bench.status("run-000001") == "queued"
    assert failed("drop") == (0, "2 dead letters dropped\n")
    assert num_dead(bench.client, "run") == 0
    assert failed("list") == (0, "no dead letters\n")
    assert failed("list", "--json") == (0, "[]\n")
