"""Hours and room: a rate is measured on a run's own shards, and said with where it comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.run import ModelIdentity
from hiddenq.storage import ObjectStore, open_store
from hiddenq.storage.runfiles import load_batches
from producer import ProducerSettings, plan
from producer.outlook import Rate, given_rate, measured_rate
from tests.producer.conftest import Outcome, Produce, chat, make_model

ROWS = [chat(f"question {number}", "answer " * (number % 40 + 1)) for number in range(400)]


@pytest.fixture
def outcome(produce: Produce) -> Outcome:
    return produce(ROWS, token_budget=1024)


def commit(store: ObjectStore, seconds: list[float]) -> int:
    """Put shards in place, one after the other at these times; the number of tokens of all but the first."""
    batches = load_batches(store)[: len(seconds)]
    for batch, time in zip(batches, seconds, strict=True):
        key = f"states/{batch.batch_id}-00000000.safetensors"
        store.put_bytes(key, b"x")
        path = store.open_local(key)
        assert path is not None
        os.utime(path, (1e9 + time, 1e9 + time))
    return sum(batch.num_tokens for batch in batches[1:])


def model_of(outcome: Outcome) -> ModelIdentity:
    return outcome.prepared.config.model


def test_a_rate_is_that_of_the_shards_between_the_first_and_the_last(outcome: Outcome) -> None:
    num_tokens = commit(outcome.store, [0, 2, 4, 6, 8])
    rate = measured_rate(outcome.store, model_of(outcome))
    assert rate.tokens_per_second == pytest.approx(num_tokens / 8)
    assert rate.source == f"measured over 4 shards in 8.0 s at {outcome.store.uri}"


def test_a_pause_of_a_run_and_its_twins_do_not_lower_its_rate(outcome: Outcome) -> None:
    num_tokens = commit(outcome.store, [0, 2, 4, 6, 8])
    twin = f"states/{load_batches(outcome.store)[1].batch_id}-11111111.safetensors"
    outcome.store.put_bytes(twin, b"x")
    before = measured_rate(outcome.store, model_of(outcome))
    assert before.tokens_per_second == pytest.approx(num_tokens / 8)
    commit(outcome.store, [0, 2, 4, 6, 8, 90_000])
    after = measured_rate(outcome.store, model_of(outcome))
    assert after.tokens_per_second == before.tokens_per_second
    assert after.source == f"measured over 4 shards in 8.0 s (without 1 pause) at {outcome.store.uri}"


def test_the_pauses_of_a_run_that_was_interrupted_twice_for_a_minute_are_left_out(outcome: Outcome) -> None:
    times = [number + 60.0 * (number >= 5) + 90.0 * (number >= 10) for number in range(len(outcome.batches))]
    num_tokens = commit(outcome.store, times) - sum(outcome.batches[after].num_tokens for after in (5, 10))
    rate = measured_rate(outcome.store, model_of(outcome))
    assert rate.tokens_per_second == pytest.approx(num_tokens / (len(times) - 3))
    assert "(without 2 pauses)" in rate.source


def test_batches_that_come_in_bursts_are_work(outcome: Outcome) -> None:
    times = [number // 8 * 60.0 + number % 8 * 0.1 for number in range(len(outcome.batches))]
    num_tokens = commit(outcome.store, times)
    rate = measured_rate(outcome.store, model_of(outcome))
    assert rate.tokens_per_second == pytest.approx(num_tokens / times[-1])


def test_slow_batches_are_no_pauses(outcome: Outcome) -> None:
    num_tokens = commit(outcome.store, [0, 1000, 1900, 3000])
    assert measured_rate(outcome.store, model_of(outcome)).tokens_per_second == pytest.approx(num_tokens / 3000)


def test_where_no_rate_can_be_measured_is_one_line(outcome: Outcome, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--rate-from .*none: no run\.json there; name the location of a run"):
        measured_rate(open_store(tmp_path / "none"), model_of(outcome))
    for seconds in ([], [0.0], [0.0, 0.0]):
        commit(outcome.store, seconds)
        with pytest.raises(UsageError, match="too few shards there to tell a rate; give --tokens-per-second"):
            measured_rate(outcome.store, model_of(outcome))
    other = model_of(outcome).model_copy(update={"config_digest": "other"})
    with pytest.raises(UsageError, match=r"it ran another model .* whose rate says nothing about this one"):
        measured_rate(outcome.store, other)
    with pytest.raises(UsageError, match="--tokens-per-second 0: a rate is above 0"):
        given_rate(0)


def test_a_plan_says_hours_and_bytes_a_second_at_a_measured_rate(outcome: Outcome, tmp_path: Path) -> None:
    commit(outcome.store, [0, 2, 4])
    settings = ProducerSettings(
        model=model_of(outcome).model, data=(str(tmp_path / "rows.jsonl"),), target_layers="1,2", dtype="float16"
    )
    found: list[Rate] = []

    def find_rate(model: ModelIdentity) -> Rate:
        found.append(measured_rate(outcome.store, model))
        return found[-1]

    rate = plan(settings, find_rate=find_rate).rate
    assert rate is not None
    assert (rate.tokens_per_second, rate.source) == (found[0].tokens_per_second, found[0].source)
    assert rate.source.endswith(", which ran in bfloat16")
    assert rate.hours == pytest.approx(outcome.prepared.config.num_tokens / rate.tokens_per_second / 3600)


def test_a_plan_asks_for_a_rate_before_it_reads_any_row(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    data.write_bytes(b'{"text": "x"}\n')
    stages: list[str] = []

    def refuse(model: ModelIdentity) -> Rate:
        raise UsageError("no rate")

    with pytest.raises(UsageError, match="no rate"):
        plan(
            ProducerSettings(model=str(model), data=(str(data),), target_layers="1"),
            lambda stage, done, total: stages.append(stage),
            find_rate=refuse,
        )
    assert stages == []
