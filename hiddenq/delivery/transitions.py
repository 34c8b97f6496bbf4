"""The moves of a job, each one Lua script: values in, verdict out, no waiting and no threads.

Invariant: every move out of `started` is fenced. It happens only if the job still belongs to the execution that asks,
so a process that lost its lease can change nothing; and asking again after a lost reply gives the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

import redis

from hiddenq.contracts import names
from hiddenq.contracts.messages import LedgerEntry, ShardReady
from hiddenq.delivery import jobs
from hiddenq.delivery.jobs import M
from hiddenq.delivery.scripts import Scripts
from hiddenq.delivery.settings import DeliverySettings

CHARGED_STAGE = "gpu"
"""The stage whose death is the batch's to answer for; reap.lua and enter.lua know it, too."""


@dataclass(frozen=True)
class RawClaim:
    """A claim whose message has not been read yet."""

    job_id: str
    queue: str
    execution: str
    data: bytes
    num_attempts: int


@dataclass(eq=False)
class Claim(Generic[M]):
    """A job that this process holds a lease on."""

    message: M
    execution: str
    """8 hexadecimal digits."""
    attempt: int
    """1 the first time, one more after each charged failure."""
    job_id: str
    queue: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How an execution ended without a result."""

    error: str
    """Class and message, one line."""
    traceback: str = ""
    charged: bool = False
    dead: bool = False
    delay_seconds: float = 0.0
    device: str = ""


@dataclass(frozen=True)
class Beat:
    """The answer to a heartbeat."""

    now: float
    """The Redis server's clock."""
    drained: bool
    epoch: str
    """The same for as long as Redis keeps its data."""
    lost: frozenset[str]
    """Executions whose lease is gone."""


