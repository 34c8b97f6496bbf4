"""What each alert must do: a story told in series, one value a minute, and what is on at which minute.

`firing` are the exact labels (without `alertname` and `severity`) of every alert that is on at `firing_at`. A near miss
is a story that comes close and must stay silent all along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Series = dict[str, str]
Labels = dict[str, str]

MONITOR = {"instance": "m:9700", "job": "hiddenq-monitor"}
RUN = {"run": "demo"}
SPOOL = {"host": "node1", "spool_id": "s1"}
GPU = {"role": "gpu_worker", "run": "demo", "host": "node1", "device": "cuda:0", "target": "s1:GPU-a"}
OTHER = {**GPU, "device": "cuda:1", "target": "s1:GPU-b"}
THIRD = {**GPU, "device": "cuda:2", "target": "s1:GPU-c"}
UPLOADER = {"role": "uploader", "run": "", "host": "node1", "device": "", "target": "s1:uploader-0"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The story of one alert."""

    alert: str
    severity: str
    series: Series
    silent_at: int
    pending_at: int | None = None
    """None for an alert that fires at once."""
    firing_at: int
    firing: list[Labels]
    resolved_at: int
    near_misses: dict[str, Series] = field(default_factory=dict)


def selector(name: str, labels: Labels) -> str:
    """A series in Prometheus's notation."""
    return name + "{" + ", ".join(f'{key}="{value}"' for key, value in sorted(labels.items()) if value) + "}"


def monitor(name: str, **labels: str) -> str:
    """A series of the monitor."""
    return selector(f"hiddenq_monitor_{name}", {**labels, **MONITOR})


def gpu(name: str, worker: Labels = GPU, **labels: str) -> str:
    """A series of a GPU worker, with the labels that service discovery gives its target."""
    place = {"instance": worker["target"], "job": "hiddenq", "spool_id": "s1"}
    return selector(f"hiddenq_gpu_worker_{name}", {**worker, **place, **labels})


def uploader(name: str, **labels: str) -> str:
    """A series of an uploader."""
    place = {"instance": UPLOADER["target"], "job": "hiddenq", "spool_id": "s1"}
    return selector(f"hiddenq_uploader_{name}", {**UPLOADER, **place, **labels})


def of_monitor(labels: Labels) -> Labels:
    """What an alert on a series of the monitor is labelled with."""
    return {key: value for key, value in {**labels, **MONITOR}.items() if value}


def scraped(worker: Labels) -> Labels:
    """What an alert on a series of a worker's own is labelled with."""
    return {key: value for key, value in worker.items() if value} | {
        "instance": worker["target"],
        "job": "hiddenq",
        "spool_id": "s1",
    }


UP = {monitor("redis_up"): "1x200"}
EXTRACT = {**RUN, "queue": "extract"}
UPLOAD = {**SPOOL, "queue": "upload"}
