"""The metric catalogue: every metric that any hiddenq process exports, declared here and observed where it happens.

Invariant: one process has one registry and takes one set below; labels are bounded (never a batch, sample or path).
Names are `hiddenq_<stage>_<thing>_<unit>[_total]` in base units.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STAGE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class GpuWorkerMetrics:
    """What one GPU worker exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hiddenq_gpu_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hiddenq_gpu_worker_{name}", text, labels, registry=registry)

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
        self.fast_kernels = gauge("fast_kernels", "1 if the model's fast kernels are in use, 0 if a slow path is.")
        self.memory_used = gauge("memory_used_bytes", "GPU memory in use on the device.")
        self.memory_total = gauge("memory_total_bytes", "GPU memory of the device.")
        self.memory_peak = gauge("memory_peak_bytes", "Most GPU memory this process has held.")
        self.utilization = gauge("utilization_ratio", "Share of time a kernel ran, as NVML says; no proof of progress.")
        self.temperature = gauge("temperature_celsius", "GPU temperature.")
        self.power = gauge("power_watts", "GPU power draw.")
        self.throttled = gauge("throttled", "1 while clocks are held down for the reason.", "reason")
        self.ecc_errors = gauge("ecc_uncorrected_errors", "Uncorrected ECC errors since the driver loaded.")
        self.xid_errors = counter("xid_errors_total", "XID events seen since start.", "xid")
        self.useful_mfu = gauge("useful_mfu_ratio", "2 x parameters x real tokens a second over the measured ceiling.")


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
        self.store_away = gauge("store_away", "1 while the object store can't be used.")


class MonitorMetrics:
    """What the queue exporter exports, once a fleet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hiddenq_monitor_{name}", text, labels, registry=registry)

        self.queue_depth = gauge("queue_depth", "Jobs waiting.", "run", "queue")
        self.queue_oldest_seconds = gauge("queue_oldest_seconds", "Age of the oldest waiting job.", "run", "queue")
        self.started = gauge("started", "Jobs under a lease.", "run", "queue")
        self.delayed = gauge("delayed", "Jobs that wait for their next attempt.", "run", "queue")
        self.dead_letters = gauge("dead_letters", "Batches set aside after their last attempt.", "run")
        self.workers_live = gauge("workers_live", "Workers with a fresh heartbeat.", "role", "host")
        self.workers_expected = gauge("workers_expected", "Workers registered and not drained.", "role", "host")
        self.worker_up = gauge("worker_up", "1 with a fresh heartbeat, 0 without.", "role", "host", "target")
        self.run_batches = gauge("run_batches", "Batches of the run.", "run")
        self.run_batches_committed = gauge("run_batches_committed", "Committed batches.", "run")
        self.run_samples = gauge("run_samples", "Samples of the run.", "run")
        self.run_samples_committed = gauge("run_samples_committed", "Samples in committed shards.", "run")
        self.run_tokens = gauge("run_tokens", "Real tokens of the run.", "run")
        self.run_tokens_committed = gauge("run_tokens_committed", "Real tokens in committed shards.", "run")
        self.run_bytes_committed = gauge("run_committed_bytes", "Bytes of committed shards.", "run")
        self.run_tokens_per_second = gauge("run_tokens_per_second", "Committed tokens a second, last 5 minutes.", "run")
        self.run_eta_seconds = gauge("run_eta_seconds", "Seconds to the end at that rate, by tokens.", "run")
        self.run_complete = gauge("run_complete", "1 when every batch is committed.", "run")
        self.batch_p99_seconds = gauge("batch_p99_seconds", "99th percentile of the run's batch times.", "run")
        self.spool_alive = gauge("spool_alive", "1 while the spool's heartbeat is fresh.", "spool_id", "host")
        self.redis_up = gauge("redis_up", "1 while Redis answers.")
        self.redis_memory = gauge("redis_memory_bytes", "Memory Redis uses.")
        self.redis_memory_max = gauge("redis_memory_max_bytes", "Redis's limit; 0 for none.")
