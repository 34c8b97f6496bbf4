"""The monitor's one thread that looks: every few seconds, and everything that is served comes from its last look.

Invariant: however many browsers and Prometheuses ask, Redis is asked once an interval. While Redis is away the last
look stands, is marked as such, and is never presented as a fresh one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from hiddenq import telemetry
from hiddenq.contracts.errors import RedisAway
from hiddenq.contracts.manifest import DeadLetter
from hiddenq.contracts.metrics import MonitorMetrics, Sample
from hiddenq.delivery import DeliverySettings, FleetSnapshot, Reaper, batch_seconds, connect, dead_letters
from hiddenq.delivery.background import Background
from hiddenq.monitor.exporter import samples_of, samples_without_redis
from hiddenq.monitor.model import RunStatus
from hiddenq.monitor.status import MAX_LETTERS, Look


@dataclass(frozen=True)
class Seen:
    """What the last successful look showed."""

    snapshot: FleetSnapshot
    statuses: tuple[RunStatus, ...]


class Watcher(Background):
    """Looks when it starts, then every `interval_seconds`; also reaps, as every long-lived process does.

    Its start raises `RedisRefused` if Redis answers, and can't be used as it is.
    """

    def __init__(self, redis_url: str | None, metrics: MonitorMetrics, *, interval_seconds: float) -> None:
        super().__init__("watcher", interval_seconds)
        self._redis_url = redis_url
        self._metrics = metrics
        self._client: redis.Redis | None = None
        self._reaper: Reaper | None = None
        self._reaps_by: DeliverySettings | None = None
        self._letters: dict[str, tuple[int, list[DeadLetter]]] = {}
        self._samples: Sequence[Sample] = ()
        self._seen: Seen | None = None
        self._away = "the monitor has not reached Redis yet"
        self._lock = threading.Lock()

    def now(self) -> Seen:
        """The last look.

        Raises:
            RedisAway: the last look failed.
        """
        with self._lock:
            if self._away or self._seen is None:
                raise RedisAway(self._away)
            return self._seen

    def look(self) -> None:
        """Look once; a Redis that is away is noted, not raised."""
        try:
            if self._client is None:
                self._client = connect(self._redis_url, wait_seconds=0)
            seen, samples = self._take(self._client)
        except RedisAway as error:
            with self._lock:
                if not self._away:
                    telemetry.logger().warning("redis_away", error=str(error), next="metrics stand still")
                self._away = str(error)
            self._samples = samples_without_redis(self._samples)
        else:
            with self._lock:
                self._away, self._seen, self._samples = "", seen, samples
            self._reap_as(seen.snapshot)
        self._metrics.replace(self._samples)

    def _begin(self) -> None:
        self.look()

    def _end(self) -> None:
        if self._reaper:
            self._reaper.close()
        if self._client:
            self._client.close()

    def _round(self) -> None:
        began = time.monotonic()
        try:
            self.look()
        except Exception:
            telemetry.logger().exception("look_failed", seconds=round(time.monotonic() - began, 3))

    def _take(self, client: redis.Redis) -> tuple[Seen, list[Sample]]:
        look = Look.take(client)
        statuses = []
        for state in look.snapshot.runs:
            run = state.record.run
            if self._letters.get(run, (0, []))[0] != state.num_dead:
                self._letters[run] = (state.num_dead, dead_letters(client, run, limit=MAX_LETTERS))
            statuses.append(look.status_of(state, batch_seconds(client, run), self._letters.get(run, (0, []))[1]))
        return Seen(look.snapshot, tuple(statuses)), list(samples_of(look, statuses))

    def _reap_as(self, snapshot: FleetSnapshot) -> None:
        """Reap by the settings of a live run, since those are what its workers renew by."""
        live = [run.record.delivery for run in snapshot.runs if run.state == "live"]
        settings = max(live, key=lambda one: one.lease_seconds, default=self._reaps_by or DeliverySettings())
        if settings == self._reaps_by or self._client is None:
            return
        if self._reaper:
            self._reaper.close()
        self._reaper, self._reaps_by = Reaper(self._client, settings), settings
        self._reaper.start()
