"""Durations and limits of the delivery promise.

Invariant: they travel in the run's record, so every host of a run uses the same ones; and a lease outlives several
renewals, so one lost packet loses no lease.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hiddenq.contracts.base import Frozen


class DeliverySettings(Frozen):
    """How long leases last, how often a batch is tried, when a host counts as gone."""

    lease_seconds: float = Field(default=30.0, gt=0)
    """Seconds after its last renewal at which an execution counts as dead."""
    renew_seconds: float = Field(default=5.0, gt=0)
    """Seconds between renewals; also between a worker's reports."""
    reap_seconds: float = Field(default=5.0, gt=0)
    """Seconds between two looks for dead executions and due retries, in each process."""
    max_attempts: int = Field(default=4, ge=1)
    """Charged failures after which a batch is a dead letter."""
    retry_delays: tuple[float, ...] = Field(default=(10.0, 60.0, 300.0), min_length=1)
    """Seconds before the second, third, … attempt; the last one repeats."""
    deaths_until_alone: int = Field(default=3, ge=1)
    """Deaths of its process, none charged, after which a job is given out alone, so that it answers for the next."""
    max_remakes: int = Field(default=2, ge=0)
    """Times that a batch is made again because its shard was lost or damaged before its commit."""
    spool_dead_seconds: float = Field(default=600.0, gt=0)
    """Seconds without a heartbeat after which a spool's shards are made again elsewhere."""
    stop_wait_seconds: float = Field(default=60.0, gt=0)
    """Seconds for which a process that was told to stop waits for a Redis that is away."""
    finished_seconds: int = Field(default=3600, ge=1)
    """Seconds for which finished jobs stay visible after the commit; a lost reply must arrive within them."""
    stage_seconds: dict[str, float] = Field(default_factory=lambda: {"gpu": 600.0})
    """Longest stay in a stage, by its name; past it the process dumps its threads and ends. Others have none."""

    @model_validator(mode="after")
    def _lease_outlives_renewals(self) -> Self:
        if self.lease_seconds < 3 * self.renew_seconds:
            raise ValueError(
                f"lease_seconds {self.lease_seconds:g} is under 3 x renew_seconds {self.renew_seconds:g}; "
                "one lost renewal would cost the lease"
            )
        return self

    @property
    def clock_tolerance_seconds(self) -> float:
        """How far the Redis clock may stray from a process's own between two looks before it counts as a jump."""
        return self.renew_seconds
