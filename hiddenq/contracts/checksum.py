"""CRC64-NVME: one checksum from the worker's memory to the object store.

Invariant: the value computed while a shard is written is the value that S3 computes over the stored object (same
polynomial, same base64 form), so no stage ever has to trust another's bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from awscrt import checksums

PREFIX = "crc64nvme:"
_CHUNK_BYTES = 8 << 20


class Crc64Nvme:
    """A running CRC64-NVME."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes (any C-contiguous buffer)."""
        self._value = checksums.crc64nvme(data, self._value)

    @property
    def value(self) -> str:
        """The checksum as `crc64nvme:` and S3's base64 form."""
        return PREFIX + self.base64

    @property
    def base64(self) -> str:
        """The checksum as S3's `ChecksumCRC64NVME`: base64 of the big-endian 8 bytes."""
        return base64.b64encode(self._value.to_bytes(8, "big")).decode()


def of_bytes(data: bytes | bytearray | memoryview) -> str:
    """Checksum of a buffer."""
    crc = Crc64Nvme()
    crc.update(data)
    return crc.value


def of_chunks(chunks: Iterable[bytes | memoryview]) -> str:
    """Checksum of a sequence of buffers."""
    crc = Crc64Nvme()
    for chunk in chunks:
        crc.update(chunk)
    return crc.value


def of_parts(parts: Iterable[tuple[str, int]]) -> str:
    """Checksum of a whole, from the checksum and the number of bytes of each of its parts, in order."""
    value = 0
    for checksum, num_bytes in parts:
        part = int.from_bytes(base64.b64decode(to_s3(checksum)), "big")
        value = checksums.combine_crc64nvme(value, part, num_bytes)
    return PREFIX + base64.b64encode(value.to_bytes(8, "big")).decode()


def of_file(path: Path) -> str:
    """Checksum of a file, read in 8 MiB pieces."""
    crc = Crc64Nvme()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            crc.update(buffer[:size])
    return crc.value


def to_s3(checksum: str) -> str:
    """`crc64nvme:…` → the value of S3's `ChecksumCRC64NVME`."""
    return checksum.removeprefix(PREFIX)


def from_s3(value: str) -> str:
    """S3's `ChecksumCRC64NVME` → `crc64nvme:…`."""
    return PREFIX + value
