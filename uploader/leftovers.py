"""What a run leaves in its store that is none of it: shards that lost to another of their batch, uploads half written.

Invariant: nothing goes that the ledger names or that somebody living may still be writing.
"""

from __future__ import annotations

from collections.abc import Mapping

import redis

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import MissingShard, StoreRefused
from hiddenq.contracts.messages import LedgerEntry
from hiddenq.delivery import upload_is_live
from hiddenq.storage import ObjectStore


def remove_losers(store: ObjectStore, entries: Mapping[str, LedgerEntry]) -> int:
    """Remove shards that lost to another of their batch; returns how many.

    Shards of batches that are not committed are left: they may be on their way into the ledger.

    Raises:
        MissingShard: a committed shard is not there, or not of its size.
    """
    sizes = {entry.key: entry.num_bytes for entry in entries.values()}
    losers: list[tuple[str, str]] = []
    for info in store.list(names.STATES_PREFIX):
        parsed = names.parse_shard_name(info.key)
        if info.key in sizes:
            if info.num_bytes != sizes[info.key]:
                raise MissingShard(f"{info.key}: committed with {sizes[info.key]} bytes, found {info.num_bytes}")
            del sizes[info.key]
        elif parsed and parsed[0] in entries:
            losers.append((info.key, entries[parsed[0]].execution))
    if sizes:
        raise MissingShard(
            f"{store.uri}: committed shards are gone from the store ({len(sizes):,}, first {min(sizes)}); "
            "`hiddenq verify` lists them"
        )
    for key, committed in losers:  # only now that each winner was seen
        store.delete(key)
        telemetry.logger().info("twin_removed", key=key, committed=committed)
    return len(losers)


def remove_unfinished(client: redis.Redis, run: str, store: ObjectStore) -> int:
    """Remove what killed uploaders left half written, however young: of every shard whose upload job is not live.

    Who still writes to one all the same has lost its claim, and is refused at its end. Returns how many.
    """

    def is_abandoned(file_name: str) -> bool:
        parsed = names.parse_shard_name(file_name)
        return parsed is not None and not upload_is_live(client, run, *parsed)

    try:
        num_removed = store.abort_unfinished(is_abandoned, shard_age_seconds=0.0)
    except StoreRefused as error:  # a store that lets nobody list them; what is committed is whole
        telemetry.logger().warning("unfinished_uploads_left", run=run, error=str(error))
        return 0
    if num_removed:
        telemetry.logger().info("unfinished_uploads_removed", run=run, num=num_removed)
    return num_removed
