"""GPU workers: stalled, missing, sick, starting for ever, slow, throttled, broken."""

from __future__ import annotations

from tests.grafana.alert_cases.case import EXTRACT, GPU, OTHER, RUN, THIRD, UP, Case, gpu, monitor, of_monitor, scraped

PER_GPU = {name: GPU[name] for name in ("run", "host", "device", "target")}
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
        firing=[of_monitor(GPU)],
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
        firing=[of_monitor(GPU)],
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
        firing=[{**scraped(GPU), "state": "sick"}],
        resolved_at=27,
        near_misses={"busy": {gpu("state", state="busy"): "1x60"}},
    ),
    Case(
        alert="HiddenqGpuWorkerStuckStarting",
        severity="warning",
        series={**UP, monitor("worker_starting_seconds", **GPU): "0+60x40 0x20"},
        silent_at=29,
        firing_at=35,
        firing=[of_monitor(GPU)],
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
        firing=[scraped(GPU)],
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
        firing=[{**scraped(GPU), "reason": "hardware_thermal"}],
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
        firing=[scraped(GPU)],
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
)
