"""A Redis server of our own for one machine's run: `hiddenq run` without `--redis-url`.

Invariant: the server belongs to its data folder, not to the process that started it. It outlives its client (so a
killed `run` loses nothing), is found again by that folder, listens on loopback only, and its password is in a file that
only the owner can read. Its settings are those that the delivery promise rests on (binary.py).

There is never a second server on a folder. The server itself holds a lock on a file in it (it inherits the open file,
and the kernel lets go when it dies), which every process of its machine sees, in whatever container; and server.json
names the machine, because a lock on a shared file system may be seen by one machine alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis

from hiddenq.contracts.errors import RedisRefused, RunMismatch
from hiddenq.delivery.binary import find_server_program, server_config
from hiddenq.delivery.connection import connect, never_again, text
from hiddenq.delivery.whereabouts import is_gone, is_same_world, this_world, whereabouts

START_SECONDS = 60.0
"""Longest wait for a start; an append-only file of millions of commands takes seconds to load."""
STOP_SECONDS = 30.0
LOCK_SECONDS = 5.0
"""A server that was killed may have a child that still writes; it holds the lock so long at most."""
POLL_SECONDS = 0.02

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers that this process started, so that their ends are collected."""


@dataclass(frozen=True)
class EmbeddedServer:
    """A running server, by its data folder."""

    data_dir: Path
    port: int
    pid: int
    password: str

    @property
    def url(self) -> str:
        """Its address, without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def password_file(self) -> Path:
        """The file that holds the password, for HIDDENQ_REDIS_PASSWORD_FILE."""
        return self.data_dir / "password"

    @classmethod
    def start(cls, data_dir: Path, *, port: int | None = None, password: str | None = None) -> Self:
        """Start a folder's server, or find it running.

        `port` and `password` are those of a former server; None for a free port and for the folder's own password.

        Raises:
            UsageError: no server program.
            RunMismatch: a server that can't be reached from here runs on the folder, or may do so.
            RedisRefused: it did not come up; its own last words are in the text.
        """
        data_dir = data_dir.resolve()
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked(data_dir))
            if running := cls.find(data_dir):
                return running
            lifeline = stack.enter_context(_lifeline(data_dir))
            if password:
                _write_private(data_dir / "password", password)
            password, port = _password(data_dir), port or _free_port()
            config = data_dir / "redis.conf"
            _write_private(config, server_config(port=port, folder=data_dir, password=password))
            with (data_dir / "server.log").open("ab") as log:
                process = subprocess.Popen(
                    [str(find_server_program()), str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(lifeline,),
                )
            server = cls(data_dir, port, process.pid, password)
            _children[process.pid] = process
            _write_private(data_dir / "server.json", json.dumps({"port": port, **whereabouts(process.pid)}))
            try:
                server._await_start(process)
            except BaseException:  # interrupted, perhaps: nobody would know of a server that comes up later
                process.kill()
                process.wait()
                (data_dir / "server.json").unlink(missing_ok=True)
                raise
            return server

    @classmethod
    def find(cls, data_dir: Path) -> Self | None:
        """The server that runs on a data folder; None if none does."""
        data_dir = data_dir.resolve()
        known = _known(data_dir)
        try:
            server = cls(data_dir, int(known["port"]), int(known["pid"]), (data_dir / "password").read_text())
        except (OSError, ValueError, KeyError):
            return None
        return server if server._is_ours() else None

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs, as far as can be told from here; it may be loading, or full."""
        if child := _children.get(self.pid):
            return child.poll() is None
        return not is_gone(_known(self.data_dir))

    def connect(self, *, wait_seconds: float | None = None) -> redis.Redis:
        """A client of it; `wait_seconds` as for `connect`."""
        return connect(self.url, password=self.password, wait_seconds=wait_seconds)

    def stop(self) -> None:
        """End it, if it is not gone already, by a kill: each acknowledged write is on disk (`appendfsync always`)."""
        if child := _children.get(self.pid):  # whatever is left of its folder
            child.kill()
        elif self._is_ours():
            if is_same_world(_known(self.data_dir)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            else:  # its process id means something else here
                with self._plain_client() as client, contextlib.suppress(redis.RedisError):
                    client.shutdown(nosave=True)
        deadline = time.monotonic() + STOP_SECONDS
        while self._is_ours() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if child := _children.pop(self.pid, None):
            child.wait()
        with contextlib.suppress(OSError):  # gone, or read-only by now
            (self.data_dir / "server.json").unlink()

    def _plain_client(self) -> redis.Redis:
        return redis.Redis(
            port=self.port,
            password=self.password,
            socket_timeout=5.0,
            socket_connect_timeout=5.0,
            retry=never_again(),
        )

    def _is_ours(self) -> bool:
        """Whether what answers at the port is the server of this folder; of one that is gone its password tells."""
        try:
            with self._plain_client() as client:
                return Path(text(client.config_get("dir")["dir"])) == self.data_dir or not self.data_dir.is_dir()
        except redis.BusyLoadingError:
            return True
        except redis.RedisError:
            return False

    def _await_start(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            try:
                with self._plain_client() as client:
                    client.ping()
                return
            except redis.RedisError:
                time.sleep(POLL_SECONDS)
        process.kill()
        process.wait()
        words = (self.data_dir / "server.log").read_text(errors="replace").strip().splitlines()[-3:]
        raise RedisRefused(f"the embedded Redis in {self.data_dir} did not start: {' | '.join(words)}")


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Only one process at a time starts the server of a folder."""
    with (data_dir / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _lifeline(data_dir: Path) -> Iterator[int]:
    """A locked file for a server to inherit: while it lives, nobody on its machine can lock it again.

    Raises:
        RunMismatch: someone has it, or another machine may.
    """
    known, here = _known(data_dir), this_world()
    where = f"{data_dir}: the embedded Redis of this location runs on {known.get('host')} (process {known.get('pid')})"
    if known and known.get("boot") != here["boot"] and known.get("host") != here["host"]:
        raise RunMismatch(f"{where}, or did when that machine died; ask there, or delete server.json if it is gone")
    with (data_dir / "lifeline").open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunMismatch(f"{where} and can't be reached from here; ask there") from None
            time.sleep(POLL_SECONDS)
        yield file.fileno()


def _known(data_dir: Path) -> dict[str, Any]:
    """What server.json says; {} if it says nothing."""
    try:
        known = json.loads((data_dir / "server.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _password(data_dir: Path) -> str:
    """The folder's password, made at its first start."""
    path = data_dir / "password"
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(32))
    return path.read_text()


def _write_private(path: Path, content: str) -> None:
    """Write a file that only its owner can read, whole or not at all; the error of a failed write names it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
