"""A spool's folder: made with the right mode, checked for access, and named by a UUID.

Invariant: all processes that open one folder get one id, because the first to link its own into place wins; and a
process that could not read what another one leaves there does not start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from hiddenq.contracts.errors import SpoolAway, SpoolGone, UsageError
from hiddenq.storage.files import must_be_utf8

SPOOL_ID = "spool_id"
FILE_MODE = 0o640
FOLDER_MODE = 0o2770
"""Files take the folder's group, so an uploader of another user needs that group and no more."""

_MAY_PASS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there"),
    **dict.fromkeys((errno.EROFS, errno.ESTALE, errno.ENOENT), "see that its disk is mounted and writable"),
}
"""What a disk may say for a while, and what to do."""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What is written inside goes into the spool there; an error of it names the spool.

    Raises:
        SpoolAway: the disk is full, read-only or not there; that may pass.
        OSError: anything else.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _MAY_PASS:
            raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error
        raise SpoolAway(
            f"--spool {folder}: {error.strerror}; {_MAY_PASS[error.errno]}; no batch is charged for it"
        ) from error


def open_folder(folder: Path, *, create: bool) -> Path:
    """The folder's absolute path, made if need be.

    Raises:
        UsageError: no such folder, or not one that this user may write.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    must_be_utf8("--spool", str(folder))
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
    """The spool's id; the first process to link its own into place wins.

    Raises:
        SpoolAway: it can't be written now.
        UsageError: there is none, or it is no id.
    """
    path = folder / SPOOL_ID
    if not path.exists() and create:
        temporary = folder / f".{SPOOL_ID}-{uuid.uuid4()}"
        try:
            with writing(folder):
                temporary.write_text(f"{uuid.uuid4()}\n")
                temporary.chmod(FILE_MODE)
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
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
