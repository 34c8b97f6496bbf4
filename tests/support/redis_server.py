"""A real Redis (or Valkey) server for tests, with the settings that hiddenq's promise rests on.

Promise to tests: `kill()` is kill -9, `restart()` comes back on the same port with what the append-only file holds,
`pause()` is SIGSTOP; nothing is left running when the fixture ends.

    from tests.support.redis_server import redis_client, redis_server, shared_redis_server   # in a conftest.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from hiddenq.delivery.binary import find_server_program, server_config
from tests.support.ports import free_port


class RedisServer:
    """One server process in a folder of its own.

    `settings` are lines of its configuration (`maxmemory="3mb"`); `password` is "" for none; `environment` is added to
    its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        password: str = "test-password",
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: str,
    ):
        self.folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.password = password
        self.config = folder / "redis.conf"
        self.config.write_text(
            server_config(port=self.port, folder=folder, password=password or '""', **{"appendfsync": "no", **settings})
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Address with the password in it."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0" if self.password else self.bare_url

    @property
    def bare_url(self) -> str:
        """Address without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def client(self, **options: object) -> redis.Redis:
        """A plain client that gives up at once."""
        options = {"socket_timeout": 5, "socket_connect_timeout": 5, "retry": Retry(NoBackoff(), 0), **options}
        return redis.Redis.from_url(self.url, **options)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(find_server_program()), str(self.config)],
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        self.kill()
                        raise RuntimeError((self.folder / "server.log").read_text()[-2000:]) from None
                    time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """An orderly end; does nothing if it is not running."""
        self._end(signal.SIGTERM)

    def restart(self, *, away_seconds: float = 0.0) -> None:
        """Kill it (if it runs), keep it away, and start it again on the same port and data."""
        self.kill()
        time.sleep(away_seconds)
        self.start()

    def wipe(self) -> None:
        """Kill it, delete its data and start it empty."""
        self.kill()
        subprocess.run(["rm", "-rf", str(self.folder / "appendonlydir"), str(self.folder / "dump.rdb")], check=True)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, signum: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signum)
        self._process.wait(timeout=60)
        self._process = None


@pytest.fixture(scope="session")
def shared_redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis_server: RedisServer) -> RedisServer:
    """A running server, shared by the session and emptied for each test. Don't kill this one."""
    with shared_redis_server.client() as client:
        client.flushall()
    return shared_redis_server


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client of `redis_server`."""
    with redis_server.client() as client:
        yield client


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of this test alone, to kill, stop and restart."""
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()
