"""Where damaged shards are set aside, with the reason beside each.

Invariant: it lies outside the spool's marks, so it stops no worker, and holds no more than its own cap: what was set
aside first makes room.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hiddenq.storage.files import regular_files
from hiddenq.storage.spool_folder import FOLDER_MODE

MAX_SHARE = 0.05
MAX_BYTES = 10 << 30
"""The cap: 5 % of the file system, 10 GiB at most."""


class Quarantine:
    """A spool's quarantine; its folder is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def num_bytes(self) -> int:
        """What lies there."""
        return sum(status.st_size for _, status in regular_files(self._folder))

    def take(self, path: Path, reason: str) -> None:
        """Set a file aside; it is no error if it is gone."""
        if not self._folder.exists():
            self._folder.mkdir(exist_ok=True)
            self._folder.chmod(FOLDER_MODE)
        with contextlib.suppress(FileNotFoundError):
            path.replace(self._folder / path.name)
            (self._folder / f"{path.name}.reason").write_text(reason + "\n")
        self._trim()

    def _trim(self) -> None:
        cap = min(int(MAX_SHARE * shutil.disk_usage(self._folder).total), MAX_BYTES)
        found = sorted(regular_files(self._folder), key=lambda item: item[1].st_mtime)
        total = sum(status.st_size for _, status in found)
        for name, status in found:
            if total <= cap:
                return
            (self._folder / name).unlink(missing_ok=True)
            total -= status.st_size
