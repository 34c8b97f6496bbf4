"""A spool's folder: made with the right mode, checked for access, and named by a UUID.

Invariant: all processes that open one folder get one id, because the first to link its own into place wins; and a
process that could not read what another one leaves there does not start.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from hiddenq.contracts.errors import SpoolGone, UsageError

SPOOL_ID = "spool_id"
FILE_MODE = 0o640
FOLDER_MODE = 0o2770
"""Files take the folder's group, so an uploader of another user needs that group and no more."""


def open_folder(folder: Path, *, create: bool) -> Path:
    """The folder's absolute path, made if need be.

    Raises:
        UsageError: no such folder, or not one that this user may write.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    if not folder.exists() and create:
        _make_folder(folder)
    if not folder.is_dir():
        raise UsageError(f"--spool {folder}: no such folder")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        status = folder.stat()
        raise UsageError(
            f"--spool {folder}: user {os.geteuid()} may not write there (owner {status.st_uid}, group "
            f"{status.st_gid}, mode {status.st_mode & 0o7777:o}); add the user to that group, or run as the owner"
        )
    return folder


def spool_id(folder: Path, *, create: bool) -> str:
    """The spool's id; the first process to link its own into place wins."""
    path = folder / SPOOL_ID
    if not path.exists() and create:
        temporary = folder / f".{SPOOL_ID}-{uuid.uuid4()}"
        temporary.write_text(f"{uuid.uuid4()}\n")
        temporary.chmod(FILE_MODE)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    try:
        return str(uuid.UUID(path.read_text().strip()))
    except FileNotFoundError:
        raise UsageError(
            f"--spool {folder}: not a spool (no file {SPOOL_ID}); a worker or uploader makes one"
        ) from None
    except ValueError:
        raise UsageError(
            f"--spool {folder}: {SPOOL_ID} holds no UUID; remove the file if no hiddenq process uses the spool"
        ) from None


def check_id(folder: Path, expected: str) -> None:
    """Raise `SpoolGone` unless the folder is still the spool that was opened there."""
    with contextlib.suppress(OSError):
        if (folder / SPOOL_ID).read_text().strip() == expected:
            return
    raise SpoolGone(
        f"--spool {folder}: spool {expected} does not lie there any more (unmounted, or another one mounted over it?); "
        "mount it again and start again: its shards are waited for"
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        folder.chmod(FOLDER_MODE)
    except OSError as error:
        raise UsageError(f"--spool {folder}: can't be made: {error.strerror}") from error
