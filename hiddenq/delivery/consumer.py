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

While Redis is away every call waits, and stage deadlines stand still. A process that was told to stop waits only for
`stop_wait_seconds`, then it leaves what it holds to its leases.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import redis

from hiddenq import telemetry
from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery.connection import Patience
from hiddenq.delivery.departure import Departure
from hiddenq.delivery.endings import Endings
from hiddenq.delivery.held import HeldClaims
from hiddenq.delivery.intake import Intake
from hiddenq.delivery.jobs import M
from hiddenq.delivery.keeper import Keeper
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.signals import StopSignals
from hiddenq.delivery.spool_holders import Presence, SpoolHolders
from hiddenq.delivery.transitions import Claim, Transitions


class Consumer(Endings[M]):
    """Claims jobs of one kind and ends them. Safe to call from several threads; a context manager.

    `queues` are tried in order. `report` says how the process is doing; it is asked at each heartbeat, and its spool is
    kept alive. `presence` is the process's in its spool: a spool that is a copy of another one in use is refused.
    `on_stall(claim, tracebacks)` is called before a stage past its deadline ends the process.
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
        presence: Presence | None = None,
        on_stall: Callable[[Claim[M], str], None] | None = None,
    ) -> None:
        self._ending = threading.Event()
        super().__init__(
            Transitions(client, settings),
            HeldClaims(),
            Patience(give_up=self._ending.is_set),
            host=telemetry.host_name(),
        )
        self.name = name
        self._client = client
        self._queues = [queues] if isinstance(queues, str) else list(queues)
        self._departure: Departure[M] = Departure(
            self._moves,
            self._held,
            name=name,
            queues=lambda: self.queues,
            entry=lambda: self._keeper.entry,
            redis_away=lambda: self.redis_away,
            on_stall=on_stall,
        )
        self.stopping = self._departure.stopping
        """Set by the first signal, or when the host is drained: claim no more."""
        self._intake: Intake[M] = Intake(
            self._moves,
            self._held,
            message,
            name=name,
            host=self._host,
            stopping=self.stopping,
            hand_back=self.hand_back,
        )
        self._signals: StopSignals | None = None
        self._holders = (
            SpoolHolders(client, presence, settings=settings, give_up=self._ending.is_set) if presence else None
        )
        self._keeper = Keeper(
            client, self._moves, self._held, consumer=self, departure=self._departure, report=report, host=self._host
        )

    # Life

    def start(self) -> None:
        """Register, and begin to renew, report and reap.

        Raises:
            UsageError: this host is drained, or the spool is a copy of one that is in use.
        """
        if self._patiently(lambda: self._client.sismember("hiddenq:drained", self._host)):
            raise UsageError(f"host {self._host} is drained; `hiddenq forget {self._host}` lets it work again")
        if self._holders:
            self._holders.start()
        self._patiently(self._keeper.beat)
        self._keeper.start()

    def close(self, *, withdraw: bool = False) -> None:
        """Hand back at once what is still held, and leave. `withdraw`: nobody is to expect this process back."""
        self.stopping.set()
        self._ending.set()
        self._keeper.close()
        self._departure.leave(withdraw=withdraw)
        if self._holders:
            self._holders.close()
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
        return self._patiently.waiting or self._intake.waiting or self._keeper.away

    @property
    def redis_epoch(self) -> str:
        """The same text for as long as Redis keeps its data; known from the first heartbeat on."""
        return self._keeper.epoch

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

        Nor does a process claim anew what it has just handed back, while a stall ends it beside this thread.

        Raises:
            UnknownSchema: a message of a newer hiddenq; everything was handed back, and this process should end.
            UsageError: the spool is a copy of one that is in use; likewise.
        """
        if self._holders:
            self._holders.check()
        is_ending = self.stopping.is_set() or self._departure.is_leaving
        return [] if is_ending else self._intake.claim(self.queues, limit)

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
