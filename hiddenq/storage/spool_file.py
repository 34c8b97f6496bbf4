"""One shard in a spool: reserved, whole, and how full all of them make it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from hiddenq.storage.files import fsync_folder
from hiddenq.storage.spool_folder import writing


@dataclass(frozen=True, kw_only=True)
class SpoolEntry:
    """One finished shard."""

    file_name: str
    num_bytes: int
    modified: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class SpoolUsage:
    """How full the spool is; `num_bytes` holds reservations, too."""

    num_bytes: int
    num_files: int
    reserved_bytes: int
    quarantine_bytes: int
    oldest_seconds: float
    high_bytes: int
    low_bytes: int
    disk_free_bytes: int
    paused: bool


class SpoolFile:
    """A reserved file of the final size, under a temporary name."""

    def __init__(
        self,
        folder: Path,
        temporary: str,
        file_name: str,
        descriptor: int,
        locked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.fd = descriptor
        self.folder = folder
        self.file_name = file_name
        self._temporary = folder / temporary
        self._final = folder / file_name
        self._locked = locked

    def publish(self, *, fsync: bool = False) -> Path:
        """Give the file its final name; on disk before this returns if `fsync`.

        Raises:
            SpoolAway: the disk is read-only or not there.
            OSError: it is broken.
        """
        with writing(self.folder):
            if fsync:
                os.fsync(self.fd)
            with self._locked():  # who counts the spool's bytes must find it under one of its names
                self._temporary.rename(self._final)
            self._close()
            if fsync:
                fsync_folder(self.folder)
        return self._final

    def discard(self) -> None:
        """Give the bytes back; may be called twice, removes nothing after `publish`. What the disk keeps is swept."""
        self._close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def allocate(descriptor: int, num_bytes: int) -> None:
    """Make a file that long with its bytes reserved on disk; raises `OSError` if they are not there."""
    if num_bytes:
        os.posix_fallocate(descriptor, 0, num_bytes)
