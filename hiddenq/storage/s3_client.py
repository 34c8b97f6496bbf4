"""One S3 client a process and store, and calls that are tried again.

Invariant: a client is made in the process that uses it (never carried over a fork), and made anew when its credentials
have ended, so boto3's chain looks them up again. botocore's own retries are off: the ones here wait with jitter, count,
and end as `StoreAway`, after which the caller keeps its file and waits.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
)

from hiddenq.contracts.errors import HiddenqError, StoreAway
from hiddenq.storage.backoff import RandomGrowingWait
from hiddenq.storage.s3_errors import EXPIRED, code_of, refusal_code, translate
from hiddenq.storage.settings import StoreSettings
from hiddenq.storage.store import StoreObserver

S3Client: TypeAlias = Any
"""boto3 makes its clients' methods at run time; what goes through them is typed where it comes out."""

NUM_ATTEMPTS = 5
"""Tries of one request before the store counts as away."""
IDLE_CONNECTIONS = 64
"""Connections kept open for the next request; more than a process has in flight, so none is thrown away."""
WAIT_SECONDS = 0.1
MAX_WAIT_SECONDS = 5.0


class _PerProcess:
    """A client and threads, made when they are first needed, and anew in a child process.

    Neither connections nor threads nor a held lock of a parent are a child's own.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._client: S3Client = None
        self._pool: ThreadPoolExecutor | None = None

    def client(self) -> S3Client:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._client is None:
                self._client = _make_client(self._settings)
            return self._client

    def forget_client(self) -> None:
        self._client = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._settings.num_connections, thread_name_prefix="part")
            return self._pool


class S3Connection:
    """A client for one set of settings; errors are ours, and what may pass is asked again."""

    def __init__(self, settings: StoreSettings, observer: StoreObserver) -> None:
        self._own = _PerProcess(settings)
        self._observer = observer
        self._patience_seconds = 0.0

    def patient(self, seconds: float) -> S3Connection:
        """The same client, asked again for so long while the store is away."""
        other = copy.copy(self)
        other._patience_seconds = seconds
        return other

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that all multipart uploads of this process share: as many as there may be requests in flight."""
        return self._own.pool()

    @property
    def is_aws(self) -> bool:
        """Whether the endpoint is Amazon's own (whatever setting, variable or profile decided it)."""
        host = urlsplit(self._own.client().meta.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def call(self, where: str, request: Callable[[S3Client], Any], *, num_attempts: int = NUM_ATTEMPTS) -> Any:
        """The answer to a request that may be repeated without harm; errors are ours."""
        retrying = Retrying(
            retry=retry_if_exception(_may_pass_soon),
            stop=stop_all(stop_after_attempt(num_attempts), stop_after_delay(self._patience_seconds)),
            wait=RandomGrowingWait(multiplier=WAIT_SECONDS, max=MAX_WAIT_SECONDS),
            before_sleep=self._count,
            reraise=True,
        )
        return retrying(self._once, where, request)

    def _once(self, where: str, request: Callable[[S3Client], Any]) -> Any:
        try:
            return request(self._own.client())
        except HiddenqError:
            raise
        except (ClientError, BotoCoreError, OSError, ValueError) as error:
            if isinstance(error, ClientError) and code_of(error) in EXPIRED:
                self._own.forget_client()
            raise translate(error, where) from error

    def _count(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        cause = error.__cause__ if error else None
        if self._patience_seconds and state.attempt_number == NUM_ATTEMPTS:
            logging.getLogger(__name__).warning("%s; asked again for %g s", error, self._patience_seconds)
        self._observer.retried(code_of(cause) if isinstance(cause, ClientError) else type(cause or error).__name__)


def _may_pass_soon(error: BaseException) -> bool:
    """Whether to ask again here; credentials that have ended are the caller's to wait for."""
    return isinstance(error, StoreAway) and refusal_code(error) not in EXPIRED


def _make_client(settings: StoreSettings) -> S3Client:
    session = boto3.session.Session(profile_name=settings.profile, region_name=settings.region)
    config = Config(
        connect_timeout=settings.timeout_seconds,
        read_timeout=settings.timeout_seconds,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=IDLE_CONNECTIONS,
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="hiddenq",
        s3={"addressing_style": settings.addressing_style, "payload_signing_enabled": False},
    )
    return session.client(
        "s3",
        region_name=session.region_name or "us-east-1",
        endpoint_url=settings.endpoint_url,
        config=config,
    )
