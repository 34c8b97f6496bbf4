"""Shards held against their recorded checksums before a sample of them is believed.

Invariant: of a shard that is not as recorded no byte is handed out, because its checksum is compared before its first
sample is read; each shard is checked once in a process, whichever of its threads comes first. A checksum is over a
whole shard, so this reads every byte of it once more (a store that proves its checksums is asked instead: one request).
"""

from __future__ import annotations

import os
import threading
from typing import Any

from hiddenq.contracts.errors import DamagedShard
from hiddenq.reader.patience import patiently
from hiddenq.reader.remedies import MEND_BY_RUN
from hiddenq.storage import ObjectStore


class ShardChecks:
    """What one process knows of the shards of a run."""

    def __init__(self, wait_seconds: float) -> None:
        self._wait_seconds = wait_seconds
        self._faults: dict[str, str] = {}
        """By key of each shard that was checked; an empty string if it is as recorded."""
        self._pid = os.getpid()
        self._locks: dict[str, threading.Lock] = {}

    def check(self, store: ObjectStore, key: str, recorded: str) -> None:
        """Check a shard unless that was done; without a recorded checksum by what the store says of it, if anything.

        Raises:
            DamagedShard: its bytes are not those that were recorded.
            ObjectMissing: there is no such object.
            StoreAway: the store gave no answer for `wait_seconds`.
        """
        if key not in self._faults:
            if self._pid != os.getpid():  # a lock may have been held when the process was forked
                self._pid, self._locks = os.getpid(), {}
            with self._locks.setdefault(key, threading.Lock()):
                if key not in self._faults:
                    self._faults[key] = patiently(self._wait_seconds)(_fault, store, key, recorded)
        if fault := self._faults[key]:
            raise DamagedShard(fault)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardChecks, (self._wait_seconds,)


def _fault(store: ObjectStore, key: str, recorded: str) -> str:
    info = None if recorded else store.stat(key)
    expected = recorded or (info.checksum if info else None)
    if expected is None or expected == (found := store.checksum(key)):
        return ""
    return f"{key}: damaged (checksum: expected {expected}, found {found}); {MEND_BY_RUN}"
