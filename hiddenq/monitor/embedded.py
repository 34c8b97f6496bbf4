"""A run that has its own Redis (`hiddenq run` without `--redis-url`): whether anything brings it further.

Invariant: such a run is called stopped only if its `hiddenq run` is seen to be gone and no GPU worker that joined it
lives. What its processes reported a moment before they were killed counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import FleetSnapshot, RunState
from hiddenq.delivery.whereabouts import is_gone, this_world


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """What is known of the `hiddenq run` of such a run; while it lives, no commands for a fleet mend anything."""

    is_running: bool
    logs: str
    """The folder of its processes' logs."""


def is_stopped(snapshot: FleetSnapshot, state: RunState, embedded: Embedded) -> bool:
    """Whether something is left of it to do, and nobody does it."""
    num_left = state.record.config.num_batches - state.totals.num_batches - state.num_dead
    if embedded.is_running or state.state == "cancelled" or (state.state == "finished" and num_left <= 0):
        return False
    return not any(
        seen.live and seen.report.state != "draining" and not _has_ended(seen.report)
        for seen in snapshot.workers
        if seen.report.role == "gpu_worker" and seen.report.run in (None, state.record.run)
    )


def _has_ended(report: WorkerReport) -> bool:
    here = this_world()
    return report.host == here["host"] and is_gone({**here, "pid": report.pid})
