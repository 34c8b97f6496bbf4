"""`hiddenq monitor`: metrics, discovery, status and the page on one port.

    /              the page, for people
    /api/status    every run's status as JSON; `?run=NAME` one of them
    /metrics       for Prometheus
    /sd            Prometheus HTTP service discovery
    /healthz       200 while the process serves

Invariant: it only reads and shows. While Redis is away `/sd` and `/api/status` answer 503: an empty list would make
Prometheus drop every target, and a worker that vanished with its target is one that nobody misses.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.resources import files
from socketserver import ThreadingMixIn
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import orjson
from prometheus_client import CollectorRegistry, make_wsgi_app
from pydantic import Field

from hiddenq import telemetry
from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import RedisAway, UsageError
from hiddenq.contracts.metrics import MonitorMetrics
from hiddenq.monitor.discovery import targets_of
from hiddenq.monitor.watcher import Watcher

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PAGE = "page.html"
HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "frame-ancestors 'none'",
    ),
]


class MonitorSettings(Frozen):
    """What `hiddenq monitor` is started with."""

    redis_url: str | None = None
    """Address of Redis; HIDDENQ_REDIS_URL if None."""
    port: int = Field(default=9400, ge=0, le=65535)
    """Port of everything it serves; 0 takes a free one."""
    bind: str = "127.0.0.1"
    """Address to listen on."""
    interval_seconds: float = Field(default=5.0, gt=0)
    """Seconds between two looks at Redis."""


def serve(settings: MonitorSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns 128 + the signal's number.

    A Redis that is away at the start is waited for, while `/metrics` says so.

    Raises:
        UsageError: no Redis address, or the port can't be bound.
        RedisRefused: Redis answers, and can't be used as it is.
    """
    registry = CollectorRegistry()
    watcher = Watcher(settings.redis_url, MonitorMetrics(registry), interval_seconds=settings.interval_seconds)
    try:
        server = make_server(settings.bind, settings.port, application(watcher, registry), _Server, _Handler)
    except OSError as error:
        raise UsageError(
            f"--port {settings.port}: can't listen on {settings.bind}: {error.strerror}; "
            "is another monitor running? One a fleet is enough"
        ) from error
    stopping = threading.Event()
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        stopping.set()

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGINT)}
    serving = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    try:
        watcher.start()
        serving.start()
        address = f"{settings.bind}:{server.server_port}"
        telemetry.logger().info("monitor_started", page=f"http://{address}/", metrics=f"http://{address}/metrics")
        stopping.wait()
        server.shutdown()
    finally:
        server.server_close()
        watcher.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return 128 + received[0]


def application(watcher: Watcher, registry: CollectorRegistry) -> WSGIApplication:
    """Everything that is served, as one WSGI application."""
    metrics: WSGIApplication = make_wsgi_app(registry)
    page = files("hiddenq.monitor").joinpath(PAGE).read_bytes()

    def status(query: dict[str, list[str]]) -> tuple[str, str, bytes]:
        statuses = watcher.now().statuses
        if "run" not in query:
            return _json("200 OK", {"runs": [one.model_dump(mode="json") for one in statuses]})
        name = query["run"][0]
        for one in statuses:
            if one.run == name:
                return _json("200 OK", one.model_dump(mode="json"))
        return _json("404 Not Found", {"error": f"no run {name}; Redis knows {', '.join(one.run for one in statuses)}"})

    routes: dict[str, Callable[[dict[str, list[str]]], tuple[str, str, bytes]]] = {
        "/": lambda _: ("200 OK", "text/html; charset=utf-8", page),
        "/api/status": status,
        "/sd": lambda _: _json("200 OK", targets_of(watcher.now().snapshot)),
        "/healthz": lambda _: ("200 OK", "text/plain", b"ok\n"),
    }

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return metrics(environ, start_response)
        route = routes.get(path)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status_line, kind, body = _json("405 Method Not Allowed", {"error": "only GET"})
        elif route is None:
            status_line, kind, body = _json("404 Not Found", {"error": f"nothing at {path}; there are {list(routes)}"})
        else:
            try:
                status_line, kind, body = route(parse_qs(environ.get("QUERY_STRING", "")))
            except RedisAway as error:
                status_line, kind, body = _json("503 Service Unavailable", {"error": str(error)})
        start_response(status_line, [("Content-Type", kind), ("Content-Length", str(len(body))), *HEADERS])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return answer


def _json(status: str, value: Any) -> tuple[str, str, bytes]:
    return status, "application/json", orjson.dumps(value)


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a request: a slow browser delays no scrape."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left, or says nothing, is no fault."""
        if not isinstance(sys.exception(), OSError):
            telemetry.logger().exception("http_failed", client=client_address[0])


class _Handler(WSGIRequestHandler):
    """No line a request on stderr: scrapes come every few seconds."""

    timeout = 60.0
    """Seconds without a byte from or to a client; a connection that is merely held would hold a thread."""

    def log_message(self, format: str, *args: Any) -> None:  # the base class names it so
        telemetry.logger().debug("http", request=format % args)
