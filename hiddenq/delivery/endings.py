"""How a claim ends: with a result, without one, or lost to another execution.

Invariant: every call here is fenced by the execution and can be repeated, so it waits for a Redis that is away and asks
again; whatever the verdict, the claim is then held no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, NoReturn

from hiddenq import telemetry
from hiddenq.contracts.errors import LeaseLost
from hiddenq.contracts.messages import BatchJob, LedgerEntry, ShardReady
from hiddenq.delivery.connection import Patience, T
from hiddenq.delivery.failures import failure_of
from hiddenq.delivery.held import HeldClaims
from hiddenq.delivery.jobs import M
from hiddenq.delivery.transitions import Claim, Failure, Transitions


class Endings(Generic[M]):
    """The ends of one process's claims; the part of a `Consumer` that hands work over."""

    def __init__(self, moves: Transitions, held: HeldClaims[M], patiently: Patience, *, host: str) -> None:
        self._moves = moves
        self._held = held
        self._patiently = patiently
        self._host = host

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
        failure = failure_of(error, self._moves.settings, device=device)
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
