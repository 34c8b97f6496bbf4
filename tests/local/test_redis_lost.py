"""The embedded Redis dies, and then loses all it knew, in the middle of a run: the run completes without a hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.local.conftest import ALONE, chats, shard_files, write_rows
from tests.local.whole_runs import assert_complete, ended, met, num_shards_of
from tests.support.command import Command
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_SAMPLES = 28


def server_pid(out: Path) -> int:
    """The embedded server's process; 0 while there is none."""
    note = out / ".hiddenq" / "redis" / "server.json"
    return int(json.loads(note.read_text())["pid"]) if note.exists() else 0


def kill_server(out: Path) -> None:
    """kill -9, and wait for the next one."""
    pid = server_pid(out)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server_pid(out) not in (0, pid), what="the server is started again")


def test_a_run_outlives_the_death_of_its_redis_and_the_loss_of_its_data(
    hiddenq: Command, slow_model: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "chats.jsonl", chats(NUM_SAMPLES, max_words=100)), tmp_path / "out"
    arguments = (
        "run", "--model", slow_model, "--data", data, "--out", out, "--target-layers", "0,1,2,3",
        "--token-budget", "512", "--max-length", "512", *ALONE,
    )  # fmt: skip
    process = met(hiddenq, arguments, out, num_shards=2)
    kill_server(out)
    before = num_shards_of(out)
    wait_until(lambda: num_shards_of(out) > before, what="the run goes on with the same data")
    shutil.rmtree(out / ".hiddenq" / "redis" / "appendonlydir")
    kill_server(out)
    committed = {path.name: path.stat().st_ino for path in shard_files(out)}
    run = assert_complete(ended(process), out, NUM_SAMPLES)
    assert len(committed) < run.config.num_batches, "it was met in its middle"
    now = {path.name: path.stat().st_ino for path in shard_files(out)}
    assert committed.items() <= now.items(), "what was committed is adopted, not made again"
