"""What a process takes in: raw claims, read into messages or refused.

Invariant: every job that Redis gave to this process is either held as a claim or was handed back or set aside before
`claim` returns; so nothing that can't be read is held, and nothing that is held can't be read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic

from hiddenq import telemetry
from hiddenq.contracts.errors import BadMessage, RedisAway, UnknownSchema
from hiddenq.delivery.connection import Patience
from hiddenq.delivery.failures import one_line
from hiddenq.delivery.held import HeldClaims
from hiddenq.delivery.jobs import M
from hiddenq.delivery.transitions import Claim, Failure, RawClaim, Transitions, claim_of, new_executions


class Intake(Generic[M]):
    """Claims jobs of one kind for one process."""

    def __init__(
        self,
        moves: Transitions,
        held: HeldClaims[M],
        message: type[M],
        *,
        name: str,
        host: str,
        stopping: threading.Event,
        hand_back: Callable[[Claim[M]], None],
    ) -> None:
        self._moves = moves
        self._held = held
        self._message = message
        self._name = name
        self._host = host
        self._patiently = Patience(give_up=stopping.is_set)
        self._hand_back = hand_back

    @property
    def waiting(self) -> bool:
        """Whether it waits for Redis now."""
        return self._patiently.waiting

    def claim(self, queues: Sequence[str], limit: int) -> list[Claim[M]]:
        """Up to `limit` jobs of the queues, in order; [] if nothing waits. A lost reply is asked for again.

        Raises:
            UnknownSchema: a message of a newer hiddenq; everything was handed back.
        """
        executions = new_executions(limit)
        try:
            return self._read(
                self._patiently(
                    lambda: self._moves.claim(queues, worker=self._name, host=self._host, executions=executions)
                )
            )
        except RedisAway:
            return []  # stopping; if the reply was lost, leaving hands back what it held

    def _read(self, raws: Sequence[RawClaim]) -> list[Claim[M]]:
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
                    self._hand_back(read)
                raise
            else:
                self._held.add(claim)
                claims.append(claim)
        return claims

    def _refuse(self, raw: RawClaim, failure: Failure) -> None:
        self._patiently(lambda: self._moves.give_back(raw.job_id, raw.execution, failure))
