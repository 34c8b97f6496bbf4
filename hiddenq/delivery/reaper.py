"""Who gives back what dead processes held: every long-lived process of the fleet, each on its own.

Invariant: nobody is called dead on weak evidence. A process reaps only after it has itself watched Redis for a whole
lease without a break: no gap between its own looks (it was stopped, or Redis was away, for itself and perhaps for all),
no restart of the server, no jump of the server's clock against its own. In that time every living worker renews. The
script checks the clock once more in the same step that reaps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, RedisAway, RedisRefused, UnknownSchema
from hiddenq.contracts.messages import ShardReady
from hiddenq.delivery import jobs
from hiddenq.delivery.background import Background
from hiddenq.delivery.connection import away_errors, raw, text
from hiddenq.delivery.scripts import Scripts
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.transitions import Transitions

DIED = "the process died, or lost its lease, while this batch was on its GPU; it left no traceback"


@dataclass(frozen=True)
class Look:
    """What one look at Redis showed, and when by this process's own clock."""

    own_seconds: float
    redis_seconds: float
    server: str
    """The server's run id: another one after each restart."""


class Evidence:
    """Whether this process has seen enough, without a break, to call anyone dead."""

    def __init__(self, settings: DeliverySettings) -> None:
        self._settings = settings
        self._since: float | None = None
        self._last: Look | None = None

    def see(self, look: Look) -> bool:
        """Take a look into account; True if a whole lease has now been watched without a break."""
        if self._last is None or self._is_break(self._last, look):
            self._since = look.own_seconds
        self._last = look
        return self.is_long_enough

    @property
    def is_long_enough(self) -> bool:
        """Whether a whole lease had been watched without a break at the last look."""
        if self._last is None or self._since is None:
            return False
        return self._last.own_seconds - self._since >= self._settings.lease_seconds

    def restart(self) -> None:
        """Begin watching anew."""
        self._last = None

    def expected(self, own_seconds: float) -> float:
        """What the Redis clock should say at a time of this process's own clock."""
        if self._last is None:
            raise ValueError("nothing seen yet")
        return self._last.redis_seconds + own_seconds - self._last.own_seconds

    def _is_break(self, last: Look, look: Look) -> bool:
        own, theirs = look.own_seconds - last.own_seconds, look.redis_seconds - last.redis_seconds
        return (
            look.server != last.server
            or own > self._settings.lease_seconds / 2  # a shorter gap leaves every living worker time to renew
            or abs(theirs - own) > self._settings.clock_tolerance_seconds
        )


@dataclass(frozen=True)
class Reaped:
    """What one pass did."""

    num_back: int = 0
    num_dead: int = 0
    num_woken: int = 0
    num_remade: int = 0


class Reaping:
    """One process's passes over leases, delayed retries and spools."""

    def __init__(
        self, client: redis.Redis, settings: DeliverySettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._settings = settings
        self._run = Scripts(client).run
        self._moves = Transitions(client, settings)
        self._evidence = Evidence(settings)
        self._clock = clock
        self._exc = jobs.pack_traceback(DIED)

    def once(self) -> Reaped | None:
        """One pass; None if it may not reap yet.

        Raises:
            RedisAway: Redis is away; the watch begins anew.
        """
        try:
            with away_errors():
                return self._once()
        except RedisAway:
            self._evidence.restart()
            raise

    def execution_is_dead(self, execution: str) -> bool:
        """Whether an execution was not renewed for three leases; False while the evidence is weak."""
        return self._evidence.is_long_enough and execution_is_dead(self._client, execution, self._settings)

    def _once(self) -> Reaped | None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        pipeline.info("server")
        (seconds, microseconds), server = pipeline.execute()
        if not self._evidence.see(Look(self._clock(), seconds + microseconds / 1e6, str(server["run_id"]))):
            return None
        verdict, _, back, dead, woken, *spools = self._run(
            "reap",
            expected_now=self._evidence.expected(self._clock()),
            tolerance_seconds=self._settings.clock_tolerance_seconds,
            lease_seconds=self._settings.lease_seconds,
            max_attempts=self._settings.max_attempts,
            retry_delays=self._settings.retry_delays,
            spool_dead_seconds=self._settings.spool_dead_seconds,
            exc=self._exc,
        )
        if verdict == b"jump":
            self._evidence.restart()
            telemetry.logger().warning("redis_clock_jumped", next="reaping waits for a whole lease")
            return None
        remade = sum(self._remake_all(spool.decode()) for spool in spools)
        reaped = Reaped(back, dead, woken, remade)
        if reaped != Reaped():
            telemetry.logger().info("reaped", back=back, dead=dead, woken=woken, remade=remade)
        return reaped

    def _remake_all(self, spool_id: str) -> int:
        queue = names.upload_queue(spool_id)
        waiting = self._client.lrange(f"rq:queue:{queue}", 0, -1)
        delayed = self._client.zrange(f"rq:scheduled:{queue}", 0, -1)
        remade = 0
        for job_id in map(text, (*waiting, *delayed)):
            try:
                shard = jobs.unpack(raw(self._client.hget(f"rq:job:{job_id}", "data")), ShardReady)
                jobs.check_id(shard, job_id, queue)
            except (BadMessage, UnknownSchema):
                continue  # left where it is: nobody can say which batch it was
            error = f"SpoolLost: no heartbeat of spool {spool_id} for {self._settings.spool_dead_seconds:g} s"
            remade += self._moves.remake(shard, execution=None, error=error) in ("remade", "dead")
        return remade


class Reaper(Background):
    """Reaps in a thread, for processes that consume nothing: the supervisor, the monitor, the producer.

    A context manager; it keeps quiet while Redis is away.
    """

    def __init__(self, client: redis.Redis, settings: DeliverySettings) -> None:
        super().__init__("reaper", settings.reap_seconds)
        self._reaping = Reaping(client, settings)

    def execution_is_dead(self, execution: str) -> bool:
        """Whether what an execution left behind may be swept; False while the evidence is weak."""
        return self._reaping.execution_is_dead(execution)

    def _round(self) -> None:
        try:
            self._reaping.once()
        except (RedisAway, RedisRefused) as error:
            telemetry.logger().debug("reaper_waits", error=str(error))
        except Exception:
            telemetry.logger().exception("reaper_failed")


def execution_is_dead(client: redis.Redis, execution: str, settings: DeliverySettings) -> bool:
    """Whether an execution has not been renewed for three leases, so that what it left behind may be swept.

    True as well if Redis knows nothing of it (a day has passed, or Redis was wiped): the caller must then see that the
    file itself is older than three leases. Where Redis may just have come back, ask `Consumer.execution_is_dead` or
    `Reaper.execution_is_dead` instead: they call nobody dead on weak evidence.
    """
    pipeline: Any = client.pipeline(transaction=False)
    pipeline.time()
    pipeline.zscore("hiddenq:executions", execution)
    with away_errors():
        (seconds, microseconds), seen = pipeline.execute()
    return seen is None or seconds + microseconds / 1e6 - seen > 3 * settings.lease_seconds


def execution_is_known(client: redis.Redis, execution: str) -> bool:
    """Whether Redis has heard of an execution within a day; every execution that can still publish is known."""
    with away_errors():
        return client.zscore("hiddenq:executions", execution) is not None


def spool_file_names(client: redis.Redis, spool_id: str) -> set[str]:
    """Names of the files in a spool that an upload job still needs: waiting, started, delayed or set aside."""
    with away_errors():
        return {text(name) for name in client.hkeys(f"hiddenq:spool:{spool_id}:files")}
