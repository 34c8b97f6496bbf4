"""Ports for the servers that tests start.

Invariant: no two processes of the tests are given the same port while both live, however many run side by side; and no
port lies where the system takes those of outgoing connections from (32768 and up).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST_PORT, LAST_PORT = 10_000, 15_999
GRPC_OFFSET = 10_000
"""SeaweedFS puts each service's gRPC port so far above its HTTP port: both are free."""

_claims = Path(tempfile.gettempdir()) / "hiddenq-test-ports"


def free_port() -> int:
    """A port that nobody listens on, this process's until it ends."""
    _claims.mkdir(exist_ok=True)
    for port in random.sample(range(FIRST_PORT, LAST_PORT + 1), LAST_PORT + 1 - FIRST_PORT):
        if _is_free(port) and _is_free(port + GRPC_OFFSET) and _claim(port):
            return port
    raise RuntimeError(f"no free port from {FIRST_PORT} to {LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def _claim(port: int) -> bool:
    """The lock goes with the process, however it ends."""
    claim = os.open(_claims / str(port), os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    os.close(claim)
    return False
