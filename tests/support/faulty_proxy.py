"""A proxy on loopback in front of the real S3 server, which fails on demand.

Promise to tests: requests that no fault is planned for reach the server unchanged, `Host` included, so signatures hold;
a planned fault meets the first `times` requests it is meant for, and `num_met` counts them.

    proxy.plan(Answer(503, "SlowDown"), times=10, when=puts)
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from tests.support.ports import free_port
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect"})


@dataclass(frozen=True)
class Request:
    """What a fault is chosen by."""

    method: str
    target: str
    """Path and query."""
    headers: dict[str, str]
    """By lower-case name."""


@dataclass(frozen=True)
class Answer:
    """An error in place of the server's answer; `forward` lets the request reach the server first."""

    status: int
    code: str
    forward: bool = False


@dataclass(frozen=True)
class Reset:
    """The connection is reset after so many bytes of the body."""

    after_bytes: int = 0


@dataclass(frozen=True)
class BlackHole:
    """The request is taken and never answered, until the proxy heals."""


@dataclass(frozen=True)
class FlipByte:
    """One byte of the body changes on its way."""


@dataclass(frozen=True)
class Slow:
    """The body is taken at so many bytes a second."""

    bytes_per_second: int


@dataclass(frozen=True)
class Strip:
    """Headers that begin so vanish in both directions, as with a store that does not know them."""

    prefixes: tuple[str, ...]

    def hides(self, header: str) -> bool:
        """Whether a header vanishes."""
        return header.lower().startswith(self.prefixes)


Fault = Answer | Reset | BlackHole | FlipByte | Slow | Strip
CHECKSUMS = Strip(("x-amz-checksum", "x-amz-sdk-checksum"))
ENCRYPTION = Strip(("x-amz-server-side-encryption",))


@dataclass
class Plan:
    """A fault, whom it is for, and how often."""

    fault: Fault
    when: Callable[[Request], bool]
    times: int | None
    num_met: int = 0


@dataclass
class FaultyProxy:
    """The running proxy."""

    port: int
    server: S3Server
    requests: list[Request] = field(default_factory=list)
    healed: threading.Event = field(default_factory=threading.Event)
    _plans: list[Plan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(
        self, fault: Fault, *, times: int | None = None, when: Callable[[Request], bool] = lambda request: True
    ) -> Plan:
        """From now on, `times` requests (None: all) that `when` picks meet the fault."""
        with self._lock:
            self.healed.clear()
            self._plans.append(plan := Plan(fault, when, times))
        return plan

    def heal(self) -> None:
        """No more faults; who hangs is let go."""
        with self._lock:
            self._plans.clear()
            self.healed.set()

    def meet(self, request: Request) -> Fault | None:
        """The fault for a request."""
        with self._lock:
            self.requests.append(request)
            for plan in self._plans:
                if (plan.times is None or plan.num_met < plan.times) and plan.when(request):
                    plan.num_met += 1
                    return plan.fault
        return None


def puts(request: Request) -> bool:
    """Whether a request sends an object or a part."""
    return request.method == "PUT"


def parts(request: Request) -> bool:
    """Whether a request sends a part."""
    return request.method == "PUT" and "partNumber=" in request.target


def completes(request: Request) -> bool:
    """Whether a request completes a multipart upload."""
    return request.method == "POST" and "uploadId=" in request.target


def has_checksum(request: Request) -> bool:
    """Whether a request speaks of checksums, as newer clients do."""
    return any(CHECKSUMS.hides(name) for name in request.headers)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def do(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers)
        fault = self.proxy.meet(request)
        length = int(headers.get("content-length", 0))
        if isinstance(fault, Reset):
            self.rfile.read(min(length, fault.after_bytes))
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if isinstance(fault, BlackHole):
            self.proxy.healed.wait(60)
            self.close_connection = True
            return
        body = self._body(length, fault.bytes_per_second if isinstance(fault, Slow) else None)
        if isinstance(fault, FlipByte) and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if isinstance(fault, Strip):
            headers = self._without(request, fault)
        status, answer_headers, answer = self._forward(request, headers, body) if _reaches(fault) else (0, [], b"")
        if isinstance(fault, Answer):
            status, answer_headers = fault.status, [("Content-Type", "application/xml")]
            answer = f"<Error><Code>{fault.code}</Code><Message>planned</Message></Error>".encode()
        if isinstance(fault, Strip):
            answer_headers = [item for item in answer_headers if not fault.hides(item[0])]
        self._answer(status, answer_headers, answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

    def _body(self, length: int, bytes_per_second: int | None) -> bytes:
        if bytes_per_second is None:
            return self.rfile.read(length)
        block, blocks = max(1, bytes_per_second // 20), []
        while length:
            blocks.append(self.rfile.read(min(block, length)))
            length -= len(blocks[-1])
            time.sleep(0.05)
        return b"".join(blocks)

    def _forward(
        self, request: Request, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.server.port, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()

    def _without(self, request: Request, strip: Strip) -> dict[str, str]:
        """The request's headers signed anew, as if the client had never sent those."""
        kept = {name: value for name, value in request.headers.items() if not strip.hides(name)}
        signed = AWSRequest(request.method, f"http://{kept['host']}{request.target}", headers=kept)
        signed.context["client_config"] = Config(s3={"payload_signing_enabled": False})
        S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", "us-east-1").add_auth(signed)
        return {name.lower(): value for name, value in signed.headers.items()}

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # a HEAD's answer has the length of what it does not send
            elif name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


def _reaches(fault: Fault | None) -> bool:
    return fault.forward if isinstance(fault, Answer) else True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # a slow body is felt by its sender
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about."""


@contextlib.contextmanager
def running_proxy(server: S3Server) -> Iterator[FaultyProxy]:
    """A proxy for the time of a `with` block."""
    proxy = FaultyProxy(free_port(), server)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with _Server(("127.0.0.1", proxy.port), handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.heal()
            http_server.shutdown()
            thread.join()


@pytest.fixture
def faulty_proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    """A proxy in front of the session's server."""
    with running_proxy(s3_server) as proxy:
        yield proxy
