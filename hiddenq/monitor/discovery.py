"""Prometheus HTTP service discovery from the workers' own registrations.

Invariant: a target is a place (spool and GPU), not a process, so a restarted worker continues its series. A dead one
stays listed, and is seen as down, until its host is drained or forgotten. Nobody edits a file when a machine joins.
"""

from __future__ import annotations

from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import FleetSnapshot


def targets_of(snapshot: FleetSnapshot) -> list[dict[str, list[str] | dict[str, str]]]:
    """The answer to Prometheus: one group a worker, with the labels that its series get."""
    return [
        {"targets": [seen.report.metrics_address], "labels": labels_of(seen.report)}
        for seen in snapshot.workers
        if seen.report.metrics_address and (seen.live or not seen.drained)
    ]


def labels_of(report: WorkerReport) -> dict[str, str]:
    """The labels of a target. Empty ones are left out, as Prometheus would."""
    labels = {
        "instance": report.target,
        "target": report.target,
        "role": report.role,
        "run": run_label(report),
        "host": report.host,
        "device": report.device,
        "spool_id": report.spool_id,
    }
    return {name: value for name, value in labels.items() if value}


def run_label(report: WorkerReport) -> str:
    """The run of a GPU worker; an uploader serves whichever run has a shard in its spool, and gets none."""
    return (report.run or "") if report.role == "gpu_worker" else ""
