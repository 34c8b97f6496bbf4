"""Watching a run: its status, its metrics, and how Prometheus finds the workers.

Consumes what `hiddenq.delivery` says about the fleet (queues, worker reports, ledger) and produces values for people
(`RunStatus`, `render`), for Prometheus (`/metrics`, `/sd`) and for browsers (`/`, `/api/status`). It imports
`hiddenq.contracts`, `hiddenq.delivery` and `hiddenq.telemetry`, never a stage, and decides nothing: leases and the
ledger do. Every look leaves a point in Redis, so that rates and stalls are known to whoever looks next.
"""

from hiddenq.monitor.embedded import Embedded
from hiddenq.monitor.model import Problem, Rate, RunStatus
from hiddenq.monitor.render import render, summary_line, verdict
from hiddenq.monitor.server import MonitorSettings, serve
from hiddenq.monitor.status import run_status
from hiddenq.monitor.texts import format_bytes, format_rate, format_seconds, format_share

__all__ = [
    "Embedded",
    "MonitorSettings",
    "Problem",
    "Rate",
    "RunStatus",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "format_share",
    "render",
    "run_status",
    "serve",
    "summary_line",
    "verdict",
]
