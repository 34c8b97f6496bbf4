"""`hiddenq plan` as a user types it: where its rate and its rooms come from."""

from __future__ import annotations

import json
from pathlib import Path

from tests.producer.conftest import Produce
from tests.producer.test_outlook import ROWS, commit
from tests.support.command import make_command


def test_a_plan_takes_its_rate_from_the_run_at_its_own_location(produce: Produce, tmp_path: Path) -> None:
    outcome = produce(ROWS, token_budget=1024)
    num_tokens = commit(outcome.store, [0, 2, 4, 6])
    hiddenq, out = make_command(tmp_path / "home"), tmp_path / "out"
    arguments = ("--model", outcome.prepared.config.model.model, "--data", str(tmp_path / "rows.jsonl"))
    planned = hiddenq("plan", *arguments, "--target-layers", "1,2", "--out", str(out), "--json")
    assert planned.status == 0, planned
    report = json.loads(planned.out)
    assert report["rate"]["source"] == f"measured over 3 shards in 6.0 s at {out}"
    assert report["rate"]["tokens_per_second"] == num_tokens / 6
    assert report["rate"]["bytes_per_second"] == num_tokens / 6 * report["bytes_per_token"]
    assert [(room["name"], room["folder"]) for room in report["rooms"]] == [
        ("output and spool", f"{out}, {out / '.hiddenq' / 'spool'}")
    ]


def test_a_rate_that_is_not_there_is_one_line_before_any_work(produce: Produce, tmp_path: Path) -> None:
    outcome = produce(ROWS[:3])
    hiddenq = make_command(tmp_path / "home")
    arguments = ("--model", outcome.prepared.config.model.model, "--data", str(tmp_path / "rows.jsonl"))
    missing = hiddenq("plan", *arguments, "--target-layers", "1", "--rate-from", str(tmp_path / "none"))
    assert (missing.status, missing.err.strip()) == (
        2,
        f"hiddenq: --rate-from {tmp_path / 'none'}: no run.json there; name the location of a run",
    )
    both = hiddenq("plan", *arguments, "--rate-from", "x", "--tokens-per-second", "5")
    assert (both.status, both.err.strip()) == (
        2,
        "hiddenq: --tokens-per-second and --rate-from: one of them is enough",
    )
