"""Keep a set of our own processes alive: restart what dies, leave out what is sick, stop all in good order.

Invariant: a process is either running, waiting for its restart, finished (exit 0) or withdrawn with a reason; nothing
is restarted for ever, because deaths in quick succession withdraw it, and nothing outlives its supervisor, because
each child asks the kernel for SIGTERM when its parent dies.

Children run in sessions of their own, so Ctrl-C reaches the supervisor alone and each child gets one SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hiddenq.contracts import names
from hiddenq.contracts.errors import UserError
from hiddenq.telemetry import logger

START_SECONDS = 120.0
"""A process that was started so recently may not have been able to say anything yet: torch can take minutes to load."""
PARENT_VARIABLE = "HIDDENQ_PARENT_PID"
SUPERVISED = {names.REDIS_WAIT_VARIABLE: "3600"}
"""A child that starts while Redis is away waits for it: its supervisor knew that Redis before."""
REFUSED = "it ended with what you are to mend (exit status 2): its last line in its log"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to keep alive."""

    name: str
    command: tuple[str, ...]
    """The whole command line; `hiddenq_command` makes one of ours."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own environment."""
    log_file: Path | None = None
    """Where its stdout and stderr go; None for ours."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a dead process comes back."""

    first_delay_seconds: float = 1.0
    max_delay_seconds: float = 60.0
    long_life_seconds: float = 120.0
    """A process that lived so long starts counting from zero again."""
    max_quick_deaths: int = 10
    """So many deaths in a row, none after a long life, and it is withdrawn."""


@dataclass
class _Child:
    spec: ProcessSpec
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    quick_deaths: int = 0
    restart_at: float | None = None
    withdrawn: str | None = None
    misconfigured: bool = False


class Supervisor:
    """Runs processes until it is told to stop; call `poll` every second or so."""

    def __init__(self, specs: Sequence[ProcessSpec], policy: RestartPolicy | None = None) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._policy = policy or RestartPolicy()

    def start(self) -> None:
        """Start every process."""
        for child in self._children:
            self._spawn(child)

    def poll(self) -> None:
        """Notice deaths, and start again what is due."""
        now = time.monotonic()
        for child in self._children:
            if child.process is not None and (status := child.process.poll()) is not None:
                child.process = None
                self._bury(child, status, now)
            if child.restart_at is not None and now >= child.restart_at:
                child.restart_at = None
                self._spawn(child)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs now, by name."""
        return {child.spec.name: child.process.pid for child in self._children if child.process}

    @property
    def withdrawn(self) -> dict[str, str]:
        """Processes that will not be started again, with the reason."""
        return {child.spec.name: child.withdrawn for child in self._children if child.withdrawn}

    @property
    def only_misconfigured(self) -> bool:
        """Whether every process that was withdrawn was so for its settings (exit status 2)."""
        return all(child.misconfigured for child in self._children if child.withdrawn)

    @property
    def any_left(self) -> bool:
        """Whether any process runs or will be restarted."""
        return any(child.process or child.restart_at is not None for child in self._children)

    @property
    def is_starting(self) -> bool:
        """Whether any process waits for its restart or was started just now: it is too early to miss it."""
        now = time.monotonic()
        return any(
            child.restart_at is not None or (child.process and now - child.started < START_SECONDS)
            for child in self._children
        )

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to all, wait, then SIGKILL to what is left after the grace period."""
        for child in self._children:
            child.restart_at = None
            if child.process and child.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()
        deadline = time.monotonic() + grace_seconds
        for child in self._children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger().warning(
                    "process_killed", process=child.spec.name, reason=f"did not stop within {grace_seconds:g} s"
                )
                child.process.kill()
                child.process.wait()
            child.process = None

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        environment = {**os.environ, **spec.environment, **SUPERVISED, PARENT_VARIABLE: str(os.getpid())}
        child.started = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(spec.log_file.open("ab")) if spec.log_file else None
                child.process = subprocess.Popen(
                    spec.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:  # a log on a disk that is full or read-only, say; it may pass
            self._try_later(child, f"{error.filename}: {error.strerror}", child.started)
            return
        logger().debug("process_started", process=spec.name, pid=child.process.pid)

    def _bury(self, child: _Child, status: int, now: float) -> None:
        name = child.spec.name
        if status == 0:
            return
        if status == UserError.exit_status:
            child.misconfigured = True
            child.withdrawn = _last_line(child.spec.log_file) or REFUSED
            logger().error("process_withdrawn", process=name, reason=child.withdrawn)
            return
        how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
        self._try_later(child, how, now)

    def _try_later(self, child: _Child, how: str, now: float) -> None:
        """It ended badly, or could not be started: once more after a while, or never again."""
        policy, name = self._policy, child.spec.name
        lived = now - child.started
        child.quick_deaths = 1 if lived >= policy.long_life_seconds else child.quick_deaths + 1
        if child.quick_deaths >= policy.max_quick_deaths:
            child.withdrawn = f"died {child.quick_deaths} times in a row, last by {how}"
            logger().error("process_withdrawn", process=name, reason=child.withdrawn)
            return
        delay = min(policy.first_delay_seconds * 2 ** (child.quick_deaths - 1), policy.max_delay_seconds)
        child.restart_at = now + delay
        logger().warning("process_died", process=name, how=how, next=f"started again in {delay:g} s")


def hiddenq_command(*arguments: str) -> tuple[str, ...]:
    """The command line of a `hiddenq` command under this very Python."""
    return (sys.executable, "-m", "hiddenq", *arguments)


def die_with_parent(parent: int | None = None) -> None:
    """Called first in a child: SIGTERM when the process that started it dies, however it dies.

    `parent` is that process's id; None takes it from the environment, where a supervisor has left it, and does nothing
    if there is none. Linux only (`prctl`); elsewhere a child of a killed process goes on until it is stopped by hand.
    """
    left = os.environ.pop(PARENT_VARIABLE, None)
    parent = parent or (int(left) if left else None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _last_line(log_file: Path | None) -> str | None:
    """The last `hiddenq: …` line that a child wrote: its one-line error."""
    lines: list[str] = []
    if log_file is not None:
        with contextlib.suppress(OSError), log_file.open("rb") as file:  # its folder may be gone
            file.seek(max(0, log_file.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    return next((line.removeprefix("hiddenq: ") for line in reversed(lines) if line.startswith("hiddenq: ")), None)
