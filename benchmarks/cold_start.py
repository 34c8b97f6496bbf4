"""From a fresh clone to the first committed shard, by part: `make demo` as a newcomer types it.

    python3 benchmarks/cold_start.py [--work FOLDER]

Clones this repository's last commit, runs `make demo` there, and notes when each part's result appears: the virtual
environment, the packages, the demo's model and data, the plan (`run.json`), the model in the worker (its own parts from
its log), the first and the last committed shard, the end. Needs nothing but Python, git and make; packages come from
wherever pip takes them, its cache included. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOOK_SECONDS = 0.1


def main() -> int:
    """Clone, run, watch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default=None, help="where the clone is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        clone = Path(folder) / "hiddenq"
        began = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        marks = {"clone": time.monotonic() - began}
        with (Path(folder) / "log").open("wb") as log:
            demo = subprocess.Popen(["make", "demo"], cwd=clone, stdout=log, stderr=log)
            while demo.poll() is None:
                for name, is_there in watched(clone).items():
                    if name not in marks and is_there():
                        marks[name] = time.monotonic() - began
                time.sleep(LOOK_SECONDS)
        marks["verified"] = time.monotonic() - began
        if demo.returncode:
            print((Path(folder) / "log").read_text()[-3000:], file=sys.stderr)
            return 1
        print(json.dumps({"seconds": parts_of(marks), "worker": worker_parts(clone)}, indent=2))
    return 0


def watched(clone: Path) -> dict[str, Callable[[], bool]]:
    """What shows that a part is done, in the order in which the parts come."""
    demo, out = clone / ".demo", clone / ".demo" / "out"
    return {
        "virtual environment": (clone / ".venv" / "pyvenv.cfg").exists,
        "packages": (clone / ".venv" / ".demo-installed").exists,
        "model and conversations": lambda: bool(list(demo.glob("conversations-*.jsonl"))) and (demo / "model").exists(),
        "plan": (out / "run.json").exists,
        "first committed shard": lambda: bool(list(out.glob("states/*.safetensors"))),
        "run": (out / "manifest.json").exists,
    }


def parts_of(marks: dict[str, float]) -> dict[str, float]:
    """Seconds of each part, from the end of the one before; and in all until the first shard."""
    ordered = sorted(marks.items(), key=lambda mark: mark[1])
    begins = [0.0, *(at for _, at in ordered)]
    parts = {name: round(at - begin, 1) for (name, at), begin in zip(ordered, begins, strict=False)}
    return {**parts, "in all until the first committed shard": round(marks["first committed shard"], 1)}


def worker_parts(clone: Path) -> dict[str, Any]:
    """What the worker says of its own start."""
    for log in (clone / ".demo" / "out" / ".hiddenq" / "logs").glob("worker*"):
        for line in log.read_text().splitlines():
            if '"ready"' in line:
                event = json.loads(line)
                return {name: value for name, value in event.items() if name.endswith("_seconds")}
    return {}


if __name__ == "__main__":
    sys.exit(main())
