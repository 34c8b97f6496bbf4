"""One process's hold on its jobs: claim, stages, result; and what it survives.

Invariant: between `claim` and the call that ends it, a claim is either renewed or another execution's. Every call that
ends one is fenced and can be repeated, so finished work is handed over exactly once however often Redis goes away.

    queued ──claim──► started:claimed ──enter──► started:gpu ──enter──► started:write ──publish──► finished
      ▲  ▲                   │                        │                       │             + upload job: queued
      │  └──── hand_back, lease ran out, host lost ───┼───────────────────────┘
      │                                               │
      └──── scheduled (waits longer each time) ◄──fail, died on the GPU──► failed: a dead letter

    upload job:  queued ──claim──► started ──commit──► finished (ledger entry, if the batch had none)
                   ▲                  │  └──remake──► removed, and its extract job: queued (twice, then failed)
                   └─ hand_back, fail ┘

While Redis is away every call waits, and stage deadlines stand still.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Self

import redis

from hiddenq import telemetry
from hiddenq.contracts.errors import BadMessage, LeaseLost, RedisAway, UnknownSchema, UsageError
from hiddenq.contracts.messages import BatchJob, LedgerEntry, ShardReady
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery.connection import Patience, T
from hiddenq.delivery.departure import Departure
from hiddenq.delivery.failures import failure_of, one_line
from hiddenq.delivery.held import HeldClaims
from hiddenq.delivery.jobs import M
from hiddenq.delivery.keeper import Keeper
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.signals import StopSignals
from hiddenq.delivery.transitions import Claim, Failure, RawClaim, Transitions, claim_of, new_executions


def worker_name(role: str) -> str:
    """A name that no other process has, whatever container or host it runs on."""
    return f"{role}-{telemetry.host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


class Consumer(Generic[M]):
    """Claims jobs of one kind and ends them. Safe to call from several threads; a context manager.

    `queues` are tried in order. `report` says how the process is doing; it is asked at each heartbeat, and its spool is
    kept alive. `on_stall(claim, tracebacks)` is called before a stage past its deadline ends the process.
    """

    def __init__(
        self,
        client: redis.Redis,
        queues: str | Sequence[str],
        message: type[M],
        *,
        name: str,
        settings: DeliverySettings,
        report: Callable[[], WorkerReport],
        on_stall: Callable[[Claim[M], str], None] | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._message = message
        self._queues = [queues] if isinstance(queues, str) else list(queues)
        self._moves = Transitions(client, settings)
        self._settings = settings
        self._host = telemetry.host_name()
        self._held: HeldClaims[M] = HeldClaims()
        self._departure: Departure[M] = Departure(
            self._moves,
            self._held,
            name=name,
            queues=lambda: self.queues,
            entry=lambda: self._keeper.entry,
            on_stall=on_stall,
        )
        self.stopping = self._departure.stopping
        """Set by the first signal, or when the host is drained: claim no more."""
        self._ending = threading.Event()
        self._patiently = Patience(give_up=self._ending.is_set)
        self._patiently_claim = Patience(give_up=self.stopping.is_set)
        self._signals: StopSignals | None = None
        self._keeper = Keeper(
            client, self._moves, self._held, consumer=self, departure=self._departure, report=report, host=self._host
        )

    # Life

    def start(self) -> None:
        """Register, and begin to renew, report and reap.

        Raises:
            UsageError: this host is drained.
        """
        if self._patiently(lambda: self._client.sismember("hiddenq:drained", self._host)):
            raise UsageError(f"host {self._host} is drained; `hiddenq forget {self._host}` lets it work again")
        self._patiently(self._keeper.beat)
        self._keeper.start()

    def close(self, *, withdraw: bool = False) -> None:
        """Hand back at once what is still held, and leave. `withdraw`: nobody is to expect this process back."""
        self.stopping.set()
        self._ending.set()
        self._keeper.close()
        self._departure.leave(withdraw=withdraw)
        if self._signals:
            self._signals.uninstall()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def install_signals(self) -> None:
        """SIGTERM or SIGINT: once sets `stopping`; again hands everything back and ends the process (143, 130).

        In the main thread only.
        """
        self._signals = StopSignals(first=self._departure.stop, again=self._departure.stop_at_once)
        self._signals.install()

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked this process to stop; None if none did."""
        return self._departure.stop_signal

    @property
    def redis_away(self) -> bool:
        """Whether this process waits for Redis now."""
        return self._patiently.waiting or self._patiently_claim.waiting or self._keeper.away

    @property
    def queues(self) -> list[str]:
        """The queues it claims from, in order."""
        return list(self._queues)

    def listen(self, queues: Sequence[str]) -> None:
        """Claim from these queues from now on, in this order."""
        self._queues = list(queues)

    # Claims

    def claim(self, limit: int = 1) -> list[Claim[M]]:
        """Up to `limit` jobs; [] if nothing waits, or once stopping. Messages that break the contract are set aside.

        Raises:
            UnknownSchema: a message of a newer hiddenq; everything was handed back, and this process should end.
        """
        executions = new_executions(limit)
        claims: list[Claim[M]] = []
        for queue in self.queues:
            if self.stopping.is_set() or not executions:
                break
            claims += self._read(self._claim_raw(queue, executions))
            taken = {claim.execution for claim in claims}
            executions = [execution for execution in executions if execution not in taken]
        return claims

    def _claim_raw(self, queue: str, executions: Sequence[str]) -> list[RawClaim]:
        try:
            return self._patiently_claim(
                lambda: self._moves.claim(queue, worker=self.name, host=self._host, executions=executions)
            )
        except RedisAway:
            return []  # stopping; if the reply was lost, leaving hands back what it held

    def _read(self, raws: list[RawClaim]) -> list[Claim[M]]:
        claims: list[Claim[M]] = []
        for position, raw in enumerate(raws):
            try:
                claim = claim_of(raw, self._message)
            except BadMessage as error:
                self._refuse(raw, Failure(error=one_line(error), dead=True))
                telemetry.logger().error("message_refused", job=raw.job_id, error=str(error), next="set aside")
            except UnknownSchema:
                for unread in raws[position:]:
                    self._refuse(unread, Failure(error=""))
                for read in claims:
                    self.hand_back(read)
                raise
            else:
                self._held.add(claim)
                claims.append(claim)
        return claims

    def _refuse(self, raw: RawClaim, failure: Failure) -> None:
        self._patiently(lambda: self._moves.give_back(raw.job_id, raw.execution, failure))

    def enter(self, claim: Claim[M], stage: str) -> None:
        """Enter a stage; it is in Redis when this returns, and its deadline runs from now.

        A batch that was charged before is on the GPU alone: entering `gpu` waits until the others have left it (by
        another thread entering their next stage, or ending them).

        Raises:
            LeaseLost: another execution owns the job now.
        """
        self._held.enter(claim, stage)
        if not self._patiently(lambda: self._moves.enter(claim.job_id, claim.execution, stage)):
            self._lose(claim, f"could not enter {stage}")

    def lost(self, claim: Claim[M]) -> bool:
        """Whether the last renewal found the lease gone. Only the call that ends the claim decides."""
        return self._held.is_lost(claim)

    @contextlib.contextmanager
    def pause_deadlines(self) -> Iterator[None]:
        """Stage deadlines stand still inside: the process waits for something that is not its fault."""
        with self._held.paused():
            yield

    def execution_is_dead(self, execution: str) -> bool:
        """Whether what an execution left behind (temporary files, unfinished uploads) may be swept.

        False while this process has not watched Redis for a whole lease; True if it was not renewed for three leases,
        and also if Redis knows nothing of it: the caller then looks at the age of the file.
        """
        return self._keeper.execution_is_dead(execution)

    # Ends of a claim

    def publish(self, claim: Claim[BatchJob], shard: ShardReady) -> None:
        """The batch's shard lies in the spool: extract job finished, upload job queued, lease released, in one step.

        Raises:
            LeaseLost: another execution owns the batch; the caller deletes its own file.
        """
        if not self._end(claim, lambda: self._moves.publish(claim.job_id, claim.execution, shard, host=self._host)):
            self._lose(claim, f"{shard.file_name} is not published; delete it")

    def commit(self, claim: Claim[ShardReady], entry: LedgerEntry) -> bool:
        """The shard is in the store, its checksum confirmed: ledger entry (if the batch has none) and job finished.

        Returns:
            True if this shard is the batch's; False if another execution's is, and this one is a twin.

        Raises:
            LeaseLost: another uploader has this job now.
        """
        return self._settle(claim, entry) == "committed"

    def finish(self, claim: Claim[ShardReady]) -> None:
        """There is nothing to commit: the batch has its shard already.

        Raises:
            LeaseLost: another uploader has this job now.
        """
        self._settle(claim, None)

    def _settle(self, claim: Claim[ShardReady], entry: LedgerEntry | None) -> str:
        verdict = self._end(claim, lambda: self._moves.settle(claim.job_id, claim.execution, claim.message, entry))
        if verdict == "lost":
            self._lose(claim, f"{claim.message.file_name} is not committed")
        return verdict

    def remake(self, claim: Claim[ShardReady], reason: str) -> Literal["remade", "dead", "held", "committed"]:
        """The shard is lost or damaged: the upload job ends and its batch goes back to the GPU.

        Returns:
            "remade"; "dead" if it was made again too often; "held" if another execution of the batch is on its way
            already; "committed" if the batch needs nothing more.

        Raises:
            LeaseLost: another uploader has this job now.
        """
        verdict = self._end(claim, lambda: self._moves.remake(claim.message, execution=claim.execution, error=reason))
        if verdict == "lost":
            self._lose(claim, f"{claim.message.file_name} is not made again")
        return verdict

    def fail(self, claim: Claim[M], error: BaseException, *, device: str = "") -> Literal["retry", "dead", "lost"]:
        """The execution failed; the class of `error` says what happens next (failures.py)."""
        if isinstance(error, LeaseLost):
            self._held.remove(claim)
            return "lost"
        failure = failure_of(error, self._settings, device=device)
        verdict = self._end(claim, lambda: self._moves.give_back(claim.job_id, claim.execution, failure))
        telemetry.logger().warning(
            "execution_failed", job=claim.job_id, attempt=claim.attempt, error=failure.error, next=verdict
        )
        return verdict

    def hand_back(self, claim: Claim[M], *, delay_seconds: float = 0.0) -> None:
        """Give the job back uncharged: to the front, or after a delay. A claim that is lost is simply let go."""
        failure = Failure(error="", delay_seconds=delay_seconds)
        self._end(claim, lambda: self._moves.give_back(claim.job_id, claim.execution, failure))

    def _end(self, claim: Claim[Any], move: Callable[[], T]) -> T:
        """Make the move that ends a claim; whatever it says, the claim is held no longer."""
        verdict = self._patiently(move)
        self._held.remove(claim)
        return verdict

    def _lose(self, claim: Claim[Any], what: str) -> NoReturn:
        self._held.remove(claim)
        raise LeaseLost(f"{claim.job_id}: execution {claim.execution} lost its lease to another one; {what}")
