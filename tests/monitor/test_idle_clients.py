"""Clients of the monitor that say nothing, or leave in the middle: they hold no thread, and cost one line at most."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import make_server

import pytest
from prometheus_client import CollectorRegistry

from hiddenq.contracts.metrics import MonitorMetrics
from hiddenq.monitor.server import _Handler, _Server, application
from hiddenq.monitor.watcher import Watcher
from tests.support.waiting import wait_until


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    watcher = Watcher("redis://127.0.0.1:1", MonitorMetrics(registry), interval_seconds=3600)
    server = make_server("127.0.0.1", 0, application(watcher, registry), _Server, _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def requests() -> list[Any]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def test_a_client_that_says_nothing_is_left_after_a_while(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        assert client.recv(1) == b""
    wait_until(lambda: not requests())
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_breaks_off_leaves_no_traceback(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(b"GET / HTTP")
    wait_until(requests)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset instead of an end
    client.close()
    wait_until(lambda: not requests())
    assert "Traceback" not in capfd.readouterr().err
