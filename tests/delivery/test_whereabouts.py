"""Whose process is gone: said only by one who could see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hiddenq.delivery.whereabouts import is_gone, whereabouts

NOBODY = 4_194_399
"""Above the largest process id."""


def test_a_living_process_is_not_gone_and_an_ended_one_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        known = whereabouts(child.pid)
        assert not is_gone(known)
    assert is_gone(known)
    assert not is_gone(whereabouts())


def test_an_ended_process_that_nobody_waited_for_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        known = whereabouts(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(known)


def test_an_id_that_was_given_out_again_is_not_its_former_owners() -> None:
    assert is_gone({**whereabouts(), "started": 1})


@pytest.mark.parametrize("other", [{"host": "other"}, {"boot": "other"}, {"pid_namespace": 1}])
def test_nobody_in_another_world_of_ids_is_called_gone(other: dict[str, object]) -> None:
    assert not is_gone({**whereabouts(), "pid": NOBODY, **other})


def test_a_process_in_another_container_is_not_called_gone(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = "import json, sys; from hiddenq.delivery.whereabouts import whereabouts as w; open(sys.argv[1], 'w').write("
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code + "json.dumps(w()))", str(note)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("making a process namespace is not allowed here")
    known = json.loads(note.read_text())
    assert known["pid"] < 10, "an id that means another process here"
    assert not is_gone(known)
    assert known["boot"] == whereabouts()["boot"]
    assert is_gone({**known, "pid_namespace": whereabouts()["pid_namespace"], "pid": os.getpid()})
