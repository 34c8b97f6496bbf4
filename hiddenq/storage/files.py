"""Files and folders as the spool and the local store need them: durable, of the expected kind, shared on purpose.

Invariant: a name that came from outside is opened without following a link at its last step, and only if a regular file
lies there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hiddenq.contracts.errors import DamagedShard, MissingShard, UsageError
from hiddenq.contracts.wording import shown

TEMPORARY_PREFIX = ".tmp-"
"""Of files that are not whole yet: `.tmp-<8 characters>-<final name>`."""
SHARED_MODE = 0o660
_OCTAL = re.compile(rb"\\([0-7]{3})")
"""How the kernel writes spaces and the like in the name of a mount."""


def temporary_token(name: str) -> str | None:
    """The token of a temporary file `.tmp-<token>-…` (in a spool: its execution); None for every other name."""
    token = name.removeprefix(TEMPORARY_PREFIX).partition("-")[0]
    return token if name.startswith(TEMPORARY_PREFIX) and len(token) == 8 else None


def temporary_beside(target: Path) -> Path:
    """A name beside the target that no other attempt has, not even one that was killed."""
    return target.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}-{target.name}")


def older_than(path: Path, seconds: float) -> bool:
    """Whether a file was last written so long ago; False if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat(follow_symlinks=False).st_mtime > seconds
    return False


def regular_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names and states of a folder's regular files; those that vanish meanwhile are left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)


def must_be_utf8(what: str, name: str) -> None:
    """Refuse a name that no message or settings file could hold.

    Raises:
        UsageError: it is no UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} {shown(name)}: this name is no UTF-8; choose one that is") from None


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Kind of the file system that a path lies on, such as ext4, nfs4 or overlay; `unknown` if it can't be told."""
    found, longest = "unknown", -1
    with contextlib.suppress(OSError):
        for line in mounts.read_bytes().splitlines():
            _, escaped, kind, *_ = line.split(b" ")
            folder = os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), escaped))
            if len(folder) >= longest and path.is_relative_to(folder):
                found, longest = kind.decode(), len(folder)
    return found


def ensure_folder(folder: Path) -> None:
    """Create a folder and its parents, each of them on disk when this returns."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for child in reversed(missing):
        child.mkdir(exist_ok=True)
        fsync_folder(child.parent)


@contextlib.contextmanager
def no_empty_folders(folder: Path | None) -> Iterator[None]:
    """Afterwards a folder, here or above, that was not there before is there only if something lies in it."""
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)] if folder else []
    try:
        yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # never made, or in use by now
                path.rmdir()


def must_take_folder(folder: Path | None) -> None:
    """Refuse a location that can't be a folder, before anything is made there.

    Raises:
        UsageError: it, or what it lies in, is a file.
    """
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder) if folder else None
    if nearest and not nearest.is_dir():
        raise UsageError(f"--out {folder}: {nearest} is a file; name a folder, which need not be there yet")


def fsync_folder(folder: Path) -> None:
    """Put a folder's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path | str, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file, no link followed at its last step.

    Raises:
        MissingShard: there is no such file.
        DamagedShard: it is a link, a folder or a device.
    """
    name = Path(path).name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except FileNotFoundError:
        raise MissingShard(f"{name}: no such file in the spool") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise DamagedShard(f"{name}: expected a file, found a link or a device") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedShard(f"{name}: expected a file, found something else")
    return descriptor


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """`open_regular` for the time of a `with` block."""
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def link_open_file(source: int, path: Path, second: Path) -> bool:
    """Give the open file at `path` a second name; False if the file systems differ or know no links.

    Raises:
        DamagedShard: another file lies at `path` now.
    """
    try:
        os.link(path, second, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    if os.path.samestat(os.fstat(source), second.stat(follow_symlinks=False)):
        return True
    second.unlink()
    raise DamagedShard(f"{path.name}: replaced while it was being read")


@contextlib.contextmanager
def open_shared(path: Path) -> Iterator[int]:
    """A small file that processes of different users of one group share, made if need be; yields its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, SHARED_MODE)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, SHARED_MODE)  # whatever the umask
        yield descriptor
    finally:
        os.close(descriptor)


@functools.cache
def umask() -> int:
    """This process's umask, without the moment in which asking the system for it changes it for all threads."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077
