"""What an alert is, and the clock and the memory that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hiddenq.monitor.thresholds import STALL_FLOOR_SECONDS


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert."""

    name: str
    expr: str
    for_seconds: int
    severity: Literal["critical", "warning", "info"]
    summary: str
    description: str
    dashboard: Literal["fleet", "gpu", "uploads", "run"]
    """Where to look first."""
    details: str = ""
    """What only Prometheus can look up while it writes the text."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a test on the clock makes shorter; everyone else takes the defaults."""

    floor_seconds: float = STALL_FLOOR_SECONDS
    """Least time without a finished batch that counts as a stall."""
    restart_seconds: int = 120
    """A restart within this pages nobody."""
    window: str = "10m"
    """Over which rates of single workers are taken."""
    interval_seconds: int = 15
    """Between two evaluations."""


DEFAULT_TIMING = Timing()


def held(selector: str) -> str:
    """The monitor's series, or its last value of up to 15 minutes while the monitor itself is gone."""
    return f"({selector} or (last_over_time({selector}[15m]) and on() absent(hiddenq_monitor_redis_up)))"
