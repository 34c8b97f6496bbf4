"""The reader on a run that the real pipeline made: everything agrees with the model, and a fault is still found."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hiddenq
from hiddenq.reader import verify
from tests.support.command import Command, exit_status, make_command
from tests.support.models import save_tiny_model

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "writes",
    "a",
    "letter",
    "to",
    "its",
    "editor",
]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return make_command(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("gemma2"), "gemma2", num_hidden_layers=8, final_logit_softcapping=9.0
    )


@pytest.fixture(scope="module")
def location(command: Command, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 24 conversations over a model that scales its embeddings and caps its logits."""
    folder, chosen = tmp_path_factory.mktemp("pipeline"), random.Random(0)
    data = folder / "chats.jsonl"
    with data.open("w") as file:
        for _ in range(24):
            turns = [
                {"role": role, "content": " ".join(chosen.choices(WORDS, k=chosen.randint(3, 40)))}
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    ended = command(
        "run", "--model", model, "--data", data, "--out", folder / "run", "--target-layers", "eagle3",
        "--devices", "cpu", "--token-budget", "512", "--target-head",
    )  # fmt: skip
    assert ended.status == 0, ended
    return folder / "run"


@pytest.mark.slow
def test_verify_finds_nothing_and_every_sample_recomputed_agrees(location: Path) -> None:
    report = verify(location, deep=True, recompute=24)
    assert report.ok, report.lines()
    assert report.recomputed is not None
    assert report.num_samples == report.recomputed.num_samples == 24
    assert report.recomputed.worst_difference < 1e-5


@pytest.mark.slow
def test_logits_from_the_stored_state_are_the_models(location: Path, model: Path) -> None:
    run = hiddenq.open_run(location)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert run.target_head.head.logit_softcap == 9.0
    for sample_id in list(run)[:6]:
        sample = run[sample_id]
        assert sample.final_hidden_state is not None
        with torch.no_grad():
            wanted = network(sample.input_ids[None]).logits[0]
        given = run.target_head.logits(sample.final_hidden_state)
        assert torch.allclose(given, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.slow
def test_the_command_exports_shows_and_verifies_it(
    location: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(location)
    assert exit_status(["export", "--out", out, "--to", "specforge", "--dest", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").rglob("*.ckpt"))) == 24
    assert exit_status(["sample", "3", "--out", out]) == 0
    assert "layer 4" in capsys.readouterr().out
    assert exit_status(["verify", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 24

    copy = tmp_path / "damaged"
    shutil.copytree(location, copy, ignore=shutil.ignore_patterns(".hiddenq"))
    shard = next((copy / "states").iterdir())
    damaged = bytearray(shard.read_bytes())
    damaged[-5] ^= 16
    shard.write_bytes(damaged)
    assert exit_status(["verify", "--out", str(copy)]) == 1
    said = capsys.readouterr().out
    assert f"damaged_shard: states/{shard.name}: checksum" in said
    assert "NOT VERIFIED" in said
