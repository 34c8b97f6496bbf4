"""What shows that a folder is still the location that it was: an object which was seen there and never changes.

Invariant: once it was dropped, nothing is called missing, and nothing counts as written, unless that object lies there.
A folder that is unmounted, moved or removed under its run is empty, not wrong: without an anchor each token part would
seem lost and each shard would be stored below the mount point, where nobody finds it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hiddenq.contracts.errors import StoreAway, StoreRefused

LOOK_SECONDS = 1.0
T = TypeVar("T")


class Anchor:
    """One folder's anchor; nothing holds before one is dropped. Safe to use from several threads."""

    def __init__(self, folder: Path, *, patience_seconds: float = 0.0) -> None:
        self._folder = folder
        self._patience_seconds = patience_seconds
        self._expected: dict[str, bytes] = {}

    def patient(self, seconds: float) -> Anchor:
        """The same anchor, for who waits so long until it is back."""
        other = Anchor(self._folder, patience_seconds=seconds)
        other._expected = self._expected
        return other

    def drop(self, key: str) -> None:
        """From now on this object must lie there."""
        self._expected[key] = self._wait_for(key)

    def check(self, *, wait: bool = True) -> None:
        """Return once the location is in its place.

        Raises:
            StoreAway: it is not there.
            StoreRefused: another one is there.
        """
        for key, expected in list(self._expected.items()):
            if self._wait_for(key, wait=wait) != expected:
                raise StoreRefused(
                    f"{self._folder}/{key} is not the one that was there before (another disk mounted?); "
                    "put the right one back"
                )

    def reading(self, read: Callable[[], T]) -> T:
        """What `read` returns. That it finds no file counts only while the location is in its place."""
        while True:
            try:
                return read()
            except (FileNotFoundError, NotADirectoryError):
                if self._is_there():
                    raise
                self.check()

    def _is_there(self) -> bool:
        return all((self._folder / key).is_file() for key in self._expected)

    def _wait_for(self, key: str, *, wait: bool = True) -> bytes:
        until = time.monotonic() + (self._patience_seconds if wait else 0.0)
        while True:
            try:
                return (self._folder / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                if time.monotonic() >= until:
                    raise StoreAway(
                        f"{self._folder}: {key} is not there any more (unmounted, moved or removed?); waiting until it "
                        "is back"
                    ) from None
            time.sleep(LOOK_SECONDS)
