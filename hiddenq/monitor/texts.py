"""Numbers as people read them. Bytes are powers of 1024 with their names (GiB), counts are in full."""

from __future__ import annotations

from datetime import UTC, datetime


def format_bytes(value: float | None) -> str:
    """`9.5 GiB`; a dash for None."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_seconds(value: float | None) -> str:
    """`3d 4h`, `4h 05m`, `5m 06s`, `7.2s`; a dash for None."""
    if value is None:
        return "–"
    value = max(value, 0.0)  # two clocks may differ by a hair
    seconds = round(value)
    if value < 60:
        return f"{value:.1f}s" if value < 10 else f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d {seconds % 86400 // 3600}h"


def format_rate(value: float) -> str:
    """`34.5`, `0.21`, `12,345`: three figures are enough to see a change."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}" if 0 < value < 1 else f"{value:.2f}"


def format_share(value: float | None) -> str:
    """`12.3 %`; never rounded up to 100 before all is done; a dash for None."""
    if value is None:
        return "–"
    return "100 %" if value >= 1 else f"{min(value * 100, 99.9):.1f} %"


def format_time(at: float | None) -> str:
    """`2026-11-30 04:05 UTC`; a dash for None."""
    if at is None:
        return "–"
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):  # at a rate of almost nothing
        return "after the year 9999"
