"""What all stages need: Redis, the monitor, a way for Prometheus to its targets."""

from __future__ import annotations

from tests.grafana.alert_cases.case import GPU, MONITOR, UP, Case, monitor, scraped, selector

CASES = (
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
            selector("up", scraped(GPU)): "1x5 0x10 1x30",
            monitor("worker_up", **GPU): "1x60",
        },
        silent_at=5,
        pending_at=7,
        firing_at=10,
        firing=[scraped(GPU)],
        resolved_at=18,
        near_misses={
            "the worker is gone: that has an alert of its own": {
                selector("up", scraped(GPU)): "1x5 0x30",
                monitor("worker_up", **GPU): "1x5 0x30",
            },
        },
    ),
)
