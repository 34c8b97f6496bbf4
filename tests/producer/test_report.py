"""The plan report: the numbers are those of the run, and what it would take is said beforehand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.reference_job import REFERENCE
from hiddenq.contracts.shard import ShardFormat
from producer import ProducerSettings, plan
from producer.histogram import LengthCounts
from producer.outlook import estimate_rate, given_rate
from producer.report import storage_choices
from tests.producer.conftest import Produce, chat, make_model, write_lines

NUM_REFERENCE_SAMPLES = 913_786


def rows() -> list[Any]:
    found: list[Any] = [chat("question " * (number % 40 + 1), "answer") for number in range(300)]
    return [*found, {"messages": []}, {"messages": []}, b"nonsense"]


def test_the_numbers_are_those_of_the_run(produce: Produce, tmp_path: Path) -> None:
    outcome = produce(rows())
    config = outcome.prepared.config
    report = plan(ProducerSettings(model=config.model.model, data=(str(tmp_path / "rows.jsonl"),), target_layers="1,2"))
    for field in ("num_rows", "num_rejected", "num_samples", "num_tokens", "num_supervised", "num_batches",
                  "num_padded_tokens", "target_layer_ids", "max_length"):  # fmt: skip
        assert getattr(report, field) == getattr(config, field), field
    assert report.num_bytes == config.num_tokens * ShardFormat.of_run(config).bytes_per_token
    assert {reason: (found.num_rows, found.example_row) for reason, found in report.rejected.items()} == {
        "empty": (2, 300),
        "not_json": (1, 302),
    }
    assert sum(found.num_samples for found in report.lengths) == 300
    assert not report.too_many_rejected


def test_a_plan_writes_nothing(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "rows.jsonl", rows())
    plan(ProducerSettings(model=str(model), data=(str(data),), target_layers="1,2"), output=str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_plan_says_so_when_a_run_would_refuse_the_input(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "rows.jsonl", rows())
    report = plan(ProducerSettings(model=str(model), data=(str(data),), target_layers="1,2", max_rejected=0.001))
    assert report.too_many_rejected
    assert "A run would refuse this input" in shown(report)


def test_a_folder_with_brackets_in_its_name_is_shown_as_it_is(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m[bold] [" / "x]")
    data = write_lines(tmp_path / "rows.jsonl", rows())
    text = shown(plan(ProducerSettings(model=str(model), data=(str(data),), target_layers="1,2")))
    assert str(model) in text


def test_what_is_shown_holds_all_that_was_asked_for(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "rows.jsonl", rows())
    settings = ProducerSettings(model=str(model), data=(str(data),), target_layers="1,2")
    report = plan(
        settings, find_rate=lambda model: given_rate(1000.0), output=str(tmp_path / "out"), spool=tmp_path / "spool"
    )
    text = shown(report)
    for expected in ("303 (messages): 300 kept, 3 rejected", "row 302 (rows.jsonl line 303):", "lengths in tokens",
                     "█", "padding ratio", "float8_e4m3fn", "1,000 tokens/s", "seconds; spool", "as given",
                     "spool and output must each take", "room enough"):  # fmt: skip
        assert expected in text, expected
    rate, (room,) = report.rate, report.rooms
    assert rate is not None
    assert rate.bytes_per_second == pytest.approx(1000 * report.bytes_per_token)
    assert rate.hours * 3600 * 1000 == pytest.approx(report.num_tokens)
    assert room.seconds_to_full == pytest.approx(room.free_bytes / rate.bytes_per_second)


def test_output_and_spool_on_one_disk_must_fit_it_together(model: Path, tmp_path: Path, small_disk: Path) -> None:
    data = write_lines(tmp_path / "rows.jsonl", rows())
    settings = ProducerSettings(model=str(model), data=(str(data),), target_layers="1,2")
    (both,) = plan(settings, output=str(tmp_path / "out"), spool=tmp_path / "spool").rooms
    output, spool = plan(settings, output=str(tmp_path / "out"), spool=small_disk / "spool").rooms
    assert (both.name, output.name, spool.name) == ("output and spool", "output", "spool")
    assert both.needed_bytes == output.needed_bytes + spool.needed_bytes


def test_an_output_without_room_is_shown_as_such(model: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "rows.jsonl", rows())
    report = plan(ProducerSettings(model=str(model), data=(str(data),), target_layers="1,2"), output=str(tmp_path))
    room = report.rooms[0].model_copy(update={"needed_bytes": report.rooms[0].free_bytes + 1})
    assert "NOT ENOUGH ROOM" in shown(report.model_copy(update={"rooms": (room,)}))


def test_the_reference_job_comes_out_near_nine_terabytes() -> None:
    num_tokens = NUM_REFERENCE_SAMPLES * 193  # about 10 MB a sample were measured
    choices = {
        (choice.target_layers, choice.storage_dtype): choice
        for choice in storage_choices(REFERENCE, "dflash", 64, num_tokens)
    }
    chosen = choices["dflash", "bfloat16"]
    assert chosen.is_asked_for
    assert chosen.target_layer_ids == REFERENCE.target_layer_ids
    assert chosen.num_bytes == pytest.approx(9e12, rel=0.02)
    assert choices["dflash", "float8_e4m3fn"].num_bytes == pytest.approx(chosen.num_bytes / 2, rel=0.01)
    assert choices["eagle3", "bfloat16"].num_bytes == pytest.approx(chosen.num_bytes * 3 / 5, rel=0.01)
    rate = estimate_rate(given_rate(34.5 * 193), num_tokens, NUM_REFERENCE_SAMPLES, chosen.num_bytes)
    assert rate.samples_per_second == pytest.approx(34.5)
    assert rate.hours == pytest.approx(7.36, rel=0.01)
    assert rate.bytes_per_second == pytest.approx(341e6, rel=0.01)


def test_a_long_context_shows_its_size_before_it_fills_a_disk() -> None:
    shard = dataclasses.replace(REFERENCE, target_layer_ids=(1, 2, 3), hidden_size=2880)
    assert shard.bytes_per_token * 65_536 == pytest.approx(1.13e9, rel=0.01)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [16, 4096], list(range(1, 500))])
def test_bins_hold_every_sample_once(lengths: list[int]) -> None:
    counts = LengthCounts(5000)
    counts.add(np.array(lengths, np.int64))
    bins = list(counts.bins())
    assert counts.median == sorted(lengths)[len(lengths) // 2]
    assert counts.longest == max(lengths)
    assert sum(found.num_samples for found in bins) == len(lengths)
    assert (bins[0].shortest, bins[-1].longest) == (lengths[0], lengths[-1])
    assert all(bins[number].longest + 1 == bins[number + 1].shortest for number in range(len(bins) - 1))


def test_a_model_too_small_for_a_preset_shows_the_others(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    data = write_lines(tmp_path / "rows.jsonl", rows())
    report = plan(ProducerSettings(model=str(model), data=(str(data),), target_layers="0"))
    assert {choice.target_layers for choice in report.choices} == {"0", "none"}


def shown(report: Any) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report)
    return console.export_text()
