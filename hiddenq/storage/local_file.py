"""One object as a file: read while its checksum is proved, perhaps into a copy, and what the folder says of it.

Invariant: bytes are called right only if every one of them was read and their number and checksum are those recorded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import DamagedShard
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.store import ObjectInfo

CHUNK_BYTES = 8 << 20
CHECKSUM_ATTRIBUTE = "user.hiddenq.checksum"
"""Extended attribute that keeps a shard's checksum beside it, where the file system has such things."""


def verify(
    source: int,
    name: str,
    checksum: str,
    num_bytes: int,
    copy: FileIO | None = None,
    limit: BandwidthLimit | None = None,
) -> None:
    """Read the whole file once, perhaps into a copy; raise `DamagedShard` unless it is what was recorded."""
    found = crc.Crc64Nvme()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    num_read = 0
    while size := os.preadv(source, [buffer], num_read):
        found.update(buffer[:size])
        if copy and limit:
            limit.take(size)
            _write_all(copy, buffer[:size])
        num_read += size
        if num_read > num_bytes:
            break
    if num_read != num_bytes:
        more = "more" if num_read > num_bytes else str(num_read)
        raise DamagedShard(f"{name}: expected {num_bytes} bytes, found {more}")
    if found.value != checksum:
        raise DamagedShard(f"{name}: expected checksum {checksum}, found {found.value}")


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def set_checksum(descriptor: int, checksum: str) -> None:
    with contextlib.suppress(OSError):
        os.setxattr(descriptor, CHECKSUM_ATTRIBUTE, checksum.encode())


def info_of(key: str, path: Path) -> ObjectInfo:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        recorded = os.getxattr(path, CHECKSUM_ATTRIBUTE).decode()
    except (OSError, UnicodeDecodeError):
        recorded = None
    return ObjectInfo(key=key, num_bytes=status.st_size, checksum=recorded, modified=status.st_mtime)


def walk_folders(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` without folders that start with a dot (a run's own state lies there)."""
    for folder, folders, found in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield folder, folders, found
