"""The alerts as a Prometheus rule file."""

from __future__ import annotations

from typing import Any

from grafana.builder.alerts import DEFAULT_TIMING, Alert, Timing, alerts

RUNBOOK = "grafana/RUNBOOK.md"


def runbook_anchor(alert: Alert) -> str:
    """The alert's section in the runbook."""
    return f"{RUNBOOK}#{alert.name.lower()}"


def rule_file(timing: Timing = DEFAULT_TIMING) -> dict[str, Any]:
    """The whole rule file, ready for YAML."""
    rules = [_rule(alert) for alert in alerts(timing)]
    return {"groups": [{"name": "hiddenq", "interval": f"{timing.interval_seconds}s", "rules": rules}]}


def _rule(alert: Alert) -> dict[str, Any]:
    details = {"details": alert.details} if alert.details else {}
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": f"{alert.for_seconds}s",
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            **details,
            "runbook": runbook_anchor(alert),
            "dashboard": f"/d/hiddenq-{alert.dashboard}",
        },
    }
