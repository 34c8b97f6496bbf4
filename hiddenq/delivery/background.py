"""What is held open by a thread that does something at intervals: a lock that is renewed, a fleet that is watched.

Invariant: when `close` returns, the thread's last round is over, and only then comes what `_end` does; so nothing is
renewed that was let go.
"""

from __future__ import annotations

import abc
import threading
from types import TracebackType
from typing import Self


class Background(abc.ABC):
    """A context manager with a thread of its own."""

    def __init__(self, name: str, seconds: float) -> None:
        """`name` is the thread's, `seconds` the wait before each round."""
        self._closing = threading.Event()
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, and start the thread; raises what `_begin` raises."""
        self._begin()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and end."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:  # noqa: B027  nothing, unless a class has something to do
        """What comes before the thread."""

    def _end(self) -> None:  # noqa: B027
        """What comes after it."""

    @abc.abstractmethod
    def _round(self) -> float | None:
        """Once more; returns the wait before the next round, if it is another one. What it raises ends the thread."""

    def _run(self) -> None:
        wait = self._seconds
        while not self._closing.wait(wait):
            wait = self._round() or self._seconds
