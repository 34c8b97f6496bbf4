"""Whole runs by the command: started, met in their middle, ended, complete.

Invariant: a run that ended well has every sample in exactly one committed shard, and nothing is left over.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import hiddenq
from hiddenq.reader import Run
from tests.local.conftest import shard_files
from tests.support.command import Command, Ended, lines_of
from tests.support.waiting import wait_until


def met(hiddenq: Command, arguments: tuple[str | Path, ...], out: Path, *, num_shards: int) -> subprocess.Popen[str]:
    """Start a run into `out` and return once so many of its shards are committed."""
    process = hiddenq.start(*arguments)

    def is_met() -> bool:
        has_ended = process.poll() is not None
        if num_shards_of(out) >= num_shards:
            return True
        assert not has_ended, ended(process)
        return False

    wait_until(is_met, seconds=120, what=f"{num_shards} committed shards")
    return process


def num_shards_of(out: Path) -> int:
    """How many shards are committed by now."""
    return len(shard_files(out)) if (out / "states").exists() else 0


def ended(process: subprocess.Popen[str], seconds: float = 180) -> Ended:
    """Wait for its end."""
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


def assert_complete(ended: Ended, out: Path, num_samples: int) -> Run:
    """The invariant of a finished run: every sample in exactly one committed shard, nothing left over."""
    assert ended.status == 0, f"{ended}\n{lines_of(sorted((out / '.hiddenq' / 'logs').glob('*.log')))}"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["num_samples_committed"] == num_samples
    shards = [path.name for path in shard_files(out)]
    assert len(shards) == manifest["num_batches"], "one shard a batch"
    assert [path.name for path in (out / "states").iterdir() if path.name.startswith(".")] == [], "nothing half written"
    assert [path.name for path in (out / ".hiddenq" / "spool").glob("*.safetensors")] == [], "spool empty"
    run = hiddenq.open_run(out)
    assert len(run) == num_samples
    return run
