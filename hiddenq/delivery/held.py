"""The claims that this process holds now, and how long each has been in its stage.

Invariant: a stage's clock counts only time in which the process could work. It stands still while Redis or the store is
away, and a process that was stopped (SIGSTOP, a suspended machine) is charged one tick for all of it.

And a suspect, a batch that was charged before, is on the GPU alone: so if it kills the process again, no innocent is
charged with it. The one death before, which made it a suspect, may have charged a neighbour once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from hiddenq.delivery.jobs import M
from hiddenq.delivery.transitions import CHARGED_STAGE, Claim


@dataclass(eq=False)
class Held(Generic[M]):
    """One claim and its stage."""

    claim: Claim[M]
    stage: str = "claimed"
    spent_seconds: float = 0.0
    """In this stage, waiting for Redis or the store not counted."""
    lost: bool = False


class HeldClaims(Generic[M]):
    """The claims of one process, by execution; safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._by_execution: dict[str, Held[M]] = {}
        self._num_pauses = 0

    def __len__(self) -> int:
        return len(self._by_execution)

    def add(self, claim: Claim[M]) -> None:
        """Hold a claim."""
        with self._lock:
            self._by_execution[claim.execution] = Held(claim)

    def remove(self, claim: Claim[Any]) -> None:
        """Hold it no longer."""
        with self._lock:
            self._by_execution.pop(claim.execution, None)
            self._left.notify_all()

    def enter(self, claim: Claim[Any], stage: str) -> None:
        """The claim enters a stage; its clock starts at 0. Waits while a suspect would not be on the GPU alone."""
        with self._lock:
            held = self._by_execution.get(claim.execution)
            if held is None:
                return
            if stage == CHARGED_STAGE:
                self._left.wait_for(lambda: held.lost or not self._would_crowd(held))
            held.stage, held.spent_seconds = stage, 0.0
            self._left.notify_all()

    def _would_crowd(self, held: Held[M]) -> bool:
        """Whether a suspect would share the GPU if this claim entered it now."""
        others = [other for other in self._by_execution.values() if other is not held and other.stage == CHARGED_STAGE]
        return bool(others) and any(each.claim.attempt > 1 for each in (held, *others))

    def is_lost(self, claim: Claim[Any]) -> bool:
        """Whether the claim's lease was found gone, or it is not held at all."""
        held = self._by_execution.get(claim.execution)
        return held is None or held.lost

    def members(self) -> list[tuple[str, str]]:
        """Job id and execution of each."""
        with self._lock:
            return [(held.claim.job_id, execution) for execution, held in self._by_execution.items()]

    def mark_lost(self, executions: frozenset[str]) -> list[Claim[M]]:
        """Note whose lease is gone; returns those that are still held and were not known to be lost."""
        with self._lock:
            news = [held for key, held in self._by_execution.items() if key in executions and not held.lost]
            for held in news:
                held.lost = True
            self._left.notify_all()
            return [held.claim for held in news]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """All clocks stand still inside."""
        with self._lock:
            self._num_pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_pauses -= 1

    def tick(self, seconds: float, deadlines: Mapping[str, float]) -> Held[M] | None:
        """Let `seconds` pass on all clocks; returns a claim that is past its stage's deadline, if there is one."""
        with self._lock:
            if self._num_pauses:
                return None
            for held in self._by_execution.values():
                held.spent_seconds += seconds
                if held.spent_seconds > deadlines.get(held.stage, float("inf")):
                    return held
        return None


def all_threads() -> str:
    """Tracebacks of all threads of this process, native ones as far as Python sees them."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
