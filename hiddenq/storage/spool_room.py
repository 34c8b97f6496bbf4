"""How full a spool is, and whether its workers wait: the bytes of shards and reservations against two marks.

Invariant: above the high mark every process waits, until the bytes have fallen to the low one; that they do is a file
in the folder, so all of them see it, and it ends by itself when nobody is left who wants room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from hiddenq.contracts import names
from hiddenq.storage.files import TEMPORARY_PREFIX, open_shared, regular_files
from hiddenq.storage.spool_file import SpoolUsage
from hiddenq.storage.spool_folder import check_id

HIGH_SHARE = 0.8
"""High mark by default, and at most: this share of what the disk has left for the spool."""
LOW_SHARE = 0.75
"""Low mark by default: this share of the high mark."""
_PAUSED = ".paused"
_PAUSED_SECONDS = 60
"""Refused reservations renew the pause; one that nobody renewed for so long is over."""


class SpoolRoom:
    """The bytes of one spool."""

    def __init__(self, folder: Path, spool_id: str, high_bytes: int | None, low_bytes: int | None) -> None:
        self._folder = folder
        self._spool_id = spool_id
        self._high_bytes = high_bytes
        self._low_bytes = low_bytes

    @property
    def limit(self) -> int:
        """The most that a single shard may have, in an empty spool on an empty disk."""
        return self._high_bytes or int(HIGH_SHARE * self._disk()[0])

    def admits(self, num_bytes: int) -> bool:
        """Whether so many bytes more may come in now; if not, all processes wait. To be asked under the lock."""
        used = self.used_bytes()
        high, low = self._marks(used)
        paused = self._folder / _PAUSED
        if paused.exists() and used > low:
            self.pause()
            return False
        paused.unlink(missing_ok=True)
        if used + num_bytes > high:
            self.pause()
            return False
        return True

    def pause(self) -> None:
        """Let all processes wait; on a disk so full that it takes not even this, each finds out by itself."""
        with contextlib.suppress(OSError), open_shared(self._folder / _PAUSED) as descriptor:
            os.utime(descriptor)

    def used_bytes(self) -> int:
        """Of shards and reservations."""
        return sum(status.st_size for status in self._look().values())

    def usage(self, *, quarantine_bytes: int) -> SpoolUsage:
        """How full it is now.

        Raises:
            SpoolGone: the folder is not the spool any more.
        """
        look = self._look()
        files = [status for name, status in look.items() if not name.startswith(TEMPORARY_PREFIX)]
        used = sum(status.st_size for status in look.values())
        high, low = self._marks(used)
        oldest = min((status.st_mtime for status in files), default=None)
        return SpoolUsage(
            num_bytes=used,
            num_files=len(files),
            reserved_bytes=used - sum(status.st_size for status in files),
            quarantine_bytes=quarantine_bytes,
            oldest_seconds=0.0 if oldest is None else max(0.0, time.time() - oldest),
            high_bytes=high,
            low_bytes=low,
            disk_free_bytes=self._disk()[1],
            paused=self._is_paused(),
        )

    def _is_paused(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - (self._folder / _PAUSED).stat().st_mtime < _PAUSED_SECONDS
        return False

    def _marks(self, used: int) -> tuple[int, int]:
        high = int(HIGH_SHARE * (used + self._disk()[1]))
        if self._high_bytes is not None:
            high = min(high, self._high_bytes)
        low = int(LOW_SHARE * high) if self._low_bytes is None else min(self._low_bytes, high)
        return high, low

    def _disk(self) -> tuple[int, int]:
        """Bytes of the file system, and those of them that are free."""
        try:
            disk = shutil.disk_usage(self._folder)
        except FileNotFoundError:
            check_id(self._folder, self._spool_id)
            raise
        return disk.total, disk.free

    def _look(self) -> dict[str, os.stat_result]:
        """Shards and reservations by name; one that is renamed while we look has one of its names, not both.

        Under the lock none is renamed, and so none is missed.
        """
        by_inode = {
            status.st_ino: (name, status)
            for name, status in regular_files(self._folder)
            if name.startswith(TEMPORARY_PREFIX) or names.parse_shard_name(name)
        }
        return dict(by_inode.values())
