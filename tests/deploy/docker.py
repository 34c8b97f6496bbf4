"""Docker and compose as a user types them, and what is said where they are missing.

Without an engine a test is skipped, and says how to get one; with HIDDENQ_REQUIRE_ENGINE set (by CI, once it has
started one) a missing engine is a failure.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HOW = 'for one: python3 tests/deploy/engine.py start && eval "$(python3 tests/deploy/engine.py env)" (root, Debian)'


def docker(
    *arguments: str | Path, check: bool = True, timeout: float = 600, environment: Mapping[str, str] | None = None
) -> str:
    """Run docker; its stdout. A failure shows what it said."""
    done = subprocess.run(
        ["docker", *map(str, arguments)],
        cwd=DEPLOY,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        pytest.fail(f"docker {' '.join(map(str, arguments))}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def config(*files: str, profiles: tuple[str, ...] = (), environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What compose makes of these files."""
    arguments: list[str] = []
    for file in files:
        arguments += ["-f", file]
    for profile in profiles:
        arguments += ["--profile", profile]
    arguments = ["compose", "--env-file", "/dev/null", *arguments, "config", "--format", "json"]
    found: dict[str, Any] = json.loads(docker(*arguments, environment=environment))
    return found


def require_compose() -> None:
    """Skip unless the compose plugin is there; it needs no engine to read files."""
    if not _works("compose", "version"):
        _missing("no docker with the compose plugin here")


def require_engine() -> None:
    """Skip unless an engine runs."""
    if not _works("info") or not _works("compose", "version"):
        _missing("no Docker engine answers here")


def _missing(what: str) -> None:
    if os.environ.get("HIDDENQ_REQUIRE_ENGINE"):
        pytest.fail(f"{what}, and HIDDENQ_REQUIRE_ENGINE is set")
    pytest.skip(f"{what}; {HOW}")


@functools.cache
def _works(*arguments: str) -> bool:
    try:
        return subprocess.run(["docker", *arguments], capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False
