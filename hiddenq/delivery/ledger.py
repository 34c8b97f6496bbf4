"""The ledger: which execution's shard is the batch's.

Invariant: an entry is written once, by whoever comes first, and never changed; the totals change in the same step. It
can be rebuilt from the store alone, by adopting the shards found there and forgetting those that are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import redis

from hiddenq.contracts import names
from hiddenq.contracts.messages import LedgerEntry
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.scripts import Scripts

CHUNK = 500


@dataclass(frozen=True)
class LedgerTotals:
    """Sums over all committed batches."""

    num_batches: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


class Ledger:
    """The ledger of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client = client
        self._run = run
        self._key = f"hiddenq:run:{run}:ledger"

    def get(self, batch_id: str) -> LedgerEntry | None:
        """The entry of a batch; None if it is not committed."""
        with away_errors():
            found = self._client.hget(self._key, batch_id)
        return LedgerEntry.parse(raw(found)) if found else None

    def entries(self) -> dict[str, LedgerEntry]:
        """All entries, by batch id."""
        with away_errors():
            found = self._client.hgetall(self._key)
        return {text(batch_id): LedgerEntry.parse(raw(entry)) for batch_id, entry in sorted(found.items())}

    def totals(self) -> LedgerTotals:
        """Sums over all entries."""
        with away_errors():
            found = self._client.hgetall(f"hiddenq:run:{self._run}:totals")
        return LedgerTotals(**{text(name): int(value) for name, value in found.items()})

    def adopt(self, entries: Iterable[LedgerEntry]) -> int:
        """Enter shards found in the store, their checksums confirmed; returns how many batches are new."""
        scripts, adopted, remaining = Scripts(self._client), 0, iter(entries)
        while chunk := list(itertools.islice(remaining, CHUNK)):
            found = [
                (
                    entry.batch_id,
                    names.extract_job_id(self._run, entry.batch_id),
                    entry.to_json(),
                    entry.num_samples,
                    entry.num_tokens,
                    entry.num_bytes,
                )
                for entry in chunk
            ]
            with away_errors():
                adopted += int(scripts.run("adopt", run=self._run, entries=found))
        return adopted

    def forget(self, entries: Iterable[LedgerEntry]) -> int:
        """Remove entries whose shards are gone from the store, so their batches are made again; returns how many."""
        scripts, forgotten, remaining = Scripts(self._client), 0, iter(entries)
        while chunk := list(itertools.islice(remaining, CHUNK)):
            found = [
                (entry.batch_id, entry.to_json(), entry.num_samples, entry.num_tokens, entry.num_bytes)
                for entry in chunk
            ]
            with away_errors():
                forgotten += int(scripts.run("uncommit", run=self._run, entries=found))
        return forgotten
