"""A set of metrics in which every series has a value, as on a host that has met everything."""

from __future__ import annotations

import time

from prometheus_client import Counter, Histogram

from hiddenq.contracts.metrics import GpuWorkerMetrics, UploaderMetrics


def fill(metrics: GpuWorkerMetrics | UploaderMetrics) -> None:
    """Every series of a set, with a value."""
    for name, metric in vars(metrics).items():
        labels = ["node3" if label == "host" else f"some-{label}" for label in metric._labelnames]
        one = metric.labels(*labels) if labels else metric
        value = time.time() if name.endswith("timestamp") else 1.0
        if isinstance(one, Histogram):
            one.observe(value)
        elif isinstance(one, Counter):
            one.inc(value)
        else:
            one.set(value)
