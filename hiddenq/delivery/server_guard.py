"""Keeps the embedded server of a run alive for as long as the run goes on.

Invariant: a server that died comes back on the same folder, port and password, so whoever waits for it (every process
of the run) finds it again without being told; what it had acknowledged is on its disk.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from hiddenq import telemetry
from hiddenq.contracts.errors import HiddenqError
from hiddenq.delivery.server import EmbeddedServer

LOOK_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
"""Between two tries to start a server that does not come up."""


class ServerGuard:
    """A thread that starts the server again when its process is gone; a context manager.

    At the end the server is stopped if `stops_server` is set: it is this run's own.
    """

    def __init__(self, server: EmbeddedServer, *, stops_server: bool) -> None:
        self.server = server
        self.stops_server = stops_server
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="server guard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        if self.stops_server:
            self.server.stop()

    def _work(self) -> None:
        wait = LOOK_SECONDS
        while not self._closing.wait(wait):
            if self.server.is_alive:
                wait = LOOK_SECONDS
                continue
            old = self.server
            try:
                self.server = EmbeddedServer.start(old.data_dir, port=old.port, password=old.password)
                telemetry.logger().warning("redis_restarted", folder=str(old.data_dir), pid=self.server.pid)
            except (HiddenqError, OSError) as error:
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)
                telemetry.logger().error(
                    "redis_not_restarted", folder=str(old.data_dir), error=str(error), next=f"again in {wait:g} s"
                )
