"""What each alert must do: a story told in series, one value a minute, and what is on at which minute.

`firing` are the exact labels (without `alertname` and `severity`) of every alert that is on at `firing_at`. A near miss
is a story that comes close and must stay silent all along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Series = dict[str, str]
Labels = dict[str, str]

MONITOR = {"instance": "m:9700", "job": "hiddenq-monitor"}
RUN = {"run": "demo"}
SPOOL = {"host": "node1", "spool_id": "s1"}
GPU = {"role": "gpu_worker", "run": "demo", "host": "node1", "device": "cuda:0", "target": "s1:GPU-a"}
OTHER = {**GPU, "device": "cuda:1", "target": "s1:GPU-b"}
THIRD = {**GPU, "device": "cuda:2", "target": "s1:GPU-c"}
UPLOADER = {"role": "uploader", "run": "", "host": "node1", "device": "", "target": "s1:uploader-0"}
PER_GPU = {name: GPU[name] for name in ("run", "host", "device", "target")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The story of one alert."""

    alert: str
    severity: str
    series: Series
    silent_at: int
    pending_at: int | None = None
    """None for an alert that fires at once."""
    firing_at: int
    firing: list[Labels]
    resolved_at: int
    near_misses: dict[str, Series] = field(default_factory=dict)


def selector(name: str, labels: Labels) -> str:
    """A series in Prometheus's notation."""
    return name + "{" + ", ".join(f'{key}="{value}"' for key, value in sorted(labels.items()) if value) + "}"


def monitor(name: str, **labels: str) -> str:
    """A series of the monitor."""
    return selector(f"hiddenq_monitor_{name}", {**labels, **MONITOR})


def gpu(name: str, worker: Labels = GPU, **labels: str) -> str:
    """A series of a GPU worker, with the labels that service discovery gives its target."""
    place = {"instance": worker["target"], "job": "hiddenq", "spool_id": "s1"}
    return selector(f"hiddenq_gpu_worker_{name}", {**worker, **place, **labels})


def uploader(name: str, **labels: str) -> str:
    """A series of an uploader."""
    place = {"instance": UPLOADER["target"], "job": "hiddenq", "spool_id": "s1"}
    return selector(f"hiddenq_uploader_{name}", {**UPLOADER, **place, **labels})


def _of(labels: Labels) -> Labels:
    return {key: value for key, value in {**labels, **MONITOR}.items() if value}


def _scraped(worker: Labels) -> Labels:
    return {key: value for key, value in worker.items() if value} | {
        "instance": worker["target"],
        "job": "hiddenq",
        "spool_id": "s1",
    }


UP = {monitor("redis_up"): "1x200"}
EXTRACT = {**RUN, "queue": "extract"}
UPLOAD = {**SPOOL, "queue": "upload"}
QUEUED = {monitor("queue_depth", **EXTRACT): "100x90"}
WORKING = QUEUED | {gpu("state", worker, state="paused"): "0x90" for worker in (GPU, OTHER, THIRD)}

