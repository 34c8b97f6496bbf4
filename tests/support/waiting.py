"""Waiting for a state, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T | Literal[False] | None], *, seconds: float = 60.0, what: str = "") -> T:
    """The first true value of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or condition}"
        time.sleep(0.02)
