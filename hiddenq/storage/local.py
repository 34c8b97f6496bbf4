"""A local folder as a store: the final place, so everything is fsynced before it counts.

Invariant: an object appears under its key by one rename of a file whose bytes are on disk, and the rename is on disk
before `put_*` returns. A shard whose spool lies on the same file system is read once to prove its checksum and then
linked, not copied; what was linked is shown to be the very file that was read. Once anchored, the folder is away while
it is not the one it was (anchor.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import ObjectMissing, ObjectTooLarge, StoreAway, StoreRefused
from hiddenq.storage.anchor import Anchor
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.files import (
    TEMPORARY_PREFIX,
    ensure_folder,
    fsync_folder,
    link_open_file,
    must_be_utf8,
    older_than,
    opened,
    temporary_beside,
    temporary_token,
    umask,
)
from hiddenq.storage.local_file import info_of, set_checksum, verify, walk_folders
from hiddenq.storage.store import UNFINISHED_SECONDS, ObjectInfo, StoreCapabilities


class LocalStore:
    """Objects are files below one folder; names that start with a dot are not objects."""

    def __init__(self, folder: Path, *, limit: BandwidthLimit | None = None) -> None:
        self.folder = Path(os.path.abspath(folder.expanduser()))
        must_be_utf8("folder", str(self.folder))
        self.uri = str(self.folder)
        self._limit = limit or BandwidthLimit(None)
        self._anchor = Anchor(self.folder)

    def patient(self, seconds: float) -> LocalStore:
        other = LocalStore(self.folder, limit=self._limit)
        other._anchor = self._anchor.patient(seconds)
        return other

    def anchor(self, key: str) -> None:
        with self._errors(key):
            self._anchor.drop(key)

    def put_file(self, key: str, path: Path, *, checksum: str, num_bytes: int) -> ObjectInfo:
        target = self._path(key)
        with self._errors(key), self._in_place(), opened(path) as source:
            ensure_folder(target.parent)
            temporary = temporary_beside(target)
            try:
                if link_open_file(source, path, temporary):
                    verify(source, path.name, checksum, num_bytes)
                    set_checksum(source, checksum)
                    with contextlib.suppress(PermissionError):
                        os.fchmod(source, 0o666 & ~umask())  # as a copy would have it, whatever the spool's mode
                    os.fsync(source)
                else:
                    self._check_fits(key, num_bytes)
                    with temporary.open("xb", buffering=0) as copy:
                        verify(source, path.name, checksum, num_bytes, copy, self._limit)
                        set_checksum(copy.fileno(), checksum)
                        os.fsync(copy.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(target.parent)
        return ObjectInfo(key=key, num_bytes=num_bytes, checksum=checksum, modified=time.time())

    def put_bytes(self, key: str, data: bytes) -> None:
        target = self._path(key)
        with self._errors(key), self._in_place():
            ensure_folder(target.parent)
            temporary = temporary_beside(target)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_folder(target.parent)

    def get_bytes(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        def read() -> bytes:
            with self._path(key).open("rb") as file:
                file.seek(begin)
                return file.read() if end is None else file.read(max(0, end - begin))

        with self._errors(key):
            return self._anchor.reading(read)

    def open_local(self, key: str) -> Path | None:
        return self._path(key)

    def stat(self, key: str) -> ObjectInfo | None:
        with self._errors(key):
            try:
                return self._anchor.reading(lambda: info_of(key, self._path(key)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def checksum(self, key: str) -> str:
        with self._errors(key):
            return self._anchor.reading(lambda: crc.of_file(self._path(key)))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        top = self._path(prefix.rpartition("/")[0]) if "/" in prefix else self.folder
        with self._errors(prefix), self._in_place():
            keys = sorted(key for key in self._walk(top) if key.startswith(prefix))
        for key in keys:
            if info := self.stat(key):
                yield info

    def delete(self, key: str) -> None:
        with self._errors(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._anchor.reading(self._path(key).unlink)

    def probe(self) -> StoreCapabilities:
        with self._errors(""), self._in_place():
            ensure_folder(self.folder)
            path = temporary_beside(self.folder / "probe")
            try:
                path.write_bytes(b"hiddenq")
                if path.read_bytes() != b"hiddenq":
                    raise StoreRefused(f"{self.uri}: a file read back differs from what was written; use another disk")
            finally:
                path.unlink(missing_ok=True)
        return StoreCapabilities(confirm="file", detail="local folder: read once, linked or copied, fsynced")

    def check_readable(self) -> None:
        try:
            os.listdir(self.folder)
        except FileNotFoundError:
            raise StoreRefused(f"{self.uri}: no such folder") from None
        except OSError as error:
            raise StoreRefused(f"{self.uri}: can't be read: {error.strerror}") from error

    def abort_unfinished(self, is_abandoned: Callable[[str], bool], *, shard_age_seconds: float | None = None) -> int:
        num_removed = 0
        shard_age = UNFINISHED_SECONDS if shard_age_seconds is None else shard_age_seconds
        with self._errors(""):
            for folder, _, found in walk_folders(self.folder):
                for name in found:
                    if temporary_token(name) is None:
                        continue
                    path, target = Path(folder, name), name.removeprefix(TEMPORARY_PREFIX).partition("-")[2]
                    is_shard = names.parse_shard_name(target) is not None
                    is_old = older_than(path, shard_age if is_shard else UNFINISHED_SECONDS)
                    if is_old and (not is_shard or is_abandoned(target)):
                        path.unlink(missing_ok=True)
                        num_removed += 1
        return num_removed

    def _path(self, key: str) -> Path:
        if key.startswith("/") or ".." in key.split("/"):
            raise ObjectMissing(f"{self.uri}: {key!r} is no key: a key stays below the location")
        return self.folder / key

    def _check_fits(self, key: str, num_bytes: int) -> None:
        """Raise `ObjectTooLarge` if the whole disk, empty, would be too small: no waiting mends that."""
        total = shutil.disk_usage(self.folder).total
        if num_bytes > total:
            raise ObjectTooLarge(
                f"{self.uri}/{key}: {num_bytes} bytes do not fit on a disk of {total}; use a larger one, or lower "
                "--max-shard-bytes"
            )

    def _walk(self, top: Path) -> Iterator[str]:
        for folder, _, found in walk_folders(top):
            inside = os.path.relpath(folder, self.folder)
            for name in found:
                if not name.startswith("."):
                    yield name if inside == "." else f"{inside}/{name}"

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """What is done inside counts only if the folder is the location before it and after it."""
        self._anchor.check()
        try:
            yield
        finally:
            self._anchor.check(wait=False)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        where = f"{self.uri}/{key}" if key else self.uri
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectMissing(f"{where}: no such object") from error
        except (NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"{where}: not an object: {error.strerror}") from error
        except FileExistsError as error:
            raise StoreRefused(f"{error.filename or where}: expected a folder, found a file") from error
        except PermissionError as error:
            raise StoreRefused(
                f"{error.filename or where}: {error.strerror}; give user {os.geteuid()} access to {self.uri}"
            ) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise StoreRefused(f"{where}: the file system is read-only; mount it writable") from error
            if error.errno == errno.EFBIG:
                raise ObjectTooLarge(
                    f"{where}: the file system takes no file of this size (or `ulimit -f` does not); lower "
                    "--max-shard-bytes"
                ) from error
            raise StoreAway(f"{where}: {error.strerror or error}; waiting until the disk can be used") from error
