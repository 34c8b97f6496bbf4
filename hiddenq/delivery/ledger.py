"""The ledger: which execution's shard is the batch's.

Invariant: an entry is written once, by whoever comes first, and never changed; the totals change in the same step. It
can be rebuilt from the store alone, by adopting the shards found there and forgetting those that are not. So an entry
that can't be read (someone changed it) is removed by whoever meets it: its batch counts as not done until a start finds
its shard in the store, or has it made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import redis

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, UnknownSchema
from hiddenq.contracts.messages import LedgerEntry
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.key_types import reading
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
        """The entry of a batch; None if it is not committed.

        Raises:
            UnknownSchema: it is of a newer hiddenq.
        """
        with away_errors():
            found = self._client.hget(self._key, batch_id)
        return None if found is None else self._readable({batch_id: raw(found)}).get(batch_id)

    def entries(self) -> dict[str, LedgerEntry]:
        """All entries, by batch id.

        Raises:
            UnknownSchema: one is of a newer hiddenq.
        """
        with away_errors():
            found = self._client.hgetall(self._key)
        return self._readable({text(batch_id): raw(entry) for batch_id, entry in sorted(found.items())})

    def totals(self) -> LedgerTotals:
        """Sums over all entries."""
        key = f"hiddenq:run:{self._run}:totals"
        with away_errors():
            found = self._client.hgetall(key)
        with reading(key):
            return LedgerTotals(**{text(name): int(value) for name, value in found.items()})

    def recount(self) -> None:
        """Make the totals the sums over all entries, whatever they were."""
        self._remove({})

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

    def _readable(self, found: Mapping[str, bytes]) -> dict[str, LedgerEntry]:
        """Entries as they were found, without those that are none: they are removed."""
        entries, unreadable = {}, {}
        for batch_id, raw_entry in found.items():
            try:
                entry = LedgerEntry.parse(raw_entry)
                if entry.batch_id != batch_id:
                    raise BadMessage(f"it is that of batch {entry.batch_id}")
            except UnknownSchema as error:
                raise UnknownSchema(f"{self._key} {batch_id}: {error}") from error
            except BadMessage as error:
                unreadable[batch_id] = raw_entry
                last = f"batch {batch_id}: {error}"
            else:
                entries[batch_id] = entry
        if unreadable:
            telemetry.logger().warning(
                "ledger_entries_unreadable",
                run=self._run,
                num_batches=len(unreadable),
                last=last,
                next="removed; a start looks for their shards in the store, or has them made again",
            )
            self._remove(unreadable)
        return entries

    def _remove(self, entries: Mapping[str, bytes]) -> None:
        with away_errors():
            Scripts(self._client).run("recount", *entries.values(), run=self._run, batch_ids=list(entries))