class Transitions:
    """The moves, on one client. Errors of the client library pass through."""

    def __init__(self, client: redis.Redis, settings: DeliverySettings) -> None:
        self.settings = settings
        self._run = Scripts(client).run

    def claim(
        self, queues: str | Sequence[str], *, worker: str, host: str, executions: Sequence[str]
    ) -> list[RawClaim]:
        """Take up to as many jobs as there are executions; the same executions again give the same claims again."""
        answer = self._run(
            "claim",
            queues=[(queue, jobs.run_of(queue)) for queue in ([queues] if isinstance(queues, str) else queues)],
            worker=worker,
            host=host,
            lease_seconds=self.settings.lease_seconds,
            deaths_until_alone=self.settings.deaths_until_alone,
            max_data_bytes=jobs.MAX_DATA_BYTES,
            executions=list(executions),
        )
        return [
            RawClaim(job.decode(), queue.decode(), execution.decode(), data, int(attempts))
            for job, queue, execution, data, attempts in zip(*(iter(answer),) * 5, strict=True)
        ]

    def enter(self, job_id: str, execution: str, stage: str) -> bool:
        """Enter a stage and renew; False if the claim is lost."""
        lease_seconds = self.settings.lease_seconds
        return bool(self._run("enter", job=job_id, execution=execution, stage=stage, lease_seconds=lease_seconds))

    def beat(
        self,
        *,
        worker: str,
        queues: Sequence[str],
        fields: dict[str, Any],
        entry: str,
        report: str,
        spool_id: str,
        host: str,
        claims: Sequence[tuple[str, str]],
    ) -> Beat:
        """Register, renew `claims` (job id, execution), report, keep the spool alive."""
        now, drained, epoch, *lost = self._run(
            "beat",
            worker=worker,
            queues=list(queues),
            fields=flat(fields),
            kept_seconds=max(60, int(2 * self.settings.lease_seconds)),
            entry=entry,
            report=report,
            spool_id=spool_id,
            host=host,
            lease_seconds=self.settings.lease_seconds,
            claims=list(claims),
        )
        return Beat(float(now), bool(drained), epoch.decode(), frozenset(execution.decode() for execution in lost))

    def publish(self, job_id: str, execution: str, shard: ShardReady, *, host: str) -> bool:
        """Finish an extract job and queue its upload; False if the claim is lost."""
        verdict = self._run(
            "publish",
            *flat(jobs.job_fields(shard)),
            job=job_id,
            execution=execution,
            run=shard.batch.run,
            batch_id=shard.batch.batch_id,
            upload_job=jobs.job_id(shard),
            upload_queue=jobs.queue_of(shard),
            spool_id=shard.spool_id,
            file_name=shard.file_name,
            host=host,
        )
        return bool(verdict == b"done")

    def settle(
        self, job_id: str, execution: str, shard: ShardReady, entry: LedgerEntry | None
    ) -> Literal["committed", "twin", "lost"]:
        """Finish an upload job, committing `entry` if there is one and the batch has none."""
        batch = shard.batch
        return self._run(  # type: ignore[no-any-return]
            "settle",
            job=job_id,
            execution=execution,
            run=batch.run,
            batch_id=batch.batch_id,
            extract_job=jobs.job_id(batch),
            kept_seconds=self.settings.finished_seconds,
            shard_execution=shard.execution,
            entry=entry.to_json() if entry else "",
            num_samples=entry.num_samples if entry else 0,
            num_tokens=entry.num_tokens if entry else 0,
            num_bytes=entry.num_bytes if entry else 0,
        ).decode()

    def give_back(self, job_id: str, execution: str, failure: Failure) -> Literal["retry", "dead", "lost"]:
        """End an execution without a result."""
        return self._run(  # type: ignore[no-any-return]
            "give_back",
            job=job_id,
            execution=execution,
            charged=failure.charged,
            dead=failure.dead,
            delay_seconds=failure.delay_seconds,
            max_attempts=self.settings.max_attempts,
            retry_delays=self.settings.retry_delays,
            error=failure.error,
            exc=jobs.pack_traceback(failure.traceback or failure.error),
            reason=failure.traceback or failure.error,
            device=failure.device,
        ).decode()

    def remake(
        self, shard: ShardReady, *, execution: str | None, error: str, traceback: str = ""
    ) -> Literal["remade", "dead", "held", "committed", "lost"]:
        """End an upload job and send its batch to the GPU again.

        `execution` is the uploader's; None means that the shard's whole spool has no heartbeat any more.
        """
        batch = shard.batch
        return self._run(  # type: ignore[no-any-return]
            "remake",
            *flat(jobs.job_fields(batch)),
            job=jobs.job_id(shard),
            run=batch.run,
            batch_id=batch.batch_id,
            extract_job=jobs.job_id(batch),
            extract_queue=jobs.queue_of(batch),
            max_remakes=self.settings.max_remakes,
            error=error,
            exc=jobs.pack_traceback(traceback or error),
            reason=f"made again {self.settings.max_remakes} times; at last: {error}",
            execution=execution,
            spool_id=shard.spool_id,
            spool_dead_seconds=self.settings.spool_dead_seconds,
        ).decode()

    def leave(self, *, worker: str, queues: Sequence[str], entry: str, withdraw: bool) -> int:
        """Hand back whatever `worker` holds and take it off the lists; returns how many claims went back."""
        return int(self._run("leave", worker=worker, queues=list(queues), entry=entry, withdraw=withdraw))


def new_executions(num: int) -> list[str]:
    """As many execution ids."""
    return [names.new_execution() for _ in range(num)]


def flat(fields: Mapping[str, Any]) -> list[Any]:
    """A hash as names and values in turn."""
    return [value for pair in fields.items() for value in pair]


def claim_of(raw: RawClaim, message: type[M]) -> Claim[M]:
    """Read a claim's message.

    Raises:
        UnknownSchema: it is of a newer hiddenq.
        BadMessage: it breaks the contract.
    """
    read = jobs.unpack(raw.data, message)
    jobs.check_id(read, raw.job_id, raw.queue)
    return Claim(read, raw.execution, raw.num_attempts + 1, raw.job_id, raw.queue)
