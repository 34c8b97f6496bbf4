"""Signals that end a command in good order: SIGINT, SIGTERM and SIGHUP as an exception, wherever the process is.

Invariant: inside `interruptible` a signal raises `Interrupted` in the main thread, and everything that was opened is
closed on its way out; nothing but the caller decides what the exit status is.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """One of the signals arrived."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` for each signal that arrives inside; in the main thread only."""

    def interrupt(number: int, _frame: Any) -> None:
        raise Interrupted(number)

    previous = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals wait until the end of the block; a process started inside begins with them held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
