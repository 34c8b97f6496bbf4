"""`RunStatus`: one moment of one run, as a value that JSON, the terminal and the page are made from.

Invariant: totals of committed work are the ledger's, exactly; what workers count (executions) stands apart, since a
batch that ran twice is counted twice there and once here. Times are seconds on the Redis server's clock.
"""

from __future__ import annotations

from typing import Literal

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.reports import WorkerState

Severity = Literal["critical", "warning", "info"]


class Totals(Frozen):
    """Batches, samples and real tokens."""

    num_batches: int
    num_samples: int
    num_tokens: int


class Rate(Frozen):
    """Work a second."""

    samples_per_second: float
    tokens_per_second: float
    source: Literal["ledger", "workers"]
    """`ledger`: committed work; `workers`: what the workers report, until the ledger has moved between two looks."""


class WorkerStatus(Frozen):
    """One GPU worker or uploader."""

    role: Literal["gpu_worker", "uploader"]
    name: str
    target: str
    host: str
    pid: int
    device: str
    gpu_name: str
    gpu_uuid: str
    alive: bool
    drained: bool
    heartbeat_seconds: float
    """Age of its last heartbeat."""
    state: WorkerState
    detail: str
    state_seconds: float
    stalled_seconds: float
    """Seconds in which it could have finished a batch and did not."""
    batch_id: str | None
    batch_seconds: float | None
    num_batches: int
    num_failures: int
    num_oom_splits: int
    num_leases_lost: int
    tokens_per_second: float
    useful_mfu: float | None
    padding: float | None
    """Share of the tokens it ran that were padding."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    utilization: float | None
    throttle: str
    fast_kernels: bool | None
    attention: str
    metrics_address: str | None


class QueueStatus(Frozen):
    """The extract queue of the run, or the upload queue of one spool."""

    queue: Literal["extract", "upload"]
    run: str
    spool_id: str
    host: str
    num_waiting: int
    oldest_seconds: float
    num_started: int
    num_delayed: int


class SpoolStatus(Frozen):
    """One spool: the finished shards of a host that wait for their upload."""

    spool_id: str
    host: str
    alive: bool
    num_files: int | None
    num_bytes: int | None
    high_bytes: int | None
    """GPU workers of the host pause above this."""
    disk_free_bytes: int | None


class DeadLetterStatus(Frozen):
    """A batch set aside after its last attempt."""

    batch_id: str
    num_samples: int
    num_attempts: int
    reason: str


class RedisStatus(Frozen):
    """The server that holds the queues."""

    memory_bytes: int
    memory_max_bytes: int
    """0: no limit."""


class Problem(Frozen):
    """One thing that is wrong, and what to do."""

    severity: Severity
    what: str
    do: str


class RunStatus(Frozen):
    """One moment of a run."""

    run: str
    location: str
    model: str
    state: Literal["live", "stopped", "finished", "cancelled"]
    """`finished`: its manifest is written; `stopped`: it has its own Redis, and no `hiddenq run` works on it."""
    at: float
    total: Totals
    """What the run is to have."""
    committed: Totals
    """What the ledger has: in the store, checksum verified."""
    committed_bytes: int
    """Bytes of the committed shards: what the store holds of this run."""
    executed: Totals
    """What the registered workers have finished since they started; twins and lost work are in it."""
    share: float
    """Committed share of the run's tokens, 0 to 1."""
    complete: bool
    rate: Rate | None
    """Over the last minutes; None while nothing is known."""
    mean_rate: Rate | None
    """Since this run was first looked at."""
    eta_seconds: float | None
    """At the present rate, by tokens; None without one."""
    eta_at: float | None
    batch_p99_seconds: float
    """0 before the first batch."""
    padding: float
    """Share of padding in the planned batches."""
    workers: tuple[WorkerStatus, ...]
    queues: tuple[QueueStatus, ...]
    spools: tuple[SpoolStatus, ...]
    num_dead_letters: int
    dead_letters: tuple[DeadLetterStatus, ...]
    """The first 20."""
    redis: RedisStatus
    problems: tuple[Problem, ...]
    """Worst first; empty when all is well."""
