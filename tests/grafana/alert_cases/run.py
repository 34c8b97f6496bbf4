"""Runs: nothing finishes, dead letters, an end that slips, an end that came."""

from __future__ import annotations

from tests.grafana.alert_cases.case import EXTRACT, RUN, UP, Case, monitor, of_monitor

CASES = (
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
        firing=[of_monitor(RUN)],
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
        firing=[of_monitor(RUN)],
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
        firing=[of_monitor(RUN)],
        resolved_at=230,
        near_misses={"as foreseen": {monitor("run_eta_seconds", **RUN): "36000-60x200"}},
    ),
    Case(
        alert="HiddenqRunFinished",
        severity="info",
        series={monitor("run_complete", **RUN): "0x10 1x120"},
        silent_at=10,
        firing_at=15,
        firing=[of_monitor(RUN)],
        resolved_at=90,
        near_misses={"complete when Prometheus started": {monitor("run_complete", **RUN): "1x60"}},
    ),
)
