"""The spool: a local folder of finished shards that wait for upload, shared by all processes of a host.

Invariant: the files and reservations in it never hold more bytes than the high mark, because bytes are reserved on disk
under one lock before a shard is made. Names carry their execution, so no one replaces another's file, and a file
without the temporary prefix is whole: it got its name by one rename. A name from a message is opened inside the folder,
bare, without following links. Nothing here is fsynced unless asked: what a power cut tears fails its checksum.

    spool_id               a UUID, made once: names the spool's queue and heartbeat
    .lock  .paused         one lock for reservations; there while workers wait for the low mark
    .tmp-<execution>-NAME  a reservation, perhaps half written
    .holder-<token>        what each process in it shows the others (spool_presence.py)
    NAME                   a finished shard
    quarantine/            damaged shards with the reason beside each, outside the marks, with a cap of its own
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, MissingShard, SpoolGone, UsageError
from hiddenq.storage.files import TEMPORARY_PREFIX, open_regular, open_shared, regular_files, temporary_token
from hiddenq.storage.quarantine import Quarantine
from hiddenq.storage.spool_file import SpoolEntry, SpoolFile, SpoolUsage, allocate
from hiddenq.storage.spool_folder import FILE_MODE, check_id, open_folder, spool_id, writing
from hiddenq.storage.spool_room import SpoolRoom

SHARDS_IN_SPOOL = 8
"""A spool should hold so many of the largest shards: each GPU's ring and what the uploaders have in hand."""
_LOCK = ".lock"


