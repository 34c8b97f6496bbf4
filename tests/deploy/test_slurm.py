"""The Slurm job's script, with stand-ins for `srun` and `hiddenq`: who is started, asked to stop, and waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.docker import DEPLOY
from tests.support.waiting import wait_until

SRUN = """#!/bin/bash
# A task in a process group of its own, as on a node; this script is Slurm, and waits for it.
shift
setsid "$@" &
echo $! >"$STAND_INS/task"
wait $!
"""
HIDDENQ = """#!/bin/bash
say() { echo "$*" >>"$STAND_INS/log"; }
say "$* at $HIDDENQ_REDIS_URL port ${HIDDENQ_METRICS_PORT:-none}"
echo $$ >>"$STAND_INS/pids"
mkdir -p "$HIDDENQ_SPOOL"
case $1 in
doctor) exit "${DOCTOR_STATUS:-0}" ;;
worker)
    # Its last batch ends after Slurm has asked everyone.
    trap 'trap "" TERM; say "worker asked"; until [ -e "$STAND_INS/all-asked" ]; do sleep 0.05; done
        touch "$HIDDENQ_SPOOL/000001-0123abcd.safetensors"; say "worker ends"; exit "${WORKER_STATUS:-0}"' TERM
    touch "$STAND_INS/worker-runs"
    while :; do sleep 0.05; done ;;
upload)
    trap 'say "uploader ends"; exit 0' TERM
    touch "$STAND_INS/upload-runs"
    while :; do
        for shard in "$HIDDENQ_SPOOL"/*.safetensors; do
            [ -e "$shard" ] && sleep 0.3 && rm "$shard" && say "uploaded"
        done
        sleep 0.05
    done ;;
esac
"""


def running(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A job whose worker and uploader listen to signals."""
    job = start(folder, **environment)
    for name in ("worker-runs", "upload-runs"):
        wait_until((folder / name).exists, what=name)
    return job


def start(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    for name, text in (("srun", SRUN), ("hiddenq", HIDDENQ)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.Popen(
        ["bash", DEPLOY / "slurm/hiddenq.sbatch"],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "STAND_INS": str(folder),
            "SLURM_TMPDIR": str(folder),
            "SLURM_JOB_ID": "7",
            "HIDDENQ_REDIS_URL": "redis://worker@10.8.0.1:6379/0",
            "HIDDENQ_REDIS_PASSWORD_FILE": "/dev/null",
            **environment,
        },
    )


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def end(folder: Path, job: subprocess.Popen[bytes], *pids: int) -> int:
    """Ask a job's processes to stop, as Slurm does; its exit status."""
    task = int((folder / "task").read_text())
    try:
        for _ in range(2):  # it asks the whole group, and asks again at the limit
            os.killpg(task, signal.SIGTERM)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
        (folder / "all-asked").touch()
        return job.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task, signal.SIGKILL)


@pytest.mark.parametrize("status", [0, 1])
def test_at_the_time_limit_the_worker_ends_its_batch_and_the_uploader_what_is_in_the_spool(
    tmp_path: Path, status: int
) -> None:
    job = running(tmp_path, WORKER_STATUS=str(status))
    assert end(tmp_path, job) == status
    lines = log(tmp_path)
    assert lines[0] == "doctor at redis://worker@10.8.0.1:6379/0 port none"
    assert sorted(lines[1:3]) == [
        "upload at redis://uploader@10.8.0.1:6379/0 port 9440",
        "worker --devices cuda at redis://worker@10.8.0.1:6379/0 port 9400",
    ]
    assert lines[3:] == ["worker asked", "worker ends", "uploaded", "uploader ends"]


def test_an_uploader_that_slurm_ended_too_early_is_started_again_for_what_is_left(tmp_path: Path) -> None:
    job = running(tmp_path)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()][1:]
    assert end(tmp_path, job, *pids) == 0
    lines = log(tmp_path)
    assert sorted(lines[3:5]) == ["uploader ends", "worker asked"]
    assert lines[5:] == [
        "worker ends",
        "upload at redis://uploader@10.8.0.1:6379/0 port 9440",
        "uploaded",
        "uploader ends",
    ]


def test_a_node_that_can_not_work_starts_nothing(tmp_path: Path) -> None:
    assert start(tmp_path, DOCTOR_STATUS="2").wait(30) == 2
    assert len(log(tmp_path)) == 1


def test_the_script_says_what_it_needs(tmp_path: Path) -> None:
    assert start(tmp_path, HIDDENQ_REDIS_URL="").wait(30) != 0
    assert not (tmp_path / "log").exists()
