"""Who may import what: the CPU-side stages run on machines without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.conftest import chats, write_rows

BLOCK = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run_without(blocked: set[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked) + code, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )


@pytest.mark.parametrize(
    "module",
    ["producer", "producer.prepare", "producer.report", "uploader", "uploader.service", "hiddenq.storage",
     "hiddenq.delivery", "hiddenq.monitor", "hiddenq.doctor.diagnose", "hiddenq.local", "hiddenq.cli.stages",
     "hiddenq.cli.inspect"],
)  # fmt: skip
def test_the_cpu_side_imports_without_torch(module: str) -> None:
    ended = run_without({"torch"}, f"import {module}")
    assert ended.returncode == 0, ended.stderr


def test_the_reader_imports_neither_the_queue_nor_transformers() -> None:
    ended = run_without({"rq", "redis", "transformers"}, "import hiddenq.reader; hiddenq.reader.open_run")
    assert ended.returncode == 0, ended.stderr


def test_a_plan_is_made_without_torch(models: dict[str, Path], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(5))
    code = "from hiddenq.__main__ import main; sys.argv[0] = 'hiddenq'; main()"
    ended = run_without(
        {"torch"}, code, "plan", "--json", "--model", str(models["llama"]), "--data", str(data), "--target-layers", "1",
        "--processes", "1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["num_samples"] == 5
