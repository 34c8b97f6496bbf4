"""Every alert, once: what Prometheus evaluates and what Grafana evaluates come from here.

Invariant: an alert watches a symptom that only real progress clears. Heartbeats and utilisation clear none. A symptom
read from the monitor outlives the monitor: `held` keeps its last value for a quarter of an hour when, and only when,
the monitor's own series are gone, so losing it neither resolves an alert nor hides one (and has an alert of its own).

One file a subject, as the dashboards have; `alert.py` says what an alert is. Texts use Prometheus's templates:
`$labels`, `$value`. Thresholds are those of `hiddenq status`.

"""

from __future__ import annotations

from grafana.builder.alerts.alert import DEFAULT_TIMING, Alert, Timing
from grafana.builder.alerts.gpu import of_gpu_workers
from grafana.builder.alerts.middle import of_the_middle
from grafana.builder.alerts.run import of_runs
from grafana.builder.alerts.uploads import of_uploads

__all__ = ["DEFAULT_TIMING", "Alert", "Timing", "alerts"]


def alerts(timing: Timing = DEFAULT_TIMING) -> tuple[Alert, ...]:
    """All alerts, critical ones first within each subject."""
    return (*of_gpu_workers(timing), *of_runs(), *of_uploads(timing), *of_the_middle(timing))