CASES = (
    Case(
        alert="HiddenqGpuStalled",
        severity="critical",
        # p99 100 s: the limit is 300 s, reached after minute 10 (5 min of waiting counted from minute 5).
        series={
            **UP,
            monitor("batch_p99_seconds", **RUN): "100x60",
            monitor("worker_stalled_seconds", **GPU): "0x5 60+60x14 0x30",
        },
        silent_at=10,
        firing_at=12,
        firing=[_of(GPU)],
        resolved_at=22,
        near_misses={
            "a slow batch within 3 x p99": {
                **UP,
                monitor("batch_p99_seconds", **RUN): "400x60",
                monitor("worker_stalled_seconds", **GPU): "0x5 60+60x18 0x30",
            },
            "quick batches, a wait under the floor": {
                **UP,
                monitor("batch_p99_seconds", **RUN): "1x60",
                monitor("worker_stalled_seconds", **GPU): "0x5 179x30",
            },
        },
    ),
    Case(
        alert="HiddenqGpuWorkerMissing",
        severity="critical",
        series={**UP, monitor("worker_up", **GPU): "1x5 0x9 1x30", monitor("worker_up", **OTHER): "1x60"},
        silent_at=5,
        pending_at=7,
        firing_at=9,
        firing=[_of(GPU)],
        resolved_at=16,
        near_misses={"a restart within two minutes": {**UP, monitor("worker_up", **GPU): "1x5 0x1 1x30"}},
    ),
    Case(
        alert="HiddenqGpuWorkerSick",
        severity="critical",
        series={gpu("state", state="sick"): "0x5 1x10 0x40"},
        silent_at=5,
        pending_at=6,
        firing_at=8,
        firing=[{**_scraped(GPU), "state": "sick"}],
        resolved_at=27,
        near_misses={"busy": {gpu("state", state="busy"): "1x60"}},
    ),
    Case(
        alert="HiddenqGpuWorkerStuckStarting",
        severity="warning",
        series={**UP, monitor("worker_starting_seconds", **GPU): "0+60x40 0x20"},
        silent_at=29,
        firing_at=35,
        firing=[_of(GPU)],
        resolved_at=45,
        near_misses={"a big model": {**UP, monitor("worker_starting_seconds", **GPU): "0+60x29 0x30"}},
    ),
    Case(
        alert="HiddenqGpuStraggler",
        severity="warning",
        series={
            **WORKING,
            gpu("tokens_total", GPU): "0+600x10 6000+240x25 12000+600x40",
            gpu("tokens_total", OTHER): "0+600x75",
            gpu("tokens_total", THIRD): "0+600x75",
        },
        silent_at=10,
        pending_at=22,
        firing_at=32,
        firing=[_scraped(GPU)],
        resolved_at=55,
        near_misses={
            "slower than others, over 60 %": {
                **WORKING,
                gpu("tokens_total", GPU): "0+400x60",
                gpu("tokens_total", OTHER): "0+600x60",
                gpu("tokens_total", THIRD): "0+600x60",
            },
            "the queue ran empty now and then": {
                **WORKING,
                monitor("queue_depth", **EXTRACT): "5 0 3 9 0 1 4 0 7 2 0 5 3 0 2 6 0 1 8 0 4 0 3 0 9 0 2 0 5 0 3 0 1",
                gpu("tokens_total", GPU): "0+100x60",
                gpu("tokens_total", OTHER): "0+600x60",
                gpu("tokens_total", THIRD): "0+600x60",
            },
            "paused by a full spool": {
                **WORKING,
                gpu("state", GPU, state="paused"): "1x60",
                gpu("tokens_total", GPU): "0+100x60",
                gpu("tokens_total", OTHER): "0+600x60",
                gpu("tokens_total", THIRD): "0+600x60",
            },
        },
    ),
    Case(
        alert="HiddenqGpuThrottled",
        severity="warning",
        series={gpu("throttled", reason="hardware_thermal"): "0x5 1x25 0x40"},
        silent_at=5,
        pending_at=14,
        firing_at=24,
        firing=[{**_scraped(GPU), "reason": "hardware_thermal"}],
        resolved_at=45,
        near_misses={
            "now and then": {
                gpu("throttled", reason="hardware_thermal"): "0 0 1 0 0 0 1 0 0 1 0 0 0 1 0 0 1 0 0 1 0 0 1 0"
            },
            "at its power cap, as a busy GPU is": {gpu("throttled", reason="power_cap"): "1x60"},
        },
    ),
    Case(
        alert="HiddenqGpuErrors",
        severity="warning",
        series={gpu("ecc_uncorrected_errors"): "0x5 1x90"},
        silent_at=5,
        firing_at=8,
        firing=[PER_GPU],
        resolved_at=80,
        near_misses={"old errors": {gpu("ecc_uncorrected_errors"): "7x90"}},
    ),
    Case(
        alert="HiddenqSlowKernels",
        severity="warning",
        series={gpu("fast_kernels"): "1x5 0x15 1x20"},
        silent_at=5,
        pending_at=8,
        firing_at=13,
        firing=[_scraped(GPU)],
        resolved_at=24,
        near_misses={"fast": {gpu("fast_kernels"): "1x60"}},
    ),
    Case(
        alert="HiddenqNonFiniteStates",
        severity="warning",
        series={gpu("nonfinite_batches_total"): "0x5 1x90"},
        silent_at=5,
        firing_at=8,
        firing=[PER_GPU],
        resolved_at=80,
        near_misses={"one long ago": {gpu("nonfinite_batches_total"): "1x90"}},
    ),
    Case(
        alert="HiddenqOomSplits",
        severity="warning",
        series={gpu("oom_splits_total"): "0x10 1+1x15 16x60", gpu("batches_total"): "0+10x90"},
        silent_at=10,
        firing_at=22,
        firing=[PER_GPU],
        resolved_at=70,
        near_misses={
            "few among many": {gpu("oom_splits_total"): "0x10 1+1x15 16x60", gpu("batches_total"): "0+900x90"}
        },
    ),
    Case(
        alert="HiddenqNothingFinishing",
        severity="critical",
        series={
            **UP,
            monitor("run_batches_committed", **RUN): "0+5x10 50x30 51+5x60",
            monitor("run_complete", **RUN): "0x100",
            monitor("queue_depth", **EXTRACT): "100x100",
            monitor("queue_started", **EXTRACT): "2x100",
        },
        silent_at=20,
        firing_at=30,
        firing=[_of(RUN)],
        resolved_at=45,
        near_misses={
            "one batch in ten minutes": {
                **UP,
                monitor("run_batches_committed", **RUN): "0x9 1x9 2x9 3x9 4x9",
                monitor("run_complete", **RUN): "0x100",
                monitor("queue_depth", **EXTRACT): "100x100",
                monitor("queue_started", **EXTRACT): "2x100",
            },
            "a run that is done": {
                **UP,
                monitor("run_batches_committed", **RUN): "50x100",
                monitor("run_complete", **RUN): "1x100",
                monitor("queue_depth", **EXTRACT): "0x100",
                monitor("queue_started", **EXTRACT): "0x100",
            },
        },
    ),
    Case(
        alert="HiddenqDeadLetters",
        severity="warning",
        series={**UP, monitor("dead_letters", **RUN): "0x5 2x10 0x30"},
        silent_at=5,
        firing_at=7,
        firing=[_of(RUN)],
        resolved_at=18,
        near_misses={"none": {**UP, monitor("dead_letters", **RUN): "0x60"}},
    ),
    Case(
        alert="HiddenqRunEtaSlipping",
        severity="warning",
        series={monitor("run_eta_seconds", **RUN): "36000-60x60 32400+120x70 40800-60x200"},
        silent_at=70,
        pending_at=112,
        firing_at=130,
        firing=[_of(RUN)],
        resolved_at=230,
        near_misses={"as foreseen": {monitor("run_eta_seconds", **RUN): "36000-60x200"}},
    ),
    Case(
        alert="HiddenqRunFinished",
        severity="info",
        series={monitor("run_complete", **RUN): "0x10 1x120"},
        silent_at=10,
        firing_at=15,
        firing=[_of(RUN)],
        resolved_at=90,
        near_misses={"complete when Prometheus started": {monitor("run_complete", **RUN): "1x60"}},
    ),
    Case(
        alert="HiddenqStoreErrors",
        severity="critical",
        series={uploader("store_away"): "0x5 1x10 0x30"},
        silent_at=5,
        pending_at=7,
        firing_at=9,
        firing=[SPOOL],
        resolved_at=19,
        near_misses={
            "a hiccup": {uploader("store_away"): "0x5 1 0x30"},
            "two errors": {uploader("errors_total", error="TransientError"): "0x5 1 2x60"},
        },
    ),
    Case(
        alert="HiddenqUploaderMissing",
        severity="warning",
        series={**UP, monitor("worker_up", **UPLOADER): "1x5 0x9 1x30"},
        silent_at=5,
        pending_at=7,
        firing_at=9,
        firing=[_of(UPLOADER)],
        resolved_at=16,
        near_misses={"a restart within two minutes": {**UP, monitor("worker_up", **UPLOADER): "1x5 0x1 1x30"}},
    ),
    Case(
        alert="HiddenqUploadBacklogGrowing",
        severity="warning",
        series={
            **UP,
            monitor("queue_depth", **UPLOAD): "0x5 0+5x40 200-20x10 0x30",
            monitor("queue_oldest_seconds", **UPLOAD): "0x5 0+60x40 0x50",
        },
        silent_at=10,
        pending_at=18,
        firing_at=30,
        firing=[_of(UPLOAD)],
        resolved_at=60,
        near_misses={
            "a big burst that is worked off": {
                **UP,
                monitor("queue_depth", **UPLOAD): "300-5x60",
                monitor("queue_oldest_seconds", **UPLOAD): "0+60x60",
            },
        },
    ),
    Case(
        alert="HiddenqSpoolNearFull",
        severity="warning",
        series={
            **UP,
            monitor("spool_bytes", **SPOOL): "50x5 95x20 50x30",
            monitor("spool_high_mark_bytes", **SPOOL): "100x60",
        },
        silent_at=5,
        pending_at=10,
        firing_at=18,
        firing=[SPOOL],
        resolved_at=30,
        near_misses={
            "at 89 %": {
                **UP,
                monitor("spool_bytes", **SPOOL): "89x60",
                monitor("spool_high_mark_bytes", **SPOOL): "100x60",
            },
        },
    ),
    Case(
        alert="HiddenqDiskFullSoon",
        severity="warning",
        # Level for an hour, then lost so fast that a line through two hours crosses zero within six.
        series={monitor("spool_disk_free_bytes", **SPOOL): "1000x60 1000-8x100 200x200"},
        silent_at=60,
        pending_at=95,
        firing_at=125,
        firing=[_of(SPOOL)],
        resolved_at=250,
        near_misses={"slowly": {monitor("spool_disk_free_bytes", **SPOOL): "1000x10 1000-1x180"}},
    ),
    Case(
        alert="HiddenqSpoolAway",
        severity="warning",
        series={
            **UP,
            monitor("spool_alive", **SPOOL): "1x5 0x10 1x30",
            monitor("queue_depth", **UPLOAD): "12x60",
        },
        silent_at=5,
        pending_at=7,
        firing_at=9,
        firing=[_of(SPOOL)],
        resolved_at=18,
        near_misses={
            "an empty spool": {
                **UP,
                monitor("spool_alive", **SPOOL): "1x5 0x30",
                monitor("queue_depth", **UPLOAD): "0x60",
            },
        },
    ),
    Case(
        alert="HiddenqRedisDown",
        severity="critical",
        series={monitor("redis_up"): "1x5 0x10 1x30"},
        silent_at=5,
        pending_at=7,
        firing_at=9,
        firing=[MONITOR],
        resolved_at=18,
        near_misses={"a restart of Redis": {monitor("redis_up"): "1x5 0x1 1x30"}},
    ),
    Case(
        alert="HiddenqRedisNearFull",
        severity="critical",
        series={
            **UP,
            monitor("redis_memory_bytes"): "50x5 90x20 50x30",
            monitor("redis_memory_max_bytes"): "100x60",
        },
        silent_at=5,
        pending_at=8,
        firing_at=13,
        firing=[MONITOR],
        resolved_at=30,
        near_misses={
            "no limit set": {**UP, monitor("redis_memory_bytes"): "900x60", monitor("redis_memory_max_bytes"): "0x60"}
        },
    ),
    Case(
        alert="HiddenqMonitorDown",
        severity="critical",
        series={monitor("redis_up"): "1x5 stale _x19 1x30"},
        silent_at=5,
        pending_at=7,
        firing_at=9,
        firing=[{}],
        resolved_at=27,
        near_misses={"a restart of the monitor": {monitor("redis_up"): "1x5 stale 1x90"}},
    ),
    Case(
        alert="HiddenqTargetUnreachable",
        severity="warning",
        series={
            selector("up", _scraped(GPU)): "1x5 0x10 1x30",
            monitor("worker_up", **GPU): "1x60",
        },
        silent_at=5,
        pending_at=7,
        firing_at=10,
        firing=[_scraped(GPU)],
        resolved_at=18,
        near_misses={
            "the worker is gone: that has an alert of its own": {
                selector("up", _scraped(GPU)): "1x5 0x30",
                monitor("worker_up", **GPU): "1x5 0x30",
            },
        },
    ),
)
