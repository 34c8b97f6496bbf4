"""Uploads: the store, the uploaders, the spool and its disk."""

from __future__ import annotations

from tests.grafana.alert_cases.case import SPOOL, UP, UPLOAD, UPLOADER, Case, monitor, of_monitor, uploader

CASES = (
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
        firing=[of_monitor(UPLOADER)],
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
        firing=[of_monitor(UPLOAD)],
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
        firing=[of_monitor(SPOOL)],
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
        firing=[of_monitor(SPOOL)],
        resolved_at=18,
        near_misses={
            "an empty spool": {
                **UP,
                monitor("spool_alive", **SPOOL): "1x5 0x30",
                monitor("queue_depth", **UPLOAD): "0x60",
            },
        },
    ),
)
