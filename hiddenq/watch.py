"""Whether a run is stuck: nothing is committed any more, and nothing alive could change that.

Invariant: a run is given up only after it was stuck at every look for a while, in which none of this machine's own
processes was still starting; Redis being away says nothing. What a person decided (a setting, a cancel) is not waited
for. A store that is away or refuses in mid-run is waited for as long as any outage: after an hour without a commit the
run ends, because nobody may be there to read why its GPUs stand still, and the same command loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import redis

from hiddenq.contracts.errors import HiddenqError, RedisAway, RetryableError, StoreAway, UsageError
from hiddenq.delivery import (
    OUTAGE_SECONDS,
    FleetSnapshot,
    RunRecord,
    fleet,
    run_state,
    stuck_reason,
    uploads_of,
)
from hiddenq.telemetry import logger

STUCK_SECONDS = 15.0
"""A run that nothing alive can finish is watched for so long before it is given up."""


class Processes(Protocol):
    """What it asks of the supervisor of this machine's processes."""

    @property
    def is_starting(self) -> bool: ...
    @property
    def withdrawn(self) -> Mapping[str, str]: ...
    @property
    def only_misconfigured(self) -> bool: ...


class Watch:
    """One run, seen from the machine that `run` was typed on."""

    def __init__(self, client: redis.Redis, record: RunRecord, supervisor: Processes) -> None:
        self._client = client
        self._run = record.run
        self._supervisor = supervisor
        self._committed: object = None
        self._stuck_since: float | None = None
        self._waiting_since: float | None = None
        self.is_final = False
        """Whether the last reason is one that comparing plan and queue once more would not mend."""

    def is_unknown(self) -> bool:
        """Whether Redis answers and has no such run: it lost its data."""
        try:
            return run_state(self._client, self._run) is None
        except (RedisAway, redis.RedisError):
            return False

    def reason(self, committed: object, *, enqueuing: bool) -> HiddenqError | None:
        """Why the run is to be given up; None while it is not.

        `committed` is anything that changes with each commit; `enqueuing`: more of the run is still to be queued.
        """
        moved, self._committed = committed != self._committed, committed
        if moved:
            self._waiting_since = None
        try:
            found = None if moved else self._obstacle(enqueuing=enqueuing)
        except (RedisAway, redis.RedisError) as error:
            logger().debug("redis_away", error=str(error))
            found = None
        if found is None:
            self._stuck_since = None
        elif isinstance(found, HiddenqError):
            self.is_final = True
            return found
        elif self._supervisor.is_starting:
            self._stuck_since = None
        else:
            self._stuck_since = self._stuck_since or time.monotonic()
            if time.monotonic() - self._stuck_since >= STUCK_SECONDS:
                self._stuck_since = None
                return RetryableError(f"{self._run}: {found}; the same command goes on from here")
        return None

    def _obstacle(self, *, enqueuing: bool) -> HiddenqError | str | None:
        """What is in the run's way: an error if a person put it there."""
        uploads, snapshot = uploads_of(self._client, self._run), fleet(self._client)
        if gone_on_for_too_long := self._outage(snapshot, uploads):
            return gone_on_for_too_long
        extract = [queue for queue in snapshot.queues if queue.run == self._run]
        reason = stuck_reason(snapshot, self._run, uploads)
        if run_state(self._client, self._run) == "cancelled":
            if reason is None and (uploads or any(queue.num_started for queue in extract)):
                return None  # what was begun comes to its end
            return RetryableError(f"{self._run}: it was cancelled; the same command goes on from here")
        if reason is None:
            held = uploads or any(queue.num_waiting + queue.num_started + queue.num_delayed for queue in extract)
            return None if held or enqueuing else "no queue holds what is left of it"
        withdrawn = self._supervisor.withdrawn
        if not withdrawn:
            return reason
        reason = "; ".join(f"{name} was given up: {why}" for name, why in withdrawn.items())
        return UsageError(f"{self._run}: {reason}") if self._supervisor.only_misconfigured else reason

    def _outage(self, snapshot: FleetSnapshot, uploads: Mapping[str, int]) -> StoreAway | None:
        """Why nothing was committed for an hour, if processes of this run wait for its store."""
        for worker in snapshot.workers:
            report = worker.report
            concerned = report.spool_id in uploads if report.role == "uploader" else report.run == self._run
            if worker.live and concerned and report.state == "waiting":
                now = time.monotonic()
                self._waiting_since = self._waiting_since or now
                if now - self._waiting_since >= OUTAGE_SECONDS:
                    return StoreAway(
                        f"{self._run}: nothing was stored for {OUTAGE_SECONDS / 60:.0f} minutes: {report.detail}; what "
                        "is finished waits in the spool, and the same command goes on from here"
                    )
        return None
