"""Promises broken on purpose, one a run, in every process of it: each must be noticed, for its own reason.

Invariant: a sabotage takes out what keeps one promise and touches nothing else; if the code that keeps it moves, the
sabotage refuses to work, so a test can't pass because it broke nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hiddenq.contracts.messages import ShardReady
from hiddenq.delivery import scripts
from uploader.runs import OpenRun
from uploader.upload import ShardUpload


def _without(script: str, kept: str, broken: str = "") -> Callable[[], None]:
    """Replace a part of a script."""

    def apply() -> None:
        whole = scripts.source
        assert kept in whole(script), f"the promise is kept somewhere else now, not in {script}.lua"
        scripts.source = lambda name: whole(name).replace(kept, broken) if name == script else whole(name)  # type: ignore[assignment]

    return apply


def _give_no_leases() -> None:
    """A claim is held for ever. Three scripts give leases: for a claim, for each stage, and for one that got lost."""
    _without("claim", "redis.call('ZADD', 'hiddenq:leases', precise(now + a.lease_seconds), member)")()
    _without("enter", "redis.call('ZADD', 'hiddenq:leases', precise(now + a.lease_seconds), member)")()
    _without("reap", "redis.call('ZADD', 'hiddenq:leases', 'NX', precise(now + a.lease_seconds), member)")()


def _commit_without_waiting() -> None:
    """The store gets the shard some time after the commit, if the uploader still lives then."""

    def put(self: Any, run: OpenRun, key: str, shard: ShardReady) -> None:
        data = self._spool.path(shard.file_name).read_bytes()

        def later() -> None:
            time.sleep(5.0)
            run.store.put_bytes(key, data)

        threading.Thread(target=later, daemon=True).start()

    assert hasattr(ShardUpload, "_put"), "shards are put somewhere else now"
    ShardUpload._put = put  # type: ignore[method-assign]


def _accept_late_results() -> None:
    """Nobody asks whose the batch is by now. Four things do, and each alone would be enough: all are taken out."""
    _without("enter", "if not owns(a.job, a.execution) then\n  return 0\nend")()
    _without("publish", "if not owns(a.job, a.execution) then\n  return 'lost'\nend")()
    _without(
        "settle",
        "if a.entry ~= '' and redis.call('HSETNX', ledger, a.batch_id, a.entry) == 1 then",
        "if a.entry ~= '' then redis.call('HSET', ledger, a.batch_id, a.entry)",
    )()
    look = ShardUpload._look
    ShardUpload._look = lambda self, shard: (look(self, shard)[0], None)  # type: ignore[method-assign]


SABOTAGE: dict[str, Callable[[], None]] = {
    "claims have no lease": _give_no_leases,
    "failures cost nothing": _without(
        "give_back", "attempts = redis.call('HINCRBY', 'rq:job:' .. a.job, 'attempts', 1)", "attempts = 1"
    ),
    "the living are called dead": _without("reap", "'-inf', precise(now), 'LIMIT'", "'-inf', INF, 'LIMIT'"),
    "shards of a lost host are not made again": _without("reap", "abandoned[#abandoned + 1] = spool"),
    "late results are taken": _accept_late_results,
    "a commit does not wait for the store": _commit_without_waiting,
}
