"""Byte ranges of a run's objects, from a bucket or from local files.

Invariant: what is held belongs to the process that opened it (a fork opens anew), is bounded in number, and is closed
when nobody reads from it any more. A map is made only where losing the file under it is not to be feared.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from hiddenq.contracts.errors import ObjectMissing, StoreRefused
from hiddenq.reader.buffers import BufferPool
from hiddenq.reader.patience import patiently
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from hiddenq.storage.files import file_system

LocalFiles = Literal["auto", "read", "map"]
MAX_OPEN_FILES = 256
LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})
"""Kinds of file systems whose files stay readable while they are mapped."""


class ProcessFiles:
    """The store and the open files of one process."""

    def __init__(self, local_files: LocalFiles, wait_seconds: float) -> None:
        self._local_files = local_files
        self._wait_seconds = wait_seconds
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._store: ObjectStore | None = None
        self._files: OrderedDict[str, _ReadFile] = OrderedDict()
        self._kinds: dict[Path, str] = {}
        self._buffers = BufferPool()

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
            StoreAway: the store gave no answer for `wait_seconds`.
        """
        if file := self._file(store, key):
            return file.read(begin, num_bytes)
        data = patiently(self._wait_seconds)(store.get_bytes, key, begin, begin + num_bytes)
        buffer = self._buffers.take(len(data))
        buffer.numpy()[:] = np.frombuffer(data, np.uint8)
        return buffer

    def fetch(self, store: ObjectStore, key: str, begin: int, num_bytes: int) -> None:
        """Have the kernel read a range of a file into its cache; an error shows when the range is read."""
        with contextlib.suppress(ObjectMissing, StoreRefused):
            if file := self._file(store, key):
                file.fetch(begin, num_bytes)

    def are_local(self, store: ObjectStore) -> bool:
        """Whether the store's files lie on a local disk, so that the kernel can read them ahead."""
        folder = store.open_local("")
        return folder is not None and (
            self._local_files == "map" or (self._local_files == "auto" and self._lasts(folder))
        )

    def _lasts(self, folder: Path) -> bool:
        """Whether a folder's files stay readable while they are mapped."""
        if folder not in self._kinds:
            self._kinds[folder] = file_system(folder)
        return self._kinds[folder] in LOCAL_DISKS

    def _file(self, store: ObjectStore, key: str) -> _ReadFile | None:
        """An object's file, opened if it is not; None if the store has no files."""
        with self._lock:
            file = self._files.pop(key, None)
            if file is None:
                path = store.open_local(key)
                if path is None:
                    return None
                file = self._open(path)
            self._files[key] = file
            while len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def _open(self, path: Path) -> _ReadFile:
        if self._local_files == "map":
            return _MappedFile(path, self._buffers)
        if self._local_files == "auto" and self._lasts(path.parent):
            return _KeptFile(path, self._buffers)
        return _ReadFile(path, self._buffers)


class _ReadFile:
    """A file that is read into memory of ours by system calls."""

    def __init__(self, path: Path, buffers: BufferPool) -> None:
        self._path = path
        self._buffers = buffers
        self._descriptor = _open(path)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, begin: int, num_bytes: int) -> torch.Tensor:
        size = os.fstat(self._descriptor).st_size
        buffer = self._buffers.take(max(0, min(num_bytes, size - begin)))
        view, done = memoryview(buffer.numpy().data), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], begin + done)
            if not count:
                break
            done += count
        return buffer[:done]

    def fetch(self, begin: int, num_bytes: int) -> None:
        """Have the kernel read a range, unless its first and last byte are in the page cache: asking costs nothing."""
        with contextlib.suppress(OSError):
            ends = (begin, begin + num_bytes - 1)
            if all(os.preadv(self._descriptor, [bytearray(1)], at, os.RWF_NOWAIT) for at in ends):
                return
        os.posix_fadvise(self._descriptor, begin, num_bytes, os.POSIX_FADV_WILLNEED)

    def _mapped(self) -> torch.Tensor:
        """All of the file, mapped privately; a view keeps the map alive.

        Raises:
            StoreRefused: it can't be mapped.
        """
        size = os.fstat(self._descriptor).st_size
        try:
            with torch.inference_mode(False):  # it is kept, and may serve training later
                return torch.from_file(str(self._path), shared=False, size=size, dtype=torch.uint8)
        except RuntimeError as error:  # some file systems have no maps, and an empty file has none
            raise StoreRefused(f"{self._path}: can't be mapped; open the run with local_files='read'") from error


class _KeptFile(_ReadFile):
    """A file that is mapped when it is read again: a map makes copying faster, but only after it was paid for."""

    def __init__(self, path: Path, buffers: BufferPool) -> None:
        super().__init__(path, buffers)
        self._num_reads = 0
        self._map: torch.Tensor | None = None

    def read(self, begin: int, num_bytes: int) -> torch.Tensor:
        self._num_reads += 1
        if self._num_reads == 2:
            with contextlib.suppress(StoreRefused):
                self._map = self._mapped()
        if self._map is None or begin + num_bytes > len(self._map):
            return super().read(begin, num_bytes)
        return self._buffers.take(num_bytes).copy_(self._map[begin : begin + num_bytes])


class _MappedFile(_ReadFile):
    """A file whose ranges are views of its map."""

    def __init__(self, path: Path, buffers: BufferPool) -> None:
        super().__init__(path, buffers)
        self._map = self._mapped()

    def read(self, begin: int, num_bytes: int) -> torch.Tensor:
        return self._map[min(begin, len(self._map)) : begin + num_bytes]


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ObjectMissing(f"{path}: no such object; run `hiddenq verify`") from error
    except OSError as error:
        raise StoreRefused(f"{path}: {error.strerror}; run `hiddenq verify`") from error
