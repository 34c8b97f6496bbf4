"""When something is wrong: the numbers that `status` and the alert rules share."""

from __future__ import annotations

STALL_FACTOR = 3.0
"""A worker is stalled when a batch takes longer than so many times the run's 99th percentile …"""
STALL_FLOOR_SECONDS = 180.0
"""… and longer than this, which covers a run whose batches take a second."""
STRAGGLER_SHARE = 0.6
"""A worker is a straggler below this share of the median tokens a second of the run's busy workers."""
SPOOL_FULL_SHARE = 0.9
"""Of the spool's high mark."""
REDIS_FULL_SHARE = 0.85
"""Of Redis's own limit; above 1 it refuses writes and everything waits."""
DISK_FREE_BYTES = 10 * 1024**3
"""Less free space than this on a spool's disk is said in `status`."""
UPLOAD_OLD_SECONDS = 600.0
"""A shard that has waited longer than this for its upload."""
STARTING_SECONDS = 1800.0
"""A model that takes longer than this to load is not loading."""
SPOOL_FRESH_SECONDS = 30.0
"""A spool without a heartbeat for longer than this is away; its shards are made again much later."""


def stall_limit_seconds(p99_seconds: float, floor_seconds: float = STALL_FLOOR_SECONDS) -> float:
    """How long a worker may go without a finished batch."""
    return max(STALL_FACTOR * p99_seconds, floor_seconds)
