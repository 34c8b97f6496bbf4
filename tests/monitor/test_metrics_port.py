"""The port of /metrics: the next free one, and an address that can't be is said to be that."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry

from hiddenq.contracts.errors import UsageError
from hiddenq.telemetry import serve_metrics


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve_metrics(CollectorRegistry(), port=port) > port


def test_an_address_of_another_machine_is_not_called_a_lack_of_ports() -> None:
    with pytest.raises(UsageError, match=r"--metrics-bind 203\.0\.113\.1: can't be listened on: Cannot assign"):
        serve_metrics(CollectorRegistry(), port=9500, address="203.0.113.1")
