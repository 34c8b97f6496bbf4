"""An object read once from its first byte to its last.

Invariant: the checksum is over just what was handed out, so after the last byte it is the object's.
"""

from __future__ import annotations

from hiddenq.contracts.checksum import Crc64Nvme
from hiddenq.contracts.errors import DamagedShard
from hiddenq.reader.patience import patiently
from hiddenq.storage import ObjectInfo, ObjectStore


class ObjectBytes:
    """The bytes of an object in order, each asked for once."""

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self.info = info
        self.position = 0
        self.crc = Crc64Nvme()
        self._store = store

    @property
    def left(self) -> int:
        """Bytes not handed out yet."""
        return self.info.num_bytes - self.position

    def take(self, num_bytes: int) -> memoryview:
        """The next bytes, as many as asked for.

        Raises:
            DamagedShard: the object ends before.
        """
        end = self.position + num_bytes
        data = patiently()(self._store.get_bytes, self.info.key, self.position, end) if num_bytes else b""
        if len(data) != num_bytes:
            have = self.position + len(data)
            raise DamagedShard(
                f"{self.info.key}: ends after {have} bytes; expected {self.position + num_bytes} or more"
            )
        self.position += num_bytes
        self.crc.update(data)
        return memoryview(data)
