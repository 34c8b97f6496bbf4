"""The README as a newcomer types it: every command in it runs, with a small model and a small file in place of theirs.

`make demo` and `make test` are run by CI itself.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command import Command, make_command, processes_with
from tests.support.models import save_tiny_model
from tests.support.redis_server import RedisServer, redis_server, shared_redis_server  # noqa: F401  fixtures
from tests.support.s3_server import (  # noqa: F401  fixtures
    ACCESS_KEY,
    SECRET_KEY,
    S3Location,
    S3Server,
    s3_location,
    s3_server,
)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    " ".join(line.partition("  #")[0].split())
    for line in re.findall(r"^    ((?:hiddenq|make|pip) .+)$", README, re.MULTILINE)
]
CODE = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SMALL = {
    "HIDDENQ_DEVICES": "cpu",
    "HIDDENQ_CPU_THREADS": "1",
    "HIDDENQ_PROCESSES": "1",
    "HIDDENQ_UPLOADERS": "1",
    "HIDDENQ_MAX_LENGTH": "128",
    "HIDDENQ_TOKEN_BUDGET": "256",
}
"""What makes a run small, said by variables so that the commands stay the README's own."""
ONE_MACHINE = [
    "hiddenq plan --model Qwen/Qwen3-8B --data chats.jsonl --out /data/states --target-layers eagle3",
    "hiddenq run --model Qwen/Qwen3-8B --data chats.jsonl --out /data/states --target-layers eagle3",
    "hiddenq failed list --out /data/states",
    "hiddenq verify --out /data/states",
]
"""Run one after another; `export`, in the text, is found there."""
WATCH = "hiddenq status --out /data/states --watch"
MORE_MACHINES = [
    "hiddenq run --out s3://bucket/prefix --redis-url redis://10.0.0.1:6379 …",
    "hiddenq worker --spool /fast/disk",
    "hiddenq upload --spool /fast/disk",
]
OTHERS = [
    "make demo",
    "make test",
    "pip install -c constraints.txt -e '.[local]'",
    "hiddenq run --devices cuda:0 …",
    "hiddenq run …",
]
EXPORT = "hiddenq export --out /data/states --to speculators --dest /data/train"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Command]:
    """A user's shell in a folder with `chats.jsonl`; afterwards nothing that it started may be alive."""
    home = tmp_path / "home"
    home.mkdir()
    save_tiny_model(tmp_path / "model", num_hidden_layers=8)
    words = ["the", "model", "reads", "a", "token", "and", "writes", "a", "state", "for", "each", "layer"]
    rows = (
        f'{{"messages": [{{"role": "user", "content": "{" ".join(words[: 1 + row % 9])}"}}, '
        f'{{"role": "assistant", "content": "{" ".join(words[row % 5 :])}"}}]}}\n'
        for row in range(60)
    )
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    yield make_command(home, **SMALL)
    left = processes_with(str(tmp_path))
    assert not left, f"left running: {left}"


def typed(command: str, folder: Path) -> list[str]:
    """A command of the README, with what is here in place of the example's model, data and folders."""
    here = {"Qwen/Qwen3-8B": "model", "chats.jsonl": "chats.jsonl", "/data/": "", "/fast/": "fast-"}
    for example, real in here.items():
        command = command.replace(example, f"{folder}/{real}")
    program, *arguments = shlex.split(command)
    assert program == "hiddenq"
    return arguments


