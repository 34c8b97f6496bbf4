"""The extraction benchmark runs whole on a machine without a GPU: its figures mean nothing there, its parity does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "extraction.py"


def test_every_way_of_doing_the_work_runs_and_stored_states_are_as_exact_as_plain_transformers(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--work", str(tmp_path), "--samples", "24"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for row in ("| peer |", "| scripts |", "| engine alone", "| end to end, committed |"):
        assert row in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    whole, workload = result["end_to_end"], result["workload"]
    assert whole["num_samples"] == 24
    assert whole["num_tokens"] == workload["num_tokens"]
    assert whole["num_self_checks"] >= 1
    assert whole["self_check"] < 1e-5
    assert result["engine"]["parity"]["ours"] < 1e-5
