"""The processes and servers of a chaos run, and what can happen to them.

Three workers and two uploaders on two hosts (spools), a real Redis, a real S3 server. A supervisor's part is played by
`keep_alive`: what has died is started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import boto3
import redis
from botocore.config import Config

from hiddenq.contracts import names
from hiddenq.storage import Spool
from tests.fault.parts import SETTINGS, Surroundings, start
from tests.support.redis_server import RedisServer
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, start_server

STOPPED_SECONDS = 1.5 * SETTINGS.lease_seconds
CATCH_UP_SECONDS = 2.0
"""What was stopped and goes on may take so long to finish what it held."""


@dataclass
class Part:
    """One process of the fleet and how to start it again."""

    kind: str
    host: str
    spool: Path
    process: ForkServerProcess | None = None
    stopped_until: float | None = None
    busy_until: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether its process runs (or is stopped)."""
        return self.process is not None and self.process.is_alive()


class Fleet:
    """Everything that runs; `close` leaves nothing of it."""

    def __init__(
        self,
        folder: Path,
        *,
        num_batches: int,
        forward_seconds: float,
        poison: Set[str],
        sabotage: str,
        s3: S3Server | None,
    ) -> None:
        self._folder = folder
        (folder / "s3").mkdir()
        (folder / "logs").mkdir()
        with contextlib.ExitStack() as servers:
            self.redis_server = RedisServer(folder / "redis")
            servers.callback(self.redis_server.stop)
            self.s3 = s3 or start_server(folder / "s3")
            if s3 is None:
                servers.callback(self.s3.stop)
            self._servers = servers.pop_all()
        self.surroundings = Surroundings(
            redis_url=self.redis_server.bare_url,
            redis_password=self.redis_server.password,
            num_batches=num_batches,
            forward_seconds=forward_seconds,
            log_folder=folder / "logs",
            environment={
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_EC2_METADATA_DISABLED": "true",
                "HIDDENQ_LOG_FORMAT": "json",
            },
            poison=poison,
            sabotage=sabotage,
        )
        os.environ.update(self.surroundings.environment)
        self.parts = [
            Part("worker", "a", folder / "spool-a"),
            Part("worker", "a", folder / "spool-a"),
            Part("uploader", "a", folder / "spool-a"),
            Part("worker", "b", folder / "spool-b"),
            Part("uploader", "b", folder / "spool-b"),
        ]
        self._outages: list[threading.Thread] = []
        self.host_is_lost = False

    @property
    def workers(self) -> list[Part]:
        """The GPU workers."""
        return [part for part in self.parts if part.kind == "worker"]

    @property
    def uploaders(self) -> list[Part]:
        """The uploaders."""
        return [part for part in self.parts if part.kind == "uploader"]

    @property
    def spools(self) -> list[Path]:
        """The spools in use."""
        return sorted({part.spool for part in self.parts})

    def start(self) -> None:
        """Start every process."""
        for part in self.parts:
            self._start(part)

    def close(self) -> None:
        """Nothing is left running."""
        for part in self.parts:
            self.kill(part)
        self.await_outages()
        self._servers.close()

    def keep_alive(self) -> int:
        """Start again what has died, and continue what was stopped for long enough; how many were started."""
        num_started = 0
        now = time.monotonic()
        for part in self.parts:
            if part.stopped_until is not None and now >= part.stopped_until:
                part.stopped_until, part.busy_until = None, now + CATCH_UP_SECONDS
                if part.process is not None and part.process.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(part.process.pid, signal.SIGCONT)
            if not part.is_alive:
                num_started += 1
                self._start(part)
        return num_started

    def is_at_work(self, worker: Part, client: redis.Redis) -> bool:
        """Whether a GPU worker lives, is not stopped, and holds a batch."""
        if worker.stopped_until is not None or worker.process is None or not worker.is_alive:
            return False
        held = client.scan_iter(f"rq:worker:*-{worker.host}-{worker.process.pid}-*:executions", count=1000)
        return any(client.scard(key) for key in held)

    def is_quiet(self) -> bool:
        """Nothing is stopped or has just gone on, and no spool holds a file."""
        now = time.monotonic()
        if any(part.stopped_until is not None or now < part.busy_until for part in self.parts):
            return False
        return all(Spool.open(spool).usage().num_bytes == 0 for spool in self.spools)

    def end(self) -> None:
        """Ask every process to end, and wait for it."""
        for part in self.parts:
            if part.process is not None:
                part.process.terminate()
        for part in self.parts:
            if part.process is not None:
                part.process.join(20)

    # Strikes

    def kill(self, part: Part) -> None:
        """kill -9."""
        if part.process is not None:
            part.process.kill()
            part.process.join()

    def stop(self, part: Part) -> None:
        """SIGSTOP for longer than a lease."""
        if part.process is not None and part.process.pid and part.is_alive:
            os.kill(part.process.pid, signal.SIGSTOP)
            part.stopped_until = time.monotonic() + STOPPED_SECONDS

    def lose_host(self, client: redis.Redis, *, patience_seconds: float) -> None:
        """Host b burns down, with published shards in its spool if there soon are any; a new one takes its place."""
        self.host_is_lost = True
        uploads = f"rq:queue:{names.upload_queue(Spool.open(self._folder / 'spool-b').spool_id)}"
        lost = [part for part in self.parts if part.host == "b"]
        for part in lost:
            if part.kind == "uploader":
                self.stop(part)
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError):
                if client.llen(uploads):
                    break
            time.sleep(0.02)
        for part in lost:
            self.kill(part)
        subprocess.run(["rm", "-rf", str(self._folder / "spool-b")], check=True)
        for part in lost:
            part.host, part.spool = "c", self._folder / "spool-c"

    def lose_redis(self, seconds: float) -> None:
        """Redis is killed, and comes back after so long."""
        self._outage(lambda: self.redis_server.restart(away_seconds=seconds))

    def lose_s3(self, seconds: float) -> None:
        """The S3 server is killed, and comes back after so long."""

        def outage() -> None:
            self.s3.restart(away_seconds=seconds)
            _wait_for_s3(self.s3)

        self._outage(outage)

    @property
    def has_outage(self) -> bool:
        """Whether one of the servers is away."""
        return any(outage.is_alive() for outage in self._outages)

    def await_outages(self) -> None:
        """Until the servers are back."""
        for outage in self._outages:
            outage.join()

    def _outage(self, outage: Callable[[], None]) -> None:
        thread = threading.Thread(target=outage)
        thread.start()
        self._outages.append(thread)

    def _start(self, part: Part) -> None:
        part.stopped_until = None
        part.process = start(part.kind, self.surroundings, part.spool, part.host)


def _wait_for_s3(server: S3Server) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}, connect_timeout=1, read_timeout=2),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            client.put_object(Bucket=BUCKET, Key="alive", Body=b"1")
            return
        time.sleep(0.1)
