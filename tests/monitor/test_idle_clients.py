"""Clients of the monitor that say nothing, or leave in the middle: they hold no thread, and cost one line at most."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
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


@pytest.fixture
def requests() -> Callable[[], list[threading.Thread]]:
    """The threads that serve a request now, without what other tests' servers have."""
    before = set(threading.enumerate())

    def running() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if "process_request" in each.name and each not in before]

    return running


def test_a_client_that_says_nothing_is_left_after_a_while(
    port: int,
    requests: Callable[[], list[threading.Thread]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        assert client.recv(1) == b""
    wait_until(lambda: not requests())
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_breaks_off_leaves_no_traceback(
    port: int, requests: Callable[[], list[threading.Thread]], capfd: pytest.CaptureFixture[str]
) -> None:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(b"GET / HTTP")
    wait_until(requests)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset instead of an end
    client.close()
    wait_until(lambda: not requests())
    assert "Traceback" not in capfd.readouterr().err