class Spool:
    """A spool folder, as one process sees it."""

    def __init__(self, folder: Path, spool_id: str, high_bytes: int | None, low_bytes: int | None) -> None:
        self.folder = folder
        self.spool_id = spool_id
        self._room = SpoolRoom(folder, spool_id, high_bytes, low_bytes)
        self._group = folder.stat().st_gid
        self._quarantine = Quarantine(folder / "quarantine")
        self._known: SpoolUsage | None = None

    @classmethod
    def open(
        cls, folder: Path, *, high_bytes: int | None = None, low_bytes: int | None = None, create: bool = True
    ) -> Spool:
        """Open a spool, made if need be.

        The high mark is `high_bytes`, and never more than 0.8 of what the spool holds plus what the disk has free (so
        by default that); the low mark is `low_bytes`, by default 0.75 of the high mark.

        Raises:
            UsageError: no such folder, not one we may write, or marks that can't be.
            SpoolAway: its disk can't be written now.
        """
        if high_bytes is not None and high_bytes <= 0:
            raise UsageError(f"--spool-bytes {high_bytes}: expected a positive number of bytes")
        if low_bytes is not None and not 0 <= low_bytes <= (high_bytes if high_bytes is not None else low_bytes):
            raise UsageError(f"low mark {low_bytes}: expected 0 to the high mark ({high_bytes})")
        folder = open_folder(folder, create=create)
        spool = cls(folder, spool_id(folder, create=create), high_bytes, low_bytes)
        spool._check_readable()
        return spool

    def reserve(self, file_name: str, num_bytes: int) -> SpoolFile | None:
        """Reserve a shard's bytes on disk; None while the spool is over its marks or the disk is full.

        Once over the high mark it stays None for all processes until the spool has fallen to the low mark.

        Raises:
            SpoolGone: the folder is not the spool any more.
            SpoolAway: its disk is read-only or full.
            UsageError: the shard is larger than the spool may ever be.
        """
        execution = _parse(file_name)[1]
        check_id(self.folder, self.spool_id)
        with writing(self.folder), self._locked():
            if num_bytes > (limit := self._room.limit):
                raise UsageError(
                    f"--spool {self.folder}: a shard of {num_bytes} bytes does not fit below the high mark of {limit}; "
                    "raise --spool-bytes, use a larger disk, or lower --token-budget"
                )
            if not self._room.admits(num_bytes):
                return None
            file = self._create(f"{TEMPORARY_PREFIX}{execution}-{file_name}", file_name)
            os.ftruncate(file.fd, num_bytes)  # counted by every other process from here on
        try:
            allocate(file.fd, num_bytes)  # in memory this takes its time, which others need not wait for
        except OSError:
            file.discard()
            self._room.pause()
            return None
        return file

    def path(self, file_name: str) -> Path:
        """Where a finished shard lies.

        Raises:
            BadMessage: not a bare shard name.
        """
        _parse(file_name)
        return self.folder / file_name

    def open_shard(self, file_name: str) -> BinaryIO:
        """A finished shard's bytes.

        Raises:
            MissingShard: no such file.
            SpoolGone: the folder is not the spool any more.
            DamagedShard: a link or a device under that name.
            BadMessage: not a bare shard name.
        """
        try:
            return os.fdopen(open_regular(self.path(file_name)), "rb")
        except MissingShard:
            check_id(self.folder, self.spool_id)
            raise

    def delete(self, file_name: str) -> None:
        """Remove a finished shard; it is no error if it is not there."""
        self.path(file_name).unlink(missing_ok=True)

    def quarantine(self, file_name: str, reason: str) -> None:
        """Set a shard aside, with the reason beside it; the oldest ones make room below the cap.

        Raises:
            SpoolAway: the disk is read-only or full.
        """
        path = self.path(file_name)
        with writing(self.folder):
            self._quarantine.take(path, reason)

    def files(self) -> list[SpoolEntry]:
        """Finished shards, by name."""
        return sorted(
            (
                SpoolEntry(file_name=name, num_bytes=status.st_size, modified=status.st_mtime)
                for name, status in regular_files(self.folder)
                if names.parse_shard_name(name)
            ),
            key=lambda entry: entry.file_name,
        )

    def usage(self) -> SpoolUsage:
        """How full the spool is now.

        Raises:
            SpoolGone: the folder is not the spool any more.
        """
        self._known = self._room.usage(quarantine_bytes=self._quarantine.num_bytes)
        return self._known

    def known_usage(self) -> SpoolUsage:
        """How full it was when it could last be looked at: for reports, which are sent whatever becomes of the disk."""
        try:
            return self.usage()
        except (SpoolGone, OSError):
            if self._known is None:
                raise
            return self._known

    def sweep(self, is_dead: Callable[[str], bool], *, min_age_seconds: float = 0.0) -> list[str]:
        """Remove temporaries of at least that age whose execution is dead; returns their names."""
        removed = []
        for name, status in regular_files(self.folder):
            execution = temporary_token(name)
            old = time.time() - status.st_mtime >= min_age_seconds
            if execution is not None and old and is_dead(execution):
                (self.folder / name).unlink(missing_ok=True)
                removed.append(name)
        return removed

    def _create(self, temporary: str, file_name: str) -> SpoolFile:
        descriptor = os.open(
            self.folder / temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE
        )
        os.fchmod(descriptor, FILE_MODE)
        if os.fstat(descriptor).st_gid != self._group:
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, -1, self._group)
        return SpoolFile(self.folder, temporary, file_name, descriptor, self._locked)

    def _check_readable(self) -> None:
        for entry in self.files():
            path = self.folder / entry.file_name
            if os.access(path, os.R_OK):
                continue
            with contextlib.suppress(FileNotFoundError):  # uploaded meanwhile
                status = path.stat()
                raise UsageError(
                    f"--spool {self.folder}: user {os.geteuid()} may not read {entry.file_name} (owner "
                    f"{status.st_uid}, group {status.st_gid}, mode {status.st_mode & 0o777:o}); run the workers and "
                    "uploaders of a host as one user, or give the folder a group of both and its setgid bit"
                )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open_shared(self.folder / _LOCK) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


def _parse(file_name: str) -> tuple[str, str]:
    parsed = None if "/" in file_name else names.parse_shard_name(file_name)
    if parsed is None:
        raise BadMessage(f"{file_name!r}: expected a bare shard name such as 000123-9f3c2a71.safetensors")
    return parsed
