"""How a process ends: asked to, asked again, asked while Redis is away, or held up by a stage that does not end.

Invariant: however it ends, it tries once, and only for seconds, to hand back what it holds; if Redis can't be reached
the leases run out, and nothing is lost but time. Once asked it does end: nobody may be left to ask again, or to bring
its Redis back, and it may hold a GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn

from hiddenq import telemetry
from hiddenq.contracts.errors import HiddenqError, RedisAway, RedisRefused
from hiddenq.delivery.connection import away_errors
from hiddenq.delivery.held import Held, HeldClaims, all_threads
from hiddenq.delivery.jobs import M
from hiddenq.delivery.transitions import Claim, Failure, Transitions

STALLED_STATUS = 70
"""Exit status of a process that a stage held past its deadline."""
LOOK_SECONDS = 1.0
"""Between two looks whether Redis is away."""
STALL_GRACE_SECONDS = 20.0
"""Longest time in which a stalled process tells Redis why it ends."""


class Departure(Generic[M]):
    """The ways out of one consumer's process."""

    def __init__(
        self,
        moves: Transitions,
        held: HeldClaims[M],
        *,
        name: str,
        queues: Callable[[], Sequence[str]],
        entry: Callable[[], str],
        redis_away: Callable[[], bool],
        on_stall: Callable[[Claim[M], str], None] | None,
    ) -> None:
        self.stopping = threading.Event()
        self.stop_signal: int | None = None
        self._moves = moves
        self._held = held
        self._name = name
        self._queues = queues
        self._entry = entry
        self._redis_away = redis_away
        self._left = threading.Event()
        self._on_stall = on_stall

    @property
    def is_leaving(self) -> bool:
        """Whether what is held is being handed back, or was."""
        return self._left.is_set()

    def stop(self, signum: int) -> None:
        """First signal: claim no more."""
        self.stop_signal = signum
        self.stopping.set()
        telemetry.logger().info("stopping", signal=signum, held=len(self._held), next="finishing what is held")
        threading.Thread(target=self._wait_for_redis, args=(signum,), name="departure", daemon=True).start()

    def _wait_for_redis(self, signum: int) -> None:
        """End at once when Redis stays away for too long."""
        seconds = self._moves.settings.stop_wait_seconds
        until = time.monotonic() + seconds
        while not self._left.wait(min(LOOK_SECONDS, seconds / 4)):
            if not self._redis_away():
                until = time.monotonic() + seconds
            elif time.monotonic() >= until:
                self.stop_at_once(signum)

    def stop_at_once(self, signum: int) -> NoReturn:
        """Another signal, or no Redis: hand back and end the process."""
        telemetry.logger().warning("stopping_at_once", signal=signum, held=len(self._held), next="handing it back")
        try:
            self.leave(withdraw=False)
        finally:
            os._exit(128 + signum)

    def stall(self, held: Held[M]) -> NoReturn:
        """A stage is past its deadline: record it with all threads' tracebacks, hand back the rest, end the process."""
        last_resort = threading.Timer(STALL_GRACE_SECONDS, os._exit, (STALLED_STATUS,))
        last_resort.daemon = True
        last_resort.start()
        claim, tracebacks = held.claim, all_threads()
        error = f"StageDeadline: {held.spent_seconds:.0f} s in stage {held.stage}"
        telemetry.logger().critical("stalled", job=claim.job_id, error=error, threads=tracebacks)
        try:
            if self._on_stall:
                self._on_stall(claim, tracebacks)
            failure = Failure(error=error, traceback=tracebacks, charged=True)
            with away_errors():
                self._moves.give_back(claim.job_id, claim.execution, failure)
            self.leave(withdraw=False)
        except HiddenqError as away:
            telemetry.logger().error("stall_not_recorded", error=str(away), next="the lease runs out")
        finally:
            os._exit(STALLED_STATUS)

    def leave(self, *, withdraw: bool) -> None:
        """Hand back what is held and be no worker any more; `withdraw`: nobody is to expect it back."""
        self._left.set()
        try:
            with away_errors():
                self._moves.leave(worker=self._name, queues=self._queues(), entry=self._entry(), withdraw=withdraw)
        except (RedisAway, RedisRefused) as error:
            telemetry.logger().warning("left_without_word", error=str(error), next="leases run out by themselves")
