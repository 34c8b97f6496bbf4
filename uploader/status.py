"""What an uploader tells: metrics, and its report to the fleet.

Invariant: it is told once where the fact happens, and both metrics and report come from that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from hiddenq import telemetry
from hiddenq.contracts.messages import ShardReady
from hiddenq.contracts.metrics import UploaderMetrics
from hiddenq.contracts.reports import WorkerReport, WorkerState
from hiddenq.contracts.wording import counted
from hiddenq.storage import Spool, SpoolUsage, StoreObserver

RATE_SECONDS = 60.0
USAGE_SECONDS = 1.0
"""The spool is looked at no more often than this."""


class UploaderStatus(StoreObserver):
    """One uploader's counts and state. Safe to use from several threads."""

    def __init__(self, registry: CollectorRegistry, spool: Spool, *, index: int, name: str) -> None:
        self.metrics = UploaderMetrics(registry)
        self.name = name
        self.metrics_address: str | None = None
        self._spool = spool
        self._index = index
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[ShardReady, float]] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._store_away: dict[str, str] = {}
        self._runs_waiting: dict[str, str] = {}
        self._stage_seconds: dict[str, float] = {}
        self._draining = False
        self._num_batches = self._num_samples = self._num_tokens = self._num_bytes = 0
        self._num_failures = self._num_leases_lost = 0
        self._usage, self._looked = spool.known_usage(), time.monotonic()
        self.metrics.info.labels(telemetry.host_name(), spool.spool_id, str(index)).set(1)
        self.metrics.store_away.set(0)
        self.observe_spool()

    @contextmanager
    def under_way(self, shard: ShardReady) -> Iterator[None]:
        """For the time in which a shard is worked on."""
        with self._lock:
            self._under_way[shard.file_name] = (shard, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._under_way.pop(shard.file_name, None)
            self.store_back(shard)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of a shard."""
        began = time.monotonic()
        yield
        self._spent(name, time.monotonic() - began)

    def committed(self, shard: ShardReady) -> None:
        """The shard is its batch's."""
        self.metrics.files.labels("committed").inc()
        self.metrics.uploaded_bytes.inc(shard.num_bytes)
        self.metrics.last_commit_timestamp.set(time.time())
        with self._lock:
            self._num_batches += 1
            self._num_samples += shard.batch.num_samples
            self._num_tokens += shard.batch.num_tokens
            self._num_bytes += shard.num_bytes
            self._recent.append((time.monotonic(), shard.batch.num_tokens))

    def ended(self, result: str) -> None:
        """A shard ended as `twin`, `quarantined` or `missing`."""
        self.metrics.files.labels(result).inc()

    def failed(self, error: BaseException) -> None:
        """An upload failed, or met a store that is away."""
        self.metrics.errors.labels(type(error).__name__).inc()
        with self._lock:
            self._num_failures += 1

    def lease_lost(self) -> None:
        """Another uploader has the job now."""
        with self._lock:
            self._num_leases_lost += 1

    def store_away(self, shard: ShardReady, error: BaseException) -> None:
        """This shard waits for the store."""
        self.metrics.errors.labels(type(error).__name__).inc()
        with self._lock:
            self._store_away[shard.file_name] = str(error)
            self._tell_store()

    def store_back(self, shard: ShardReady) -> None:
        """This shard waits for the store no more."""
        with self._lock:
            self._store_away.pop(shard.file_name, None)
            self._tell_store()

    def runs_wait(self, reasons: Mapping[str, str]) -> None:
        """These runs wait to be tried again, and why."""
        with self._lock:
            self._runs_waiting = dict(reasons)
            self._tell_store()

    def draining(self) -> None:
        """No new shards are taken."""
        self._draining = True

    def retried(self, error: str) -> None:
        self.metrics.retries.labels(error).inc()

    def confirmed(self, seconds: float) -> None:
        self._spent("confirm", seconds)

    def abort_failed(self, key: str) -> None:
        self.metrics.failed_aborts.inc()
        telemetry.logger().warning("abort_failed", key=key, next="swept later; its parts are billed until then")

    def observe_spool(self) -> SpoolUsage:
        """Look at the spool, unless it was looked at just now."""
        with self._lock:
            if time.monotonic() - self._looked > USAGE_SECONDS:
                self._usage, self._looked = self._spool.known_usage(), time.monotonic()
            usage = self._usage
        metrics = self.metrics
        metrics.spool_bytes.set(usage.num_bytes)
        metrics.spool_files.set(usage.num_files)
        metrics.spool_high_bytes.set(usage.high_bytes)
        metrics.spool_low_bytes.set(usage.low_bytes)
        metrics.spool_oldest_seconds.set(usage.oldest_seconds)
        metrics.quarantine_bytes.set(usage.quarantine_bytes)
        metrics.disk_free_bytes.set(usage.disk_free_bytes)
        return usage

    def report(self) -> WorkerReport:
        """The report of this moment."""
        usage = self.observe_spool()
        with self._lock:
            oldest = min(self._under_way.values(), key=lambda item: item[1], default=None)
            state, detail = self._state(usage)
            return WorkerReport(
                role="uploader",
                name=self.name,
                target=f"{self._spool.spool_id}:{self._index}",
                host=telemetry.host_name(),
                pid=os.getpid(),
                spool_id=self._spool.spool_id,
                run=oldest[0].batch.run if oldest else None,
                metrics_address=self.metrics_address,
                state=state,
                detail=detail,
                batch_id=oldest[0].batch.batch_id if oldest else None,
                batch_seconds=time.monotonic() - oldest[1] if oldest else None,
                num_batches=self._num_batches,
                num_samples=self._num_samples,
                num_tokens=self._num_tokens,
                num_bytes=self._num_bytes,
                stage_seconds=dict(self._stage_seconds),
                tokens_per_second=self._tokens_per_second(),
                num_leases_lost=self._num_leases_lost,
                num_failures=self._num_failures,
                spool_bytes=usage.num_bytes,
                spool_files=usage.num_files,
                spool_high_bytes=usage.high_bytes,
                disk_free_bytes=usage.disk_free_bytes,
            )

    def _tell_store(self) -> None:
        self.metrics.store_away.set(1 if self._store_away or self._runs_waiting else 0)
        self.metrics.waiting_runs.set(len(self._runs_waiting))

    def _spent(self, stage: str, seconds: float) -> None:
        self.metrics.stage_seconds.labels(stage).observe(seconds)
        with self._lock:
            self._stage_seconds[stage] = self._stage_seconds.get(stage, 0.0) + seconds

    def _state(self, usage: SpoolUsage) -> tuple[WorkerState, str]:
        if self._store_away:
            return "waiting", next(iter(self._store_away.values()))
        if self._draining:
            return "draining", f"{counted(len(self._under_way), 'shard')} left"
        if self._runs_waiting:
            run, reason = next(iter(self._runs_waiting.items()))
            return ("busy" if self._under_way else "waiting"), f"run {run} waits: {reason}"
        detail = "the spool is over its high mark: GPU workers wait" if usage.paused else ""
        return ("busy" if self._under_way else "idle"), detail

    def _tokens_per_second(self) -> float:
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()
        return sum(num_tokens for _, num_tokens in self._recent) / RATE_SECONDS
