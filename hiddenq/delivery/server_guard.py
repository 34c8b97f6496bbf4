"""Keeps the embedded server of a run alive for as long as the run goes on.

Invariant: a server that died comes back on the same folder, port and password, so whoever waits for it (every process
of the run) finds it again without being told; what it had acknowledged is on its disk.
"""

from __future__ import annotations

from hiddenq import telemetry
from hiddenq.contracts.errors import HiddenqError
from hiddenq.delivery.background import Background
from hiddenq.delivery.server import EmbeddedServer

LOOK_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
"""Between two tries to start a server that does not come up."""


class ServerGuard(Background):
    """Starts the server again when its process is gone; a context manager.

    At the end the server is stopped if `stops_server` is set: it is this run's own.
    """

    def __init__(self, server: EmbeddedServer, *, stops_server: bool) -> None:
        super().__init__("server guard", LOOK_SECONDS)
        self.server = server
        self.stops_server = stops_server
        self._wait_seconds = LOOK_SECONDS

    def _end(self) -> None:
        if self.stops_server:
            self.server.stop()

    def _round(self) -> float:
        # Where its place is gone as well, the run is; nothing is made there anew.
        if self.server.is_alive or not self.server.data_dir.parent.is_dir():
            self._wait_seconds = LOOK_SECONDS
            return self._wait_seconds
        old = self.server
        try:
            self.server = EmbeddedServer.start(old.data_dir, port=old.port, password=old.password)
            telemetry.logger().warning("redis_restarted", folder=str(old.data_dir), pid=self.server.pid)
        except (HiddenqError, OSError) as error:
            self._wait_seconds = min(2 * self._wait_seconds, LONGEST_WAIT_SECONDS)
            telemetry.logger().error(
                "redis_not_restarted",
                folder=str(old.data_dir),
                error=str(error),
                next=f"again in {self._wait_seconds:g} s",
            )
        return self._wait_seconds
