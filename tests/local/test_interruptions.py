"""A run that is killed: the same command completes it, and no batch is in the store twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hiddenq.delivery import EmbeddedServer
from hiddenq.delivery.whereabouts import is_gone
from tests.local.conftest import ALONE, chats, write_rows
from tests.local.whole_runs import assert_complete, ended, met, num_shards_of
from tests.support.command import Command, Ended, processes_with
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_SAMPLES = 30


@pytest.fixture
def arguments(slow_model: Path, tmp_path: Path) -> tuple[str, ...]:
    """A run of many batches of a few samples, slow enough to be caught in the middle."""
    data = write_rows(tmp_path / "chats.jsonl", chats(NUM_SAMPLES, max_words=100))
    return (
        "run", "--model", str(slow_model), "--data", str(data), "--out", str(tmp_path / "out"),
        "--target-layers", "0,1,2,3", "--token-budget", "768", "--max-length", "768",
        *ALONE,
    )  # fmt: skip


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_while_the_command_is_still_imported_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "hiddenq", "status"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As in a user's shell; a job in the background of a script has it ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "imported\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == Ended(130, "", "")


def test_a_killed_worker_is_replaced_and_its_batches_are_made_once(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = met(hiddenq, arguments, out, num_shards=2)
    victims = _workers_of(out)
    assert victims
    kill(victims)
    whole = ended(process)
    assert whole.status == 0, whole
    run = assert_complete(hiddenq(*arguments), out, NUM_SAMPLES)
    assert len({run.sample_ids[i] for i in range(len(run))}) == NUM_SAMPLES


def test_everything_killed_at_once_and_the_same_command_completes_it(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = met(hiddenq, arguments, out, num_shards=2)
    kill([process.pid])
    ended(process)
    server = EmbeddedServer.find(out / ".hiddenq" / "redis")
    assert server, "it outlives its run"
    _assert_called_stopped(hiddenq("status", "--out", out))
    named = {"HIDDENQ_REDIS_URL": server.url, "HIDDENQ_REDIS_PASSWORD_FILE": str(server.password_file)}
    _assert_called_stopped(Command(hiddenq.environment | named)("status", "--out", out))
    kill([*processes_with(str(out)), *_servers_of(out)])
    _assert_called_stopped(hiddenq("status", "--out", out))
    done = num_shards_of(out)
    assert done < NUM_SAMPLES
    wait_until(lambda: not processes_with(str(out)), seconds=60, what="the end of its children")
    assert_complete(hiddenq(*arguments, seconds=180), out, NUM_SAMPLES)


def test_an_interrupted_run_ends_its_children_and_goes_on_later(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = met(hiddenq, arguments, out, num_shards=1)
    process.send_signal(signal.SIGINT)
    interrupted = ended(process)
    assert interrupted.status == 130
    assert "stopping: each worker ends its batch, 120 s at most; Ctrl-C again" in interrupted.out
    assert "the same command goes on from here" in interrupted.err
    assert processes_with(str(out)) == []
    assert not (out / "manifest.json").exists()
    _assert_called_stopped(hiddenq("status", "--out", out))
    assert_complete(hiddenq(*arguments, seconds=180), out, NUM_SAMPLES)


def test_a_run_whose_folder_is_moved_away_ends_in_one_line_and_goes_on_once_it_is_back(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out, arguments = tmp_path / "out", (*arguments, "--limit", "12")
    process = met(hiddenq, arguments, out, num_shards=1)
    away = out.rename(tmp_path / "away")
    gone = ended(process)
    assert gone.status == 1, gone
    assert gone.err.splitlines()[-1] == (
        f"hiddenq: {out} is not there any more (unmounted, moved or removed?); put it back, and the same command goes "
        "on from here"
    )
    assert not out.exists(), "nothing was made in its place"
    assert is_gone(json.loads((away / ".hiddenq" / "redis" / "server.json").read_text())), "nor does its Redis go on"
    away.rename(out)
    assert_complete(hiddenq(*arguments, seconds=180), out, 12)


def test_a_run_whose_folder_is_removed_ends_in_one_line_and_so_does_its_redis(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = met(hiddenq, arguments, out, num_shards=1)
    server = json.loads((out / ".hiddenq" / "redis" / "server.json").read_text())
    while out.exists():  # who writes there meanwhile may keep a folder from being empty
        subprocess.run(["rm", "-rf", str(out)], stderr=subprocess.DEVNULL, check=False)
    gone = ended(process)
    assert gone.status == 1, gone
    assert gone.err.splitlines()[-1].startswith(f"hiddenq: {out} is not there any more (unmounted, moved or removed?)")
    assert is_gone(server)
    assert not out.exists(), "nothing was made in its place"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_interrupted_before_anything_was_done_ends_in_one_line(
    signum: signal.Signals, hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = hiddenq.start(*arguments)
    wait_until(lambda: (out / ".hiddenq" / "redis" / "server.json").exists(), seconds=60, what="its Redis")
    process.send_signal(signum)
    interrupted = ended(process)
    assert interrupted.status == 128 + signum
    assert interrupted.err.splitlines() == ["interrupted; the same command goes on from here"]
    assert processes_with(str(out)) == []
    assert EmbeddedServer.find(out / ".hiddenq" / "redis") is None


def test_a_second_run_on_the_same_location_is_refused_naming_the_owner(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = met(hiddenq, arguments, out, num_shards=1)
    try:
        second = hiddenq(*arguments)
        assert second.status == 2, second
        assert f"is being run by process {process.pid}" in second.err
        assert "hiddenq worker" in second.err, "it says how to join"
        assert len(second.err.strip().splitlines()) == 1
    finally:
        first = ended(process)
    assert first.status == 0, f"the first one is not disturbed: {first}"


def test_status_of_a_run_that_goes_on_and_of_one_that_ended(
    hiddenq: Command, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = met(hiddenq, arguments, out, num_shards=1)
    going = hiddenq("status", "--out", out, "--json")
    whole = ended(process)
    assert whole.status == 0, whole
    assert going.status == 0, going
    looked = json.loads(going.out)
    assert looked["total"]["num_samples"] == NUM_SAMPLES
    assert 0 < looked["committed"]["num_samples"] <= NUM_SAMPLES
    assert {worker["role"] for worker in looked["workers"]} == {"gpu_worker", "uploader"}
    after = hiddenq("status", "--out", out)
    assert after.status == 0, after
    assert "complete" in after.out


def _assert_called_stopped(looked: Ended) -> None:
    """In one plain state, with what is done and what is to do, and with no alarm of a fleet."""
    assert looked.status == 0, looked
    assert looked.err == ""
    assert "  stopped  " in looked.out.splitlines()[0]
    assert f" of {NUM_SAMPLES} samples" in looked.out
    assert "no process runs it; " in looked.out
    assert "type the same `hiddenq run` again: it goes on from here" in looked.out
    for alarm in ("critical", "goes well", "tokens/s", "hiddenq worker", "hiddenq upload", "drain", "forget"):
        assert alarm not in looked.out, looked


def _workers_of(out: Path) -> list[int]:
    """The GPU workers whose spool lies in this location."""
    return [pid for pid in processes_with(str(out)) if b"worker-process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _servers_of(out: Path) -> list[int]:
    """The embedded server of this location."""
    known = out / ".hiddenq" / "redis" / "server.json"
    return [int(json.loads(known.read_text())["pid"])] if known.exists() else []
