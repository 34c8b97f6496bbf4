"""Which processes are in a spool's folder: each keeps a small file there, whose number it raises again and again.

Invariant: the number that a living process raises is found in the folder it works in, and in no other. A copy of the
folder, or of its disk, may hold the file as well, but there the number stands still; and nothing is raised in a folder
that is not the spool any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from hiddenq.contracts.errors import DamagedShard, MissingShard, SpoolGone
from hiddenq.storage.files import older_than, opened, regular_files
from hiddenq.storage.spool_folder import FILE_MODE, check_id

PREFIX = ".holder-"
KEPT_SECONDS = 86400.0
"""What a killed process left is removed when nobody has written it for so long."""


class SpoolPresence:
    """One process in one spool. The file is overwritten in place, so it needs no room on a full disk."""

    def __init__(self, folder: Path, spool_id: str) -> None:
        self.folder = folder
        self.spool_id = spool_id
        self.token = secrets.token_hex(8)

    def show(self, number: int) -> bool:
        """Put a number into this process's file; False if that can't be done now, or here."""
        path = self.folder / f"{PREFIX}{self.token}"
        try:
            check_id(self.folder, self.spool_id)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            try:
                os.fchmod(descriptor, FILE_MODE)  # whatever the umask
                os.pwrite(descriptor, f"{number:019d}\n".encode(), 0)
            finally:
                os.close(descriptor)
        except (OSError, SpoolGone):
            return False
        return True

    def number(self, token: str) -> int | None:
        """What another process shows in this folder: 0 if it is not here, None if that can't be told."""
        if not re.fullmatch("[0-9a-f]{16}", token):
            return None
        try:
            with opened(self.folder / f"{PREFIX}{token}") as descriptor:
                return int(os.pread(descriptor, 20, 0))
        except MissingShard:
            return 0
        except (OSError, DamagedShard, ValueError):
            return None

    def place(self, token: str) -> str:
        """Where a process's file lies, the same for all who see that very file on this host; "" if it is not here."""
        with contextlib.suppress(OSError):
            status = (self.folder / f"{PREFIX}{token}").stat(follow_symlinks=False)
            return f"{status.st_dev}:{status.st_ino}"
        return ""

    def leave(self) -> None:
        """Take this process's file away, and those that were left behind long ago."""
        (self.folder / f"{PREFIX}{self.token}").unlink(missing_ok=True)
        for name, _ in regular_files(self.folder):
            if name.startswith(PREFIX) and older_than(self.folder / name, KEPT_SECONDS):
                (self.folder / name).unlink(missing_ok=True)
