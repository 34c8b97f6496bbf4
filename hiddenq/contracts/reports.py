"""What a worker says about itself in its heartbeat: the source of `status` and of service discovery.

Invariant: a report is small, is replaced by the next one, and decides nothing: leases decide.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hiddenq.contracts.base import Versioned

WorkerState = Literal["starting", "idle", "busy", "paused", "waiting", "draining", "sick"]
"""`paused`: the spool is over its high mark; `waiting`: Redis or the store is away, or the store refuses."""


class WorkerReport(Versioned):
    """The state of one GPU worker or uploader."""

    schema_version: int = 1
    role: Literal["gpu_worker", "uploader"]
    name: str
    """Unique a process."""
    target: str
    """Stable over restarts: spool id and GPU UUID (or device, or uploader index)."""
    host: str
    pid: int
    spool_id: str
    run: str | None = None
    device: str = ""
    gpu_uuid: str = ""
    gpu_name: str = ""
    metrics_address: str | None = None
    """host:port of its /metrics, as another machine reaches it."""
    state: WorkerState = "starting"
    detail: str = ""
    """One line for a person: what it waits for, why it is sick."""
    batch_id: str | None = None
    batch_seconds: float | None = None
    """Age of the batch in its present stage."""
    num_batches: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    num_bytes: int = 0
    tokens_per_second: float = 0.0
    """Over the last minute."""
    useful_mfu: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    utilization: float | None = Field(default=None, ge=0, le=1)
    throttle: str = ""
    fast_kernels: bool | None = None
    attention: str = ""
    num_oom_splits: int = 0
    num_leases_lost: int = 0
    num_failures: int = 0
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds spent in each stage since the process started (stages overlap)."""
    spool_bytes: int | None = None
    spool_files: int | None = None
    spool_high_bytes: int | None = None
    disk_free_bytes: int | None = None
