"""A clock of its own for one process: libfaketime, preloaded. Its monotonic clock stays the real one.

Promise to tests: `clock(hours=1)` is the environment of a process whose wall clock is an hour ahead; that of a
`JumpingClock` can be set while the process runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FOLDERS = ("/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/lib/faketime")


def library() -> Path:
    """The library; the test is skipped where there is none, and fails in CI."""
    for folder in _FOLDERS:
        if (found := Path(folder) / "libfaketime.so.1").exists():
            return found
    if os.environ.get("CI"):
        pytest.fail("no libfaketime: .ci/run installs faketime")
    pytest.skip("no libfaketime: install faketime")


def clock(*, hours: float) -> dict[str, str]:
    """The environment of a process whose clock is off by so many hours."""
    return {**_environment(), "FAKETIME": f"{hours * 3600:+.0f}"}


class JumpingClock:
    """A clock that is set by writing into a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump(0)
        self.environment = {**_environment(), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1"}

    def jump(self, seconds: float) -> None:
        """From now on the clock is off by so many seconds."""
        self._file.write_text(f"{seconds:+.0f}\n")


def _environment() -> dict[str, str]:
    return {"LD_PRELOAD": str(library()), "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
