"""The interface of an object store.

Invariant: an object is there whole, with the bytes it was announced with, or it is not there. A shard's key holds its
execution, so no key is written by two, and a store needs no conditional writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

UNFINISHED_SECONDS = 600.0
"""What began less than so long ago is not swept, unless it is known to have ended."""


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """What a store says about an object."""

    key: str
    """Relative to the location."""
    num_bytes: int
    checksum: str | None = None
    """`crc64nvme:…` as the store or the object's metadata has it; None if neither does (or a listing leaves it out)."""
    modified: float = 0.0
    """Unix time by the store's clock."""


@dataclass(frozen=True, kw_only=True)
class StoreCapabilities:
    """What a probe showed."""

    confirm: Literal["store", "read_back", "file"]
    """How an upload is proved: the store refuses damage and says its checksum; the object is read back; or the file
    is read once and linked or copied."""
    detail: str
    """One line for the log."""


class StoreObserver:
    """Hears what a store does besides answering; this one listens to nothing."""

    def retried(self, error: str) -> None:
        """A request is tried again after an error of that code."""

    def confirmed(self, seconds: float) -> None:
        """An object was shown to be what was sent, in so many seconds."""

    def abort_failed(self, key: str) -> None:
        """A multipart upload could not be aborted; its parts are billed until it is."""


class ObjectStore(Protocol):
    """One location in a store; keys are relative to it. Safe to use from several threads, never across a fork."""

    uri: str
    """Canonical and absolute."""

    def patient(self, seconds: float) -> ObjectStore:
        """The same location, for work that is lost if it stops: a store that is away is asked again for so long.

        Of a folder that is so once it has an anchor and is not there; a disk that is full, say, is told of at once.
        """
        ...

    def anchor(self, key: str) -> None:
        """From now on, while this object does not lie there, the location as a whole is away (unmounted, say).

        Only where that can't be told otherwise: a store that is asked over a network answers for itself.

        Raises:
            StoreAway: it does not lie there.
        """
        ...

    def put_file(self, key: str, path: Path, *, checksum: str, num_bytes: int) -> ObjectInfo:
        """Store a file and confirm that the store holds exactly those bytes.

        The file may be deleted afterwards, but not written to: a store on the same disk links it.

        Raises:
            DamagedShard: the file is not of that size and checksum; nothing is left under the key.
            MissingShard: there is no such file.
            StoreAway: the store can't be used for now.
            ObjectTooLarge: the store takes no object of that size.
            StoreRefused: the store said no.
        """
        ...

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object, replacing what is there; whole or not at all."""
        ...

    def get_bytes(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` (exclusive; None for the end) of an object.

        Raises:
            ObjectMissing: there is no such object.
        """
        ...

    def open_local(self, key: str) -> Path | None:
        """A path of the object that can be mapped into memory; None where there is no such thing."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """What the store says about an object; None if it is not there."""
        ...

    def checksum(self, key: str) -> str:
        """`crc64nvme:…` over the object as it lies there: the store's own proof, or computed by reading it.

        Raises:
            ObjectMissing: there is no such object.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in the order of their keys (bytewise)."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; it is no error if it is not there."""
        ...

    def probe(self) -> StoreCapabilities:
        """Write, read and delete a small object; find out what the store can do.

        Raises:
            StoreRefused: it can't be used, with the reason and what to do.
        """
        ...

    def check_readable(self) -> None:
        """Raise `StoreRefused` unless the location exists and may be read."""
        ...

    def abort_unfinished(self, is_abandoned: Callable[[str], bool], *, shard_age_seconds: float | None = None) -> int:
        """Remove what interrupted uploads left; returns how many.

        `is_abandoned` is asked with a shard's file name, and only for uploads that began at least `shard_age_seconds`
        ago (10 minutes by default); what is no shard's goes after 10 minutes.
        """
        ...
