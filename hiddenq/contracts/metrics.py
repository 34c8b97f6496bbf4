"""The metric catalogue: every metric that any hiddenq process exports, declared here and observed where it happens.

Invariant: one process has one registry and takes one set below; labels are bounded (never a batch, sample or path).
Names are `hiddenq_<stage>_<thing>_<unit>[_total]` in base units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

STAGE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class GpuWorkerMetrics:
    """What one GPU worker exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hiddenq_gpu_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hiddenq_gpu_worker_{name}", text, labels, registry=registry)

        def unknown(name: str, text: str) -> Gauge:
            made = gauge(name, f"{text} NaN until known.")
            made.set(math.nan)
            return made

        self.info = gauge("info", "Always 1; what this worker is.", "run", "host", "device", "gpu_uuid", "gpu_name",
                          "model", "attention", "spool_id")  # fmt: skip
        self.batches = counter("batches_total", "Batches published to the spool (executions, twins included).")
        self.samples = counter("samples_total", "Samples published to the spool.")
        self.tokens = counter("tokens_total", "Real tokens published to the spool.")
        self.padded_tokens = counter("padded_tokens_total", "Tokens run through the model, padding included.")
        self.written_bytes = counter("written_bytes_total", "Bytes of shards written to the spool.")
        self.stage_seconds = Histogram(
            "hiddenq_gpu_worker_stage_seconds", "Seconds a batch spent in a stage.", ["stage"],
            registry=registry, buckets=STAGE_SECONDS)  # fmt: skip
        self.batch_seconds = Histogram(
            "hiddenq_gpu_worker_batch_seconds", "Seconds from one finished batch to the next, while work was queued.",
            registry=registry, buckets=STAGE_SECONDS)  # fmt: skip
        self.last_batch_timestamp = gauge("last_batch_timestamp_seconds", "Unix time of the last published batch.")
        self.gpu_busy_seconds = counter("gpu_busy_seconds_total", "Seconds in which the GPU had a batch to run.")
        self.failures = counter("failures_total", "Failed executions by error class.", "error")
        self.oom_splits = counter("oom_splits_total", "Batches split because memory ran out.")
        self.nonfinite = counter("nonfinite_batches_total", "Batches refused for NaN or Inf states.")
        self.leases_lost = counter("leases_lost_total", "Executions dropped because their lease was lost.")
        self.claim_wait_seconds = counter("claim_wait_seconds_total", "Seconds spent with nothing to run.")
        self.state = gauge("state", "1 for the state the worker is in, 0 for the others.", "state")
        self.fast_kernels = unknown("fast_kernels", "1 if the model's fast kernels are in use, 0 if a slow path is.")
        self.memory_used = unknown("memory_used_bytes", "GPU memory in use on the device.")
        self.memory_total = unknown("memory_total_bytes", "GPU memory of the device.")
        self.memory_peak = unknown("memory_peak_bytes", "Most GPU memory this process has held.")
        self.utilization = unknown(
            "utilization_ratio", "Share of time a kernel ran, as NVML says; no proof of progress."
        )
        self.temperature = unknown("temperature_celsius", "GPU temperature.")
        self.power = unknown("power_watts", "GPU power draw.")
        self.throttled = gauge("throttled", "1 while clocks are held down for the reason.", "reason")
        self.ecc_errors = unknown("ecc_uncorrected_errors", "Uncorrected ECC errors since the driver loaded.")
        self.xid_errors = counter("xid_errors_total", "XID events seen since start.", "xid")
        self.useful_mfu = unknown(
            "useful_mfu_ratio", "2 x parameters x real tokens a second over the measured ceiling."
        )


