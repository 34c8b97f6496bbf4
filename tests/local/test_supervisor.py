"""A host's processes: restarted when they die, left out when they are sick, stopped in good order."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiddenq.cli import stages
from hiddenq.cli.groups import QueueOptions
from hiddenq.supervisor import ProcessSpec, RestartPolicy, Supervisor

QUICK = RestartPolicy(first_delay_seconds=0.01, max_delay_seconds=0.05, max_quick_deaths=3)


def spec(code: str, log: Path | None = None) -> ProcessSpec:
    return ProcessSpec(name="child", command=(sys.executable, "-c", textwrap.dedent(code)), log_file=log)


def poll_until(supervisor: Supervisor, done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, "nothing happened in 20 s"
        supervisor.poll()
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def make(*specs: ProcessSpec, policy: RestartPolicy = QUICK) -> Supervisor:
        supervisor = Supervisor(specs, policy)
        started.append(supervisor)
        supervisor.start()
        return supervisor

    yield make
    for supervisor in started:
        supervisor.stop(grace_seconds=0)


def test_a_killed_process_is_started_again(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec("import time; time.sleep(60)"))
    first = supervisor.pids["child"]
    os.kill(first, signal.SIGKILL)
    poll_until(supervisor, lambda: supervisor.pids.get("child", first) != first)
    assert supervisor.any_left


def test_a_process_that_keeps_dying_is_withdrawn_with_the_reason(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec("raise SystemExit(70)"))
    poll_until(supervisor, lambda: supervisor.withdrawn)
    assert supervisor.withdrawn == {"child": "died 3 times in a row, last by exit status 70"}
    assert not supervisor.any_left


def test_a_wrong_setting_is_not_tried_again_and_its_line_is_the_reason(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    code = """
        import sys
        print('{"event": "something"}', file=sys.stderr)
        print('hiddenq: /models/x: no such model', file=sys.stderr)
        raise SystemExit(2)
    """
    supervisor = supervise(spec(code, tmp_path / "log"))
    poll_until(supervisor, lambda: supervisor.withdrawn)
    assert supervisor.withdrawn == {"child": "/models/x: no such model"}


def test_a_wrong_setting_whose_log_was_removed_is_still_one(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    supervisor = supervise(spec(f"import os, sys; os.remove({str(log)!r}); sys.exit(2)", log))
    poll_until(supervisor, lambda: supervisor.withdrawn)
    assert supervisor.withdrawn == {
        "child": "it ended with what you are to mend (exit status 2): its last line in its log"
    }


def test_a_log_that_can_not_be_written_is_tried_again_and_at_last_the_reason(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "child.log"
    supervisor = supervise(spec("print('here')", log))
    assert not supervisor.withdrawn, "a disk may come back"
    log.parent.mkdir()
    poll_until(supervisor, lambda: not supervisor.any_left)
    assert log.read_text() == "here\n"
    other = supervise(spec("pass", tmp_path / "nowhere" / "child.log"))
    poll_until(other, lambda: other.withdrawn)
    assert f"{tmp_path}/nowhere/child.log: No such file or directory" in other.withdrawn["child"]


def test_a_process_that_ends_well_stays_ended(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec("pass"))
    poll_until(supervisor, lambda: not supervisor.any_left)
    assert supervisor.withdrawn == {}


def test_stop_asks_once_and_kills_what_does_not_listen(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: print("asked", file=sys.stderr, flush=True))
        print("ready", file=sys.stderr, flush=True)
        while True: time.sleep(1)
    """
    log = tmp_path / "log"
    supervisor = supervise(spec(code, log))
    pid = supervisor.pids["child"]
    poll_until(supervisor, lambda: log.exists() and "ready" in log.read_text())
    supervisor.stop(grace_seconds=0.5)
    assert log.read_text().split() == ["ready", "asked"]
    assert not is_running(pid)


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    parent_code = f"""
        import sys, time
        sys.path.insert(0, {str(Path.cwd())!r})
        from hiddenq.supervisor import ProcessSpec, Supervisor
        child = "import time; from hiddenq.supervisor import die_with_parent as ask; ask(); "
        child += "print('up', flush=True); time.sleep(60)"
        supervisor = Supervisor([ProcessSpec(name="child", command=(sys.executable, "-c", child))])
        supervisor.start()
        print(supervisor.pids["child"], flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        child = int((lines - {"up"}).pop())
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.01)


@pytest.mark.parametrize(("window_seconds", "graces"), [(60.0, [600.0]), (0.0, [600.0, 10.0])])
def test_two_signals_in_one_moment_are_one_request_and_a_later_one_is_another(
    monkeypatch: pytest.MonkeyPatch, window_seconds: float, graces: list[float]
) -> None:
    asked: list[float] = []

    class Signalled(Supervisor):
        def start(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def stop(self, grace_seconds: float) -> None:
            asked.append(grace_seconds)
            if len(asked) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("hiddenq.delivery.connect", io.BytesIO)
    monkeypatch.setattr(stages, "Supervisor", Signalled)
    monkeypatch.setattr(stages, "SAME_REQUEST_SECONDS", window_seconds)
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert stages._supervise(QueueOptions(), [spec("pass")]) == 0
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert asked == graces
