"""Ports of the monitor's tests, apart from those of other tests that run beside them."""

from __future__ import annotations

import itertools
import os
import socket

FIRST_PORT, LAST_PORT = 25000, 25999
_ports = itertools.cycle(range(FIRST_PORT + os.getpid() % 900, LAST_PORT))


def free_port() -> int:
    """A port that nobody listens on."""
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {FIRST_PORT} to {LAST_PORT}")