def watched(machine: Command, arguments: list[str], *, until: str, seconds: float = 60.0) -> str:
    """What a command shows on a terminal until it shows `until`; then Ctrl-C, which must end it."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "hiddenq", *arguments]
    process = subprocess.Popen(
        command,
        env=machine.environment,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        # As in a user's shell; a job in the background of a script has it ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(its_end)
    shown, deadline = "", time.monotonic() + seconds
    try:
        with suppress(OSError):  # it has ended by itself: what it said is in `shown`
            while until not in shown and time.monotonic() < deadline and process.poll() is None:
                if select.select([terminal], [], [], 0.2)[0]:
                    shown += os.read(terminal, 1 << 16).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        with suppress(OSError):  # the other end is closed
            while process.poll() is None and time.monotonic() < deadline:
                if select.select([terminal], [], [], 0.2)[0]:  # what nobody reads would hold the process up
                    os.read(terminal, 1 << 16)
        assert process.wait(timeout=1) in (0, 130), shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return shown


def test_each_command_of_the_readme_is_run_by_a_test_or_by_ci() -> None:
    assert sorted(COMMANDS) == sorted([*ONE_MACHINE, WATCH, *MORE_MACHINES, *OTHERS])
    assert EXPORT in README
    ci = (ROOT / ".ci" / "run").read_text()
    assert "\nmake demo\n" in ci
    assert "\nmake test\n" in ci


def test_what_it_says_for_one_machine_works_from_top_to_bottom(
    machine: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in [*ONE_MACHINE, EXPORT]:
        ended = machine(*typed(command, tmp_path))
        assert ended.status == 0, f"{command}\n{ended}"
    assert list((tmp_path / "train").iterdir())
    assert "complete" in watched(machine, typed(WATCH, tmp_path), until="complete")
    monkeypatch.chdir(tmp_path)
    for code in CODE:
        exec(compile(code.replace("/data/", f"{tmp_path}/"), "README.md", "exec"), {})


def test_what_it_says_for_more_machines_works_and_the_second_one_does_some_of_the_work(
    machine: Command,
    tmp_path: Path,
    redis_server: RedisServer,  # noqa: F811
    s3_server: S3Server,  # noqa: F811
    s3_location: S3Location,  # noqa: F811
) -> None:
    run, worker, upload = (typed(command.removesuffix(" …"), tmp_path) for command in MORE_MACHINES)
    places = {"s3://bucket/prefix": s3_location.uri, "redis://10.0.0.1:6379": redis_server.bare_url}
    run = [places.get(argument, argument) for argument in run]
    slow = save_tiny_model(tmp_path / "slow", num_hidden_layers=16, hidden_size=256, intermediate_size=1024)
    run += ["--model", str(slow), "--data", f"{tmp_path}/chats.jsonl", "--target-layers", "eagle3"]
    password = tmp_path / "password"
    password.write_text(redis_server.password)
    shared = {
        "HIDDENQ_REDIS_PASSWORD_FILE": str(password),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    first = Command(
        machine.environment | shared | {"HIDDENQ_ENDPOINT_URL": s3_server.endpoint_url, "HIDDENQ_TOKEN_BUDGET": "128"}
    )
    second = Command(machine.environment | shared | {"HIDDENQ_REDIS_URL": redis_server.bare_url})
    joined = [second.start(*worker), second.start(*upload)]
    try:
        ended = first(*run)
    finally:
        for process in joined:
            process.terminate()
        outputs = [process.communicate(timeout=60) for process in joined]
    assert ended.status == 0, f"{ended}\n{outputs}"
    assert [process.returncode for process in joined] == [0, 0], outputs
    verified = first("verify", "--out", s3_location.uri)
    assert verified.status == 0, verified
    assert "committed" in "".join(outputs[1]), "no shard came from the second machine's spool"


def test_without_a_gpu_a_gpu_that_is_asked_for_is_one_clear_line(machine: Command, tmp_path: Path) -> None:
    command = typed(ONE_MACHINE[1], tmp_path)
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ended = machine(*command, "--devices", "cuda:0")
    assert ended.status == 2, ended
    assert "0 GPUs are visible (`hiddenq doctor`)" in ended.err.splitlines()[-1]


def test_the_install_line_asks_for_nothing_beyond_what_was_tested() -> None:
    line = next(command for command in OTHERS if command.startswith("pip "))
    arguments = [*shlex.split(line)[1:], "--dry-run", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    would = re.search(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    assert would is not None, done.stdout
    assert re.fullmatch(r"hiddenq-[0-9.]+", would[1]), "packages that the tests ran without"


@pytest.mark.parametrize("name", ["deploy/.env", "deploy/join-password", "deploy/ca.pem", "credentials/redis"])
def test_what_the_deploy_guide_has_one_write_into_the_clone_is_never_committed(name: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    ignored = subprocess.run(["git", "-C", str(tmp_path), "check-ignore", "--quiet", name], check=False)
    assert ignored.returncode == 0
