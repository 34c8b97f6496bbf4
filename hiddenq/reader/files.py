"""Byte ranges of a run's objects, from a bucket or from local files.

Invariant: what is held belongs to the process that opened it (a fork opens anew), is bounded in number, and is closed
when nobody reads from it any more. A map is made only where losing the file under it is not to be feared.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import torch

from hiddenq.contracts.errors import ObjectMissing, StoreRefused
from hiddenq.storage import ObjectStore, StoreSettings, open_store

LocalFiles = Literal["auto", "read", "map"]
MAX_OPEN_FILES = 64
LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})
"""Kinds of file systems whose files stay readable while they are mapped."""


class ProcessFiles:
    """The store and the open files of one process."""

    def __init__(self, local_files: LocalFiles) -> None:
        self._local_files = local_files
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._store: ObjectStore | None = None
        self._files: OrderedDict[str, _ReadFile | _MappedFile] = OrderedDict()

    def store(self, uri: str, settings: StoreSettings) -> ObjectStore:
        """This process's store."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._store is None:
                self._store = open_store(uri, settings)
            return self._store

    def read(self, store: ObjectStore, key: str, begin: int, num_bytes: int) -> torch.Tensor:
        """Up to `num_bytes` bytes from `begin` on, uint8; fewer if the object ends before.

        Raises:
            ObjectMissing: there is no such object.
        """
        path = store.open_local(key)
        if path is None:
            data = store.get_bytes(key, begin, begin + num_bytes)
            return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        with self._lock:
            file = self._files.pop(key, None) or self._open(path)
            self._files[key] = file
            while len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)
        return file.read(begin, num_bytes)

    def _open(self, path: Path) -> _ReadFile | _MappedFile:
        if self._local_files == "map":
            return _MappedFile(path, copies=False)
        if self._local_files == "auto" and file_system(path) in LOCAL_DISKS:
            with contextlib.suppress(StoreRefused):
                return _MappedFile(path, copies=True)
        return _ReadFile(path)


def file_system(path: Path) -> str:
    """Kind of the file system that a path lies on, `""` if it can't be told."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    for line in mounts:
        _, folder, kind, *_ = line.split(" ")
        folder = folder.encode().decode("unicode_escape")
        if len(folder) > longest and path.is_relative_to(folder):
            found, longest = kind, len(folder)
    return found


class _ReadFile:
    """A file that is read into new memory by system calls."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = _open(path)

    def read(self, begin: int, num_bytes: int) -> torch.Tensor:
        size = os.fstat(self._descriptor).st_size
        buffer = torch.empty(max(0, min(num_bytes, size - begin)), dtype=torch.uint8)
        view, done = memoryview(buffer.numpy().data), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], begin + done)
            if not count:
                break
            done += count
        return buffer[:done]

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class _MappedFile:
    """A file mapped into memory, privately; a view keeps the map alive.

    Raises:
        StoreRefused: it can't be mapped.
    """

    def __init__(self, path: Path, *, copies: bool) -> None:
        descriptor = _open(path)
        try:
            size = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        finally:
            os.close(descriptor)
        try:
            self._map = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except RuntimeError as error:  # some file systems have no maps, and an empty file has none
            raise StoreRefused(f"{path}: can't be mapped; open the run with local_files='read'") from error
        self._copies = copies

    def read(self, begin: int, num_bytes: int) -> torch.Tensor:
        view = self._map[min(begin, len(self._map)) : begin + num_bytes]
        return view.clone() if self._copies else view


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ObjectMissing(f"{path}: no such object; run `hiddenq verify`") from error
    except OSError as error:
        raise StoreRefused(f"{path}: {error.strerror}; run `hiddenq verify`") from error
