"""The thread that keeps a consumer's claims: it renews, reports, reaps and watches stage deadlines.

Invariant: it ends only with its consumer. Whatever a heartbeat raises is logged and tried again, because a silent
keeper would cost every lease of the process.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol

import redis
from rq.version import VERSION

from hiddenq import telemetry
from hiddenq.contracts.errors import RedisAway, RedisRefused
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery.connection import away_errors
from hiddenq.delivery.departure import Departure
from hiddenq.delivery.held import HeldClaims
from hiddenq.delivery.jobs import M
from hiddenq.delivery.reaper import Reaping
from hiddenq.delivery.transitions import Transitions

MAX_TICK_SECONDS = 1.0


class Kept(Protocol):
    """What the keeper asks of its consumer."""

    name: str
    stopping: threading.Event

    @property
    def queues(self) -> list[str]:
        """The queues it claims from."""

    @property
    def redis_away(self) -> bool:
        """Whether any thread of it waits for Redis."""


class Keeper(Generic[M]):
    """One consumer's thread."""

    def __init__(
        self,
        client: redis.Redis,
        moves: Transitions,
        held: HeldClaims[M],
        *,
        consumer: Kept,
        departure: Departure[M],
        report: Callable[[], WorkerReport],
        host: str,
    ) -> None:
        self.away = False
        self.epoch = ""
        """The epoch of Redis at the last heartbeat: another one after it lost its data."""
        self.entry = ""
        """Under what the process is expected: its role and target, the same after a restart."""
        self._moves = moves
        self._held = held
        self._consumer = consumer
        self._departure = departure
        self._report = report
        self._host = host
        self._settings = moves.settings
        self._reaping = Reaping(client, moves.settings)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="keeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, with a last report; a request under way is waited for."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
            try:
                self.beat()
            except (RedisAway, RedisRefused):
                pass
            except Exception:  # whatever a report fails at, what is held must still be handed back
                telemetry.logger().exception("heartbeat_failed")

    def execution_is_dead(self, execution: str) -> bool:
        """Whether what an execution left behind may be swept; False while the evidence is weak."""
        return self._reaping.execution_is_dead(execution)

    def beat(self) -> None:
        """One heartbeat: registration, renewal, report, spool.

        Raises:
            RedisAway: it did not arrive.
        """
        report = self._report()
        self.entry = f"{report.role}:{report.target}"
        with away_errors():
            beat = self._moves.beat(
                worker=self._consumer.name,
                queues=self._consumer.queues,
                fields=self._worker_fields(),
                entry=self.entry,
                report=report.to_json(),
                spool_id=report.spool_id,
                host=self._host,
                claims=self._held.members(),
            )
        if self.epoch not in ("", beat.epoch):
            telemetry.logger().warning("redis_lost_its_data", next="what is held is lost, and is claimed anew")
        self.epoch = beat.epoch
        for claim in self._held.mark_lost(beat.lost):
            telemetry.logger().warning("lease_lost", job=claim.job_id, execution=claim.execution)
        if beat.drained and not self._consumer.stopping.is_set():
            telemetry.logger().info("drained", host=self._host, next="finishing what is held")
            self._consumer.stopping.set()

    def _worker_fields(self) -> dict[str, Any]:
        return {
            "queues": ",".join(self._consumer.queues),
            "pid": os.getpid(),
            "hostname": self._host,
            "ip_address": "",
            "version": VERSION,
            "python_version": platform.python_version(),
            "state": "busy" if len(self._held) else "idle",
        }

    def _work(self) -> None:
        tick = min(MAX_TICK_SECONDS, self._settings.renew_seconds / 2)
        last = time.monotonic()
        next_beat, next_reap = last + self._settings.renew_seconds, last
        while not self._closing.wait(tick):
            now = time.monotonic()
            if not self._consumer.redis_away:
                late = self._held.tick(min(now - last, 2 * tick), self._settings.stage_seconds)
                if late:
                    self._departure.stall(late)
            last = now
            try:
                if now >= next_beat:
                    next_beat = now + self._settings.renew_seconds
                    self.beat()
                if now >= next_reap:
                    next_reap = now + self._settings.reap_seconds
                    self._reaping.once()
                self.away = False
            except RedisAway as error:
                next_beat = now
                if not self.away:
                    telemetry.logger().warning("heartbeat_missed", error=str(error), next="trying again")
                self.away = True
            except RedisRefused as error:
                telemetry.logger().error("heartbeat_refused", error=str(error), next="trying again")
            except Exception:
                telemetry.logger().exception("heartbeat_failed")
