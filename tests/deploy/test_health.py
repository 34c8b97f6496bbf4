"""A container's health check says whether it does its work, not whether it breathes."""

from __future__ import annotations

import pytest

from tests.deploy.programs import load

verdict = load("health").verdict
NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ([], "no process serves metrics"),
        (["hiddenq_monitor_snapshot_timestamp_seconds 999990.0\n"], None),
        (["hiddenq_monitor_snapshot_timestamp_seconds 999000.0\n"], "the last look at Redis was 1000 s ago"),
        (["hiddenq_uploader_store_away 1.0\n"], None),  # it waits, and goes on by itself
        (['hiddenq_gpu_worker_state{state="busy"} 1.0\nhiddenq_gpu_worker_state{state="sick"} 0.0\n'], None),
        (['hiddenq_gpu_worker_state{state="sick"} 1.0\n'], "every GPU worker is sick"),
        (['hiddenq_gpu_worker_state{state="sick"} 1.0\n', 'hiddenq_gpu_worker_state{state="sick"} 0.0\n'], None),
    ],
)
def test_the_verdict(pages: list[str], reason: str | None) -> None:
    assert verdict(pages, NOW) == reason
