"""Options and environment variables are the same settings, and one variable means one thing."""

from __future__ import annotations

import errno
import re
from collections import defaultdict
from pathlib import Path

import pytest

from hiddenq import cli
from tests.support.command import make_command
from tests.support.options import options

OTHER_NAMES = {
    ("run", "--run"): "HIDDENQ_RUN_NAME",  # a name; HIDDENQ_RUN is an id
    ("plan", "--run"): "HIDDENQ_RUN_NAME",
    ("produce", "--run"): "HIDDENQ_RUN_NAME",
    ("worker", "--model"): "HIDDENQ_WORKER_MODEL",  # where it lies on that machine
    ("worker-process", "--model"): "HIDDENQ_WORKER_MODEL",
    ("monitor", "--port"): "HIDDENQ_MONITOR_PORT",
    ("monitor", "--bind"): "HIDDENQ_MONITOR_BIND",
    ("export", "--dtype"): "HIDDENQ_EXPORT_DTYPE",
    ("failed list", "--limit"): "HIDDENQ_FAILED_LIMIT",
}


def test_every_option_is_a_variable_of_its_name_or_of_the_one_in_its_help() -> None:
    found = options()
    assert len({option.command for option in found}) > 15
    for option in found:
        own = "HIDDENQ_" + option.name.removeprefix("--").replace("-", "_").upper()
        expected = OTHER_NAMES.get((option.command, option.name), own)
        assert option.variable == expected, f"{option.command} {option.name}"
        if not option.command.endswith("-process"):
            assert option.is_shown == (expected != own), f"{option.command} {option.name}: say it in the help"


def test_one_variable_is_one_option_of_one_kind() -> None:
    meanings = defaultdict(set)
    for option in options():
        kind = re.sub(r"<class '(.*)'>", r"\1", option.kind).removesuffix(" | None").replace("pathlib.Path", "str")
        meanings[option.variable].add((option.name, kind))
    several = {variable: found for variable, found in meanings.items() if len(found) > 1}
    assert several == {}, several


def test_the_help_says_so(tmp_path: Path) -> None:
    hiddenq = make_command(tmp_path)
    text = " ".join(hiddenq("--help").out.split())
    assert "Every option --SOME-NAME is also a variable HIDDENQ_SOME_NAME, unless its help names another one." in text
    assert "HIDDENQ_RUN_NAME" in hiddenq("produce", "--help").out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("status", "--nonsense"), "No such option: --nonsense"),
        (("nonsense",), "No such command 'nonsense'"),
        (("plan", "--data", "x"), "Missing option '--model'"),
        (("upload", "--uploaders", "0"), "'--uploaders'"),
        (("verify", "--out", "x", "--recompute", "many"), "'--recompute'"),
        (("run", "--model", "m", "--data", "d", "--out"), "'--out' requires an argument"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options()  # every command is registered
    assert cli.exit_status([*arguments]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert len(told.splitlines()) == 1, told


@pytest.mark.parametrize(
    ("command", "error", "status", "text"),
    [
        ("run", FileNotFoundError(errno.ENOENT, "No such file", "/data/x"), 2, "hiddenq: /data/x: No such file; is it"),
        ("run", PermissionError(errno.EACCES, "Permission denied", "/data/x"), 2, "/data/x: Permission denied"),
        ("run", OSError(errno.ENOSPC, "No space left on device"), 2, "a disk: No space left on device; make room"),
        ("worker-process", OSError(errno.ENOSPC, "No space left on device"), 1, "a disk: No space left"),
        (
            "worker-process",
            PermissionError(errno.EACCES, "Permission denied", "/spool"),
            2,
            "/spool: Permission denied",
        ),
        ("run", OSError(errno.EBADF, "Bad file descriptor"), 3, "a fault of ours"),
    ],
)
def test_a_file_or_a_disk_is_the_users_to_mend_and_one_that_may_come_back_is_tried_again_under_a_supervisor(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    error: OSError,
    status: int,
    text: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert cli.exit_status([command]) == status
    told = capsys.readouterr().err
    assert text in told
    assert status == 3 or len(told.splitlines()) == 1


def test_no_arguments_show_the_help(tmp_path: Path) -> None:
    ended = make_command(tmp_path)()
    assert ended.status == 2
    assert "Start with" in ended.out + ended.err


def test_a_variable_that_can_not_be_is_refused_by_the_options_name(tmp_path: Path) -> None:
    ended = make_command(tmp_path, HIDDENQ_BANDWIDTH="0")("verify", "--out", "/nonexistent")
    assert ended.status == 2
    assert "--bandwidth" in ended.err
