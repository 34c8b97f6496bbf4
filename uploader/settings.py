"""What one uploader is told at its start.

Invariant: nothing here changes what is stored; everything about a run is learnt from Redis.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hiddenq.contracts.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class UploaderSettings:
    """Settings of one uploader process."""

    spool: Path
    """The spool whose shards it uploads."""
    redis_url: str | None = None
    """Address of Redis; None for HIDDENQ_REDIS_URL."""
    index: int = 0
    """Which of the host's uploaders this is; number 0 also reconciles and sweeps."""
    num_concurrent: int = 2
    """Shards under way at once, so that one is confirmed while the next is sent."""
    spool_high_bytes: int | None = None
    """The spool's high mark, as its workers have it (for metrics)."""
    spool_low_bytes: int | None = None
    """The spool's low mark."""
    nice: int = 10
    """Added to the process's niceness: an uploader never takes a processor from a GPU worker."""
    keep_local: Path | None = None
    """Folder that gets a copy of every run, below its name; None deletes a shard once it is committed."""
    allowed_prefix: str | None = None
    """Refuse runs whose location does not lie below this one."""
    reconcile_seconds: float = 300.0
    """Between two looks for orphans and leftovers."""
    metrics_port: int = 0
    """First port to try for /metrics; 0: none."""
    metrics_bind: str = "127.0.0.1"
    """Address /metrics listens on."""

    def __post_init__(self) -> None:
        if self.num_concurrent < 1:
            raise UsageError(f"num_concurrent {self.num_concurrent}: expected 1 or more shards at once")
        if not 0 <= self.nice <= 19:
            raise UsageError(f"--nice {self.nice}: expected 0 to 19")
        if self.reconcile_seconds <= 0:
            raise UsageError(f"reconcile_seconds {self.reconcile_seconds:g}: expected a positive number")
