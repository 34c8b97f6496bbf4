"""The `hiddenq` command as a user types it: in a process of its own, with a home folder of the test's.

Where a test needs to see into it, `exit_status` runs a command in this process; every command is registered by then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hiddenq.cli import app, exit_status, fleet, inspect, run, stages, training  # noqa: F401  each registers its commands

__all__ = ["Command", "Ended", "app", "exit_status", "lines_of", "make_command", "processes_with"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.status}\n{self.out}\n{self.err}"


@dataclass(frozen=True)
class Command:
    """Runs `hiddenq` with one environment."""

    environment: dict[str, str]

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start it; the caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-m", "hiddenq", *map(str, arguments)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str | Path, seconds: float = 120) -> Ended:
        """Run it to its end."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # `run` stops its children, so nothing is left behind
            out, err = process.communicate(timeout=60)
            raise AssertionError(
                f"hiddenq {' '.join(map(str, arguments))} took over {seconds} s\n{out}\n{err}"
            ) from None
        return Ended(process.returncode, out, err)


def make_command(home: Path, **extra: str) -> Command:
    """A command with no settings but the test's own, single-threaded and offline."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HIDDENQ_", "AWS_"))}
    return Command(
        kept
        | {
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "COLUMNS": "200",
        }
        | extra
    )


def processes_with(text: str) -> list[int]:
    """Ids of living processes whose command line holds `text`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if text in line and state != "Z":
                found.append(int(folder.name))
    return found


def lines_of(paths: Sequence[Path]) -> str:
    """The content of log files, for a failing test's message."""
    return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in paths if path.exists())
