"""What docs/trainers.md and examples/ show does run, on a real small run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hiddenq.reader import ExportSettings, export
from tests.support.made_run import MadeRun

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^    (?P<command>hiddenq [^\n]+)$|^```python(?: (?P<trainer>\w+))?\n(?P<code>.*?)^```$", re.M | re.S)


def run_here(arguments: list[str], folder: Path, *paths: Path) -> str:
    """Run a command in a folder; returns what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def export_as_typed(command: str, folder: Path) -> None:
    """`hiddenq export …`, by its options."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("hiddenq", "export")
    options: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            options[name] = True
        else:
            options[name] = word
    out, dest, to = options.pop("out"), options.pop("dest"), options.pop("to")
    export(out, ExportSettings(format=to, **options), folder / dest)


def test_every_example_of_the_trainers_page_runs(model_run: MadeRun, trainers: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs/trainers.md").read_text().replace("s3://bucket/run", str(model_run.folder))
    commands, codes = 0, {"": "", "speculators": "", "modelopt": ""}
    for block in re.finditer(BLOCK, text):
        if block["command"]:
            export_as_typed(block["command"], tmp_path)
            commands += 1
        else:
            codes[block["trainer"] or ""] += block["code"] + "\n"
    assert commands == 6
    for trainer, code in codes.items():
        assert code, trainer
        run_here([sys.executable, "-c", code], tmp_path, *([trainers] if trainer else []))


@pytest.mark.parametrize("samples", [1, 16])
def test_the_plot_of_norms_is_drawn(model_run: MadeRun, tmp_path: Path, samples: int) -> None:
    svg = tmp_path / "norms.svg"
    script = str(ROOT / "examples/norms_by_layer.py")
    printed = run_here([sys.executable, script, str(model_run.folder), str(svg), "--samples", str(samples)], tmp_path)
    assert [line.split("  ")[0] for line in printed.splitlines()] == ["layer 1", "layer 2", "layer 4", "final"]
    root = ElementTree.parse(svg).getroot()
    assert {"layer 1", "final"} <= {element.text for element in root.iter() if element.text}
