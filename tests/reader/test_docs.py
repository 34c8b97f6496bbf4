"""What docs/trainers.md and examples/ show does run, on a real small run (the trainers' parts: test_trainers.py)."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.reader.trainers_page import ROOT, TrainersPage, type_command
from tests.support.made_run import MadeRun


def test_every_command_and_example_of_the_trainers_page_runs(
    model_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = TrainersPage.read(model_run.folder)
    assert len(page.commands) == 8
    assert set(page.code) == {"", "speculators", "modelopt", "specforge", "automodel"}, "each is run by a test"
    for command in page.commands:
        type_command(command, tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(page.code[""], "docs/trainers.md", "exec"), {})
    assert {"drafter-data", "eagle-shuffled"} <= set(os.listdir(tmp_path))


def test_the_plot_of_norms_is_drawn(
    model_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "norms.svg"
    script = str(ROOT / "examples/norms_by_layer.py")
    monkeypatch.setattr(sys, "argv", [script, str(model_run.folder), str(svg), "--samples", "8"])
    runpy.run_path(script, run_name="__main__")
    layers = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert layers == ["layer 1", "layer 2", "layer 4", "final"]
    root = ElementTree.parse(svg).getroot()
    assert {"layer 1", "final"} <= {element.text for element in root.iter() if element.text}
