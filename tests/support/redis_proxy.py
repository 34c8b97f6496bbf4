"""A TCP proxy on loopback in front of a Redis server, which cuts, swallows and misquotes on demand.

Promise to tests: `cut_replies(n)` lets the next n requests reach the server and drops each one's reply half way;
`black_hole()` keeps connections open and passes nothing until `heal()`; `misquote(said, told)` changes replies.

    proxy = RedisProxy(redis_server.port)
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from tests.support.ports import free_port


class RedisProxy:
    """The running proxy; a context manager."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.num_cut = 0
        self._target = target_port
        self._left_to_cut = 0
        self._only: bytes | None = None
        self._misquoted: tuple[bytes, bytes] = (b"", b"")
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Address without a password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def cut_replies(self, num: int, *, to: bytes = b"EVALSHA") -> None:
        """Cut the replies to the next requests that hold these bytes, half way."""
        with self._lock:
            self._left_to_cut, self._only = num, to

    def black_hole(self) -> None:
        """Pass nothing, but keep connections open and accept new ones."""
        self._open.clear()

    def misquote(self, said: bytes, told: bytes) -> None:
        """Pass `told` wherever a reply says `said`; as long as it, because replies begin with their length."""
        assert len(said) == len(told), (said, told)
        self._misquoted = (said, told)

    def heal(self) -> None:
        """Pass everything again."""
        with self._lock:
            self._left_to_cut = 0
        self._open.set()

    def close(self) -> None:
        """End."""
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            _shut(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                cut = threading.Event()
                for source, sink, is_reply in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(source, sink, is_reply, cut), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                if is_reply and cut.is_set():
                    sink.sendall(data[: len(data) // 2])
                    break
                if not is_reply and self._is_to_be_cut(data):
                    cut.set()
                sink.sendall(data.replace(*self._misquoted) if is_reply and self._misquoted[0] else data)
        _shut(source)
        _shut(sink)

    def _is_to_be_cut(self, request: bytes) -> bool:
        with self._lock:
            if self._left_to_cut and self._only is not None and self._only in request:
                self._left_to_cut -= 1
                self.num_cut += 1
                return True
        return False


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
