"""What a worker says of itself: its metrics, and the report that travels with each heartbeat.

Invariant: a fact is told where it happens, to one object, so metrics and reports can't disagree; and nothing in here
blocks or fails, because it is called from every thread of the pipeline.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable

from gpu_worker.gpu import THROTTLE_REASONS, GpuReading
from hiddenq import telemetry
from hiddenq.contracts.metrics import GpuWorkerMetrics, stage_totals
from hiddenq.contracts.reports import WorkerReport, WorkerState
from hiddenq.storage import Spool

STATES: tuple[WorkerState, ...] = ("starting", "idle", "busy", "paused", "waiting", "draining", "sick")
RATE_SECONDS = 60.0


class WorkerStatus:
    """Counts, state and figures of one worker process."""

    def __init__(
        self,
        metrics: GpuWorkerMetrics,
        spool: Spool,
        *,
        name: str,
        device: str,
        gpu_uuid: str = "",
        gpu_name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.metrics_address: str | None = None
        self.run: str | None = None
        self.attention = ""
        self.fast_kernels: bool | None = None
        self.flops_per_token = 0.0
        self.ceiling_flops = 0.0
        """Measured matrix rate of the device; 0: not measured."""
        self.redis_away: Callable[[], bool] = lambda: False
        self._spool = spool
        self._clock = clock
        self._name, self._device, self._gpu_uuid, self._gpu_name = name, device, gpu_uuid, gpu_name
        self._lock = threading.Lock()
        self._state: WorkerState = "starting"
        self._detail = ""
        self._on_device: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._totals = dict.fromkeys(("batches", "samples", "tokens", "padded", "bytes", "splits", "lost", "failed"), 0)
        self._last_published: float | None = None
        self._reading = GpuReading()

    # What happens

    def become(self, state: WorkerState, detail: str = "") -> None:
        """Enter a state; `detail` is one line for a person."""
        with self._lock:
            changed, self._state, self._detail = self._state != state, state, detail
        for other in STATES:
            self.metrics.state.labels(other).set(other == state)
        if changed and state not in ("busy", "idle"):
            telemetry.logger().info("state", state=state, detail=detail)

    @property
    def state(self) -> WorkerState:
        """The state last entered."""
        return self._state

    def launched(self, batch_id: str, num_splits: int) -> None:
        """A batch is on the device."""
        with self._lock:
            self._on_device[batch_id] = self._clock()
            self._totals["splits"] += num_splits
        if num_splits:
            self.metrics.oom_splits.inc(num_splits)

    def left_device(self, batch_id: str) -> None:
        """A batch's bytes are on the host, or it failed."""
        with self._lock:
            self._on_device.pop(batch_id, None)

    @property
    def num_on_device(self) -> int:
        """Batches on the device."""
        return len(self._on_device)

    def busy(self, seconds: float) -> None:
        """So long the device had a batch to run."""
        self.metrics.gpu_busy_seconds.inc(max(0.0, seconds))

    def published(self, *, num_samples: int, num_tokens: int, num_padded_tokens: int, num_bytes: int) -> None:
        """A shard is in the spool and its upload queued."""
        now = self._clock()
        with self._lock:
            for name, number in (
                ("batches", 1),
                ("samples", num_samples),
                ("tokens", num_tokens),
                ("padded", num_padded_tokens),
                ("bytes", num_bytes),
            ):
                self._totals[name] += number
            self._recent.append((now, num_tokens))
            last, self._last_published = self._last_published, now
            rate = self._rate(now)
        metrics = self.metrics
        metrics.batches.inc()
        metrics.samples.inc(num_samples)
        metrics.tokens.inc(num_tokens)
        metrics.padded_tokens.inc(num_padded_tokens)
        metrics.written_bytes.inc(num_bytes)
        metrics.last_batch_timestamp.set_to_current_time()
        if last is not None:
            metrics.batch_seconds.observe(now - last)
        mfu = self._mfu(rate)
        if mfu is not None:
            metrics.useful_mfu.set(mfu)

    def queue_ran_empty(self) -> None:
        """The next batch's time does not count from the last one's: nothing was queued in between."""
        with self._lock:
            self._last_published = None

    def failed(self, error: BaseException) -> None:
        """An execution failed."""
        with self._lock:
            self._totals["failed"] += 1
        self.metrics.failures.labels(type(error).__name__).inc()

    def lease_lost(self) -> None:
        """An execution was another worker's when its result was ready."""
        with self._lock:
            self._totals["lost"] += 1
        self.metrics.leases_lost.inc()

    def gpu_reading(self, reading: GpuReading) -> None:
        """NVML answered."""
        self._reading = reading
        metrics = self.metrics
        for gauge, value in (
            (metrics.memory_used, reading.memory_used_bytes),
            (metrics.memory_total, reading.memory_total_bytes),
            (metrics.utilization, reading.utilization),
            (metrics.temperature, reading.temperature_celsius),
            (metrics.power, reading.power_watts),
            (metrics.ecc_errors, reading.ecc_uncorrected_errors),
        ):
            if value is not None:
                gauge.set(value)
        for reason in THROTTLE_REASONS:
            metrics.throttled.labels(reason).set(reason in reading.throttle)

    # What is told

    def report(self) -> WorkerReport:
        """The report of this moment."""
        now, usage, reading = self._clock(), self._spool.known_usage(), self._reading
        with self._lock:
            batch_id, since = next(iter(self._on_device.items()), (None, None))
            totals, rate = dict(self._totals), self._rate(now)
            state, detail = self._state, self._detail
        if state in ("idle", "busy", "paused") and self.redis_away():
            state, detail = "waiting", "Redis is away"
        return WorkerReport(
            role="gpu_worker",
            name=self._name,
            target=f"{self._spool.spool_id}-{self._gpu_uuid or self._device}",
            host=telemetry.host_name(),
            pid=os.getpid(),
            spool_id=self._spool.spool_id,
            run=self.run,
            device=self._device,
            gpu_uuid=self._gpu_uuid,
            gpu_name=self._gpu_name,
            metrics_address=self.metrics_address,
            state=state,
            detail=detail,
            batch_id=batch_id,
            batch_seconds=None if since is None else now - since,
            num_batches=totals["batches"],
            num_samples=totals["samples"],
            num_tokens=totals["tokens"],
            num_padded_tokens=totals["padded"],
            num_bytes=totals["bytes"],
            tokens_per_second=rate,
            useful_mfu=self._mfu(rate),
            memory_used_bytes=reading.memory_used_bytes,
            memory_total_bytes=reading.memory_total_bytes,
            temperature_celsius=reading.temperature_celsius,
            utilization=reading.utilization,
            throttle=",".join(reading.throttle),
            fast_kernels=self.fast_kernels,
            attention=self.attention,
            num_oom_splits=totals["splits"],
            num_leases_lost=totals["lost"],
            num_failures=totals["failed"],
            stage_seconds=stage_totals(self.metrics.stage_seconds),
            spool_bytes=usage.num_bytes,
            spool_files=usage.num_files,
            spool_high_bytes=usage.high_bytes,
            disk_free_bytes=usage.disk_free_bytes,
        )

    def _rate(self, now: float) -> float:
        """Tokens a second over the last minute (or since the first batch in it)."""
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
        if len(self._recent) < 2:
            return 0.0
        tokens = sum(tokens for _, tokens in self._recent) - self._recent[0][1]
        return tokens / max(now - self._recent[0][0], 1e-3)

    def _mfu(self, rate: float) -> float | None:
        if not self.ceiling_flops or not rate:
            return None
        return rate * self.flops_per_token / self.ceiling_flops
