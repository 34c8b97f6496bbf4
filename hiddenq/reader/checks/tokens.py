"""The token parts and the batch list, each read once: for the plan's digest and for the rows of every batch.

Invariant: the digest and the rows come from the same bytes. A part is some 40 MB, so whole parts are read, one after
the other, and a part is let go when its batches were checked.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, ObjectMissing
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.contracts.run import RunConfig
from hiddenq.reader.checks.report import Findings
from hiddenq.reader.patience import patiently
from hiddenq.storage import ObjectInfo, ObjectStore
from hiddenq.storage.runfiles import load_batches

MAX_FRAME_BYTES = 1 << 20
"""What a part may take beside its tokens and rows."""
_NUMBERS = itertools.count()


class HeldObject:
    """One object that was read whole, as a store that has no other."""

    def __init__(self, store: ObjectStore, key: str, limit_bytes: int | None = None) -> None:
        """Read it.

        Raises:
            ObjectMissing: there is no such object.
            DamagedShard: it is larger than it can be.
        """
        info = store.stat(key)
        if info is None:
            raise ObjectMissing(f"{key}: no such object")
        if limit_bytes is not None and info.num_bytes > limit_bytes:
            raise DamagedShard(f"{key}: {info.num_bytes} bytes; one of this run has {limit_bytes} at most")
        self.data = patiently()(store.get_bytes, key)
        self.uri = f"{store.uri}#{next(_NUMBERS)}"  # its own, so that nobody takes an earlier object's rows for its
        self._key = key

    def stat(self, key: str) -> ObjectInfo | None:
        return ObjectInfo(key=key, num_bytes=len(self.data)) if key == self._key else None

    def get_bytes(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        assert key == self._key
        return self.data[begin:end]

    @property
    def as_store(self) -> ObjectStore:
        """For those who only read."""
        return cast("ObjectStore", self)


class Plan:
    """The batches of a run and their tokens."""

    def __init__(self, store: ObjectStore, config: RunConfig, findings: Findings) -> None:
        """Read the batch list.

        Raises:
            BadMessage, ObjectMissing: it can't be read.
        """
        self._store, self._config, self._findings = store, config, findings
        self._list = HeldObject(store, names.BATCHES)
        self.batches = load_batches(self._list.as_store)

    def parts(self) -> Iterator[tuple[Sequence[BatchPlan], ObjectStore | None]]:
        """The batches of each part in order, with the part as a store (None: it can't be read, which is a finding).

        When all have been taken, the plan's digest was compared.
        """
        by_part: dict[int, list[BatchPlan]] = {}
        for batch in self.batches:
            by_part.setdefault(batch.token_part, []).append(batch)
        limit = 5 * self._config.num_tokens + 16 * self._config.num_samples + MAX_FRAME_BYTES
        digest, whole = hashlib.blake2b(digest_size=16), True
        for part in range(min(self._config.num_token_parts, len(self.batches))):  # each part holds a batch
            key = names.token_part_key(part)
            held = None
            try:
                held = HeldObject(self._store, key, limit)
                digest.update(held.data)
            except (ObjectMissing, DamagedShard) as error:
                whole = False
                self._findings.add("plan", key, str(error).removeprefix(f"{key}: "))
            yield by_part.pop(part, []), held.as_store if held else None
        for part, batches in by_part.items():
            self._findings.add("plan", names.BATCHES, f"token part {part} of {self._config.num_token_parts}")
            yield batches, None
        digest.update(self._list.data)
        if whole and digest.hexdigest() != self._config.plan_digest:
            text = (
                f"digest of token parts and batch list: expected {self._config.plan_digest} by run.json, "
                f"found {digest.hexdigest()}"
            )
            self._findings.add("plan", names.TOKENS_PREFIX, text)
