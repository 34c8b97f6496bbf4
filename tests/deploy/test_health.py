"""A container's health check says whether it does its work, not whether it breathes."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from tests.deploy.programs import load
from tests.support.ports import free_port

health = load("health")
verdict = health.verdict
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


def test_a_container_is_ill_when_nobody_answers_or_the_monitor_stands_still_and_well_again_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, registry = free_port(), CollectorRegistry()
    monkeypatch.setenv("HIDDENQ_METRICS_PORT", str(port))
    monkeypatch.setattr(health, "MAX_PROCESSES", 1)  # the next ports may be other tests'

    def check() -> tuple[int, str]:
        return health.main(), capsys.readouterr().out.strip()

    assert check() == (1, "no process serves metrics")
    looked = Gauge("hiddenq_monitor_snapshot_timestamp_seconds", "Last look.", registry=registry)
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        looked.set(time.time())
        assert check() == (0, "1 processes are well")
        looked.set(time.time() - 100)
        assert check() == (1, "the last look at Redis was 100 s ago")
        looked.set(time.time())
        assert check()[0] == 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert check()[0] == 1