class UploaderMetrics:
    """What one uploader exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hiddenq_uploader_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hiddenq_uploader_{name}", text, labels, registry=registry)

        self.info = gauge("info", "Always 1; what this uploader is.", "host", "spool_id", "index")
        self.files = counter("files_total", "Shards by result: committed, twin, quarantined, missing.", "result")
        self.uploaded_bytes = counter("uploaded_bytes_total", "Bytes of committed shards.")
        self.stage_seconds = Histogram(
            "hiddenq_uploader_stage_seconds", "Seconds a shard spent in a stage: put, confirm, commit, delete.",
            ["stage"], registry=registry, buckets=STAGE_SECONDS)  # fmt: skip
        self.retries = counter("retries_total", "Store requests tried again, by error class.", "error")
        self.errors = counter("errors_total", "Uploads that failed, by error class.", "error")
        self.failed_aborts = counter("failed_multipart_aborts_total", "Multipart uploads that could not be aborted.")
        self.last_commit_timestamp = gauge("last_commit_timestamp_seconds", "Unix time of the last committed shard.")
        self.spool_bytes = gauge("spool_bytes", "Bytes in the spool, reservations included.")
        self.spool_files = gauge("spool_files", "Finished shards in the spool.")
        self.spool_high_bytes = gauge("spool_high_mark_bytes", "GPU workers stop above this.")
        self.spool_low_bytes = gauge("spool_low_mark_bytes", "GPU workers go on below this.")
        self.spool_oldest_seconds = gauge("spool_oldest_seconds", "Age of the oldest finished shard in the spool.")
        self.quarantine_bytes = gauge("quarantine_bytes", "Bytes of damaged shards set aside.")
        self.disk_free_bytes = gauge("disk_free_bytes", "Free bytes on the spool's file system.")
        self.store_away = gauge("store_away", "1 while an object store can't be used.")
        self.waiting_runs = gauge("waiting_runs", "Runs that are left alone for a while, refused by their store.")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A gauge of the monitor: its name without the prefix, its help and its labels."""

    name: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as Prometheus sees it."""
        return f"hiddenq_monitor_{self.name}"


_QUEUE = ("queue", "run", "spool_id", "host")
_WORKER = ("role", "run", "host", "device", "target")

MONITOR_FAMILIES: tuple[Family, ...] = (
    Family(name="queue_depth", text="Jobs waiting; `run` names an extract queue, `spool_id` an upload queue.",
           labels=_QUEUE),
    Family(name="queue_oldest_seconds", text="Age of the oldest waiting job; 0 for an empty queue.", labels=_QUEUE),
    Family(name="queue_started", text="Jobs under a lease.", labels=_QUEUE),
    Family(name="queue_delayed", text="Jobs that wait for their next attempt.", labels=_QUEUE),
    Family(name="dead_letters", text="Batches set aside after their last attempt.", labels=("run",)),
    Family(name="workers_live", text="Workers with a fresh heartbeat.", labels=("role", "host")),
    Family(name="workers_expected", text="Workers registered and neither drained nor forgotten.",
           labels=("role", "host")),
    Family(name="worker_up", text="1 with a fresh heartbeat, 0 without.", labels=_WORKER),
    Family(name="worker_starting_seconds", text="Seconds a live worker has been starting; 0 once it is ready.",
           labels=_WORKER),
    Family(name="worker_stalled_seconds", labels=_WORKER,
           text="Seconds in which a GPU worker could have finished a batch and did not; 0 without work for it."),
    Family(name="run_batches", text="Batches of the run.", labels=("run",)),
    Family(name="run_batches_committed", text="Committed batches, by the ledger.", labels=("run",)),
    Family(name="run_samples", text="Samples of the run.", labels=("run",)),
    Family(name="run_samples_committed", text="Samples in committed shards, by the ledger.", labels=("run",)),
    Family(name="run_tokens", text="Real tokens of the run.", labels=("run",)),
    Family(name="run_tokens_committed", text="Real tokens in committed shards, by the ledger.", labels=("run",)),
    Family(name="run_committed_bytes", text="Bytes of committed shards, by the ledger.", labels=("run",)),
    Family(name="run_tokens_per_second", text="Committed tokens a second over the last 5 minutes.", labels=("run",)),
    Family(name="run_samples_per_second", text="Committed samples a second over the last 5 minutes.", labels=("run",)),
    Family(name="run_eta_seconds", text="Seconds to the end at that rate, by tokens; absent without a rate.",
           labels=("run",)),
    Family(name="run_complete", text="1 when every batch is committed.", labels=("run",)),
    Family(name="batch_p99_seconds", labels=("run",),
           text="99th percentile of the run's batch times over its newest 500 batches; 0 before the first."),
    Family(name="spool_alive", text="1 while the spool's heartbeat is fresh.", labels=("spool_id", "host")),
    Family(name="spool_bytes", text="Bytes in the spool, as its newest report says.", labels=("spool_id", "host")),
    Family(name="spool_files", text="Finished shards in the spool.", labels=("spool_id", "host")),
    Family(name="spool_high_mark_bytes", text="GPU workers of the spool pause above this.",
           labels=("spool_id", "host")),
    Family(name="spool_disk_free_bytes", text="Free bytes on the spool's disk.", labels=("spool_id", "host")),
    Family(name="build_info", text="Always 1; the monitor's version of hiddenq.", labels=("version",)),
    Family(name="redis_up", text="1 while Redis answers; without it all but this and the next stand still."),
    Family(name="snapshot_timestamp_seconds", text="Unix time of the last look at Redis that succeeded."),
    Family(name="redis_memory_bytes", text="Memory Redis uses."),
    Family(name="redis_memory_max_bytes", text="Redis's limit; 0 for none."),
)  # fmt: skip


def stage_totals(histogram: Histogram) -> dict[str, float]:
    """Seconds by stage of a `stage_seconds` histogram, for a worker's report."""
    samples = (sample for metric in histogram.collect() for sample in metric.samples)
    return {sample.labels["stage"]: sample.value for sample in samples if sample.name.endswith("_sum")}


Sample = tuple[str, tuple[str, ...], float]
"""One sample of the monitor: name of its family, label values in the family's order, value."""


class MonitorMetrics(Collector):
    """What the queue exporter exports, once a fleet.

    The samples are replaced as a whole, so a scrape sees one moment, and what has left the fleet leaves the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._by_name = {family.name: family for family in MONITOR_FAMILIES}
        self._samples: tuple[Sample, ...] = ()
        registry.register(self)

    def replace(self, samples: Iterable[Sample]) -> None:
        """Export these samples from now on."""
        samples = tuple(samples)
        for name, labels, _ in samples:
            family = self._by_name[name]
            assert len(labels) == len(family.labels), f"{name}: expected labels {family.labels}, found {labels}"
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """Every family of the catalogue, with the samples of the last `replace`."""
        exported = {
            family.name: GaugeMetricFamily(family.full_name, family.text, labels=family.labels)
            for family in MONITOR_FAMILIES
        }
        for name, labels, value in self._samples:
            exported[name].add_metric(labels, value)
        yield from exported.values()
