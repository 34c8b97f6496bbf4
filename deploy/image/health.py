#!/usr/bin/env python
"""Whether this container does its work, for a health check: exit 0 or 1, with the reason in one line.

Invariant: alive is not enough. The monitor must have looked at Redis within a minute; a worker or uploader must serve
its metrics, and not every GPU worker may be sick. What stalls without dying is what alerts are for: a check that
restarts a slow batch would only make it slower.
"""

from __future__ import annotations

import os
import re
import time
import urllib.request

MAX_PROCESSES = 16
SNAPSHOT_SECONDS = 60.0


def main() -> int:
    """Check the processes behind this container's metrics ports."""
    base = int(os.environ.get("HIDDENQ_METRICS_PORT") or 9400)
    pages = [page for port in range(base, base + MAX_PROCESSES) if (page := metrics(port))]
    reason = verdict(pages, time.time())
    print(reason or f"{len(pages)} processes are well")
    return 1 if reason else 0


def verdict(pages: list[str], now: float) -> str | None:
    """Why these metrics are not those of a healthy container; None if they are."""
    if not pages:
        return "no process serves metrics"
    if looked := value(pages[0], "hiddenq_monitor_snapshot_timestamp_seconds"):
        if now - looked > SNAPSHOT_SECONDS:
            return f"the last look at Redis was {now - looked:.0f} s ago"
        return None
    if all(value(page, 'hiddenq_gpu_worker_state{state="sick"}') == 1 for page in pages):
        return "every GPU worker is sick"
    return None


def value(page: str, name: str) -> float | None:
    """One sample's value."""
    match = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(match[1]) if match else None


def metrics(port: int) -> str:
    """What a process says of itself; empty if none listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=3) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
