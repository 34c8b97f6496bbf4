"""Logs and the metrics port: how every process of ours speaks to the outside.

Invariant: one process, one registry, one port; a log event is one JSON line (pretty on a terminal) that carries the
context bound to its process: run, worker, stage. A command for people says it in words instead.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from structlog.typing import Processor

from hiddenq.contracts.errors import UsageError

PORT_TRIES = 64
_OF_A_PORT = frozenset({errno.EADDRINUSE, errno.EACCES})
"""Errors that another port may not have."""
_NOT_SAID = ("event", "level", "timestamp")
"""What a line in words leaves out, or has said already."""


def configure_logging(*, default_level: str = "INFO", in_words: bool = False, **context: Any) -> None:
    """Send structlog and stdlib logging to stderr: JSON lines, or pretty ones on a terminal.

    `HIDDENQ_LOG_LEVEL` (else `default_level`) and `HIDDENQ_LOG_FORMAT` (`json`, `pretty`) decide; `context` is on
    every line. `in_words`: by default each event is a plain line, for a command whose answer a person waits for.
    """
    level = logging.getLevelNamesMapping().get(os.environ.get("HIDDENQ_LOG_LEVEL", default_level).upper(), logging.INFO)
    default_format = "words" if in_words else "pretty" if sys.stderr.isatty() else "json"
    renderers: dict[str, Processor] = {"words": _in_words, "pretty": structlog.dev.ConsoleRenderer()}
    log_format = os.environ.get("HIDDENQ_LOG_FORMAT", default_format)
    renderer = renderers.get(log_format, structlog.processors.JSONRenderer())
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_common_processors(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("botocore", "boto3", "urllib3", "s3transfer", "httpx", "filelock", "rq.worker"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
    if not sys.stderr.isatty():  # progress bars of Hugging Face's libraries, which read this when they are imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    structlog.contextvars.clear_contextvars()
    bind(**context)


def bind(**context: Any) -> None:
    """Put more context on this process's log lines. Threads started later inherit nothing: bind in each."""
    structlog.contextvars.bind_contextvars(**context)


def logger() -> Any:
    """A structlog logger over stdlib's logger `hiddenq`: silent below a warning until logging is configured."""
    return structlog.wrap_logger(
        logging.getLogger("hiddenq"),
        processors=[
            structlog.stdlib.filter_by_level,
            *_common_processors(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def serve_metrics(registry: CollectorRegistry, *, port: int, address: str = "127.0.0.1") -> int:
    """Serve `/metrics` at `port` or the next free one after it; returns the port taken.

    Port 0 serves nowhere and returns 0.

    Raises:
        UsageError: none of the next 64 ports can be bound, or the address is none of this machine's.
    """
    if port == 0:
        return 0
    for candidate in range(port, min(port + PORT_TRIES, 65536)):
        try:
            start_http_server(candidate, addr=address, registry=registry)
        except OSError as error:
            if error.errno in _OF_A_PORT:
                continue
            raise UsageError(f"--metrics-bind {address}: can't be listened on: {error.strerror}") from error
        return candidate
    raise UsageError(f"--metrics-port {port}: no free port from {port} to {port + PORT_TRIES - 1} on {address}")


def advertised_address(bind: str, port: int) -> str:
    """`host:port` at which another machine reaches what this process serves: the host is HIDDENQ_ADVERTISE_ADDRESS if
    set, else the address it listens on, or this host's name where it listens on all."""
    everywhere = bind in ("", "0.0.0.0", "::", "[::]")
    return f"{os.environ.get('HIDDENQ_ADVERTISE_ADDRESS') or (host_name() if everywhere else bind)}:{port}"


def host_name() -> str:
    """This host's name for people and labels: `HIDDENQ_HOST`, else the system's."""
    return os.environ.get("HIDDENQ_HOST") or socket.gethostname()


def _in_words(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """`hiddenq: redis not durable: redis://…; appendonly is off: …`, and a fault's traceback below it."""
    fault = event.pop("exception", None)
    values = (" ".join(str(value).split()) for name, value in event.items() if name not in _NOT_SAID)
    line = f"hiddenq: {': '.join(filter(None, (event['event'].replace('_', ' '), '; '.join(values))))}"
    return f"{line}\n{fault}" if fault else line


def _common_processors() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
