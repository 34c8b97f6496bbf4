"""The connection to Redis, and what counts as "away".

Invariant: an answer that says nothing about the request (unreachable, loading, full, read-only, failing to persist) is
`RedisAway`, whatever class the client library gives it, so no caller ever takes a Redis in trouble for a failed batch.
The client itself never resends: every request of ours can be repeated, and who repeats it decides how long.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import RedisAway, RedisRefused, UsageError
from hiddenq.delivery.key_types import Client

MIN_VERSION = (6, 2)
DEFAULT_WAIT_SECONDS = 10.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.05, 2.0
OUTAGE_SECONDS = 3600.0
"""So long a store or a Redis that was there at the start may be away before a run is given up."""

AWAY_CLASSES = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.OutOfMemoryError,
    redis_errors.ReadOnlyError,
    redis_errors.ClusterDownError,
    redis_errors.TryAgainError,
)
AWAY_WORDS = ("LOADING", "OOM", "MISCONF", "READONLY", "MASTERDOWN", "NOREPLICAS", "BUSY", "CLUSTERDOWN", "UNKILLABLE")
"""First words of an error reply that speak of the server, not of the request."""

T = TypeVar("T")


def is_away(error: redis.RedisError) -> bool:
    """Whether an error of the client library says that Redis is away (rather than that we asked nonsense)."""
    if isinstance(error, AWAY_CLASSES):
        return True
    if not isinstance(error, redis_errors.ResponseError):
        return False
    reply = str(error)
    # Redis 6.2 puts the reply of the command that was refused into that of the script which called it.
    return reply.startswith(AWAY_WORDS) or any(f"-{word} " in reply for word in AWAY_WORDS)


@contextlib.contextmanager
def away_errors() -> Iterator[None]:
    """Turn the client library's errors that mean "away" into RedisAway."""
    try:
        yield
    except redis.RedisError as error:
        if is_away(error):
            raise RedisAway(f"Redis is away: {type(error).__name__}: {error}") from error
        raise


class Patience:
    """Repeats a request while Redis is away.

    `waiting` says whether it is doing so now; `give_up` ends the wait, and then RedisAway leaves.
    """

    def __init__(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        self._give_up = give_up
        self._lock = threading.Lock()
        self._num_waiting = 0

    @property
    def waiting(self) -> bool:
        """Whether any thread waits for Redis."""
        return self._num_waiting > 0

    def __call__(self, request: Callable[[], T]) -> T:
        """The request's answer, however long Redis is away.

        Raises:
            RedisAway: `give_up` said so.
        """
        wait = FIRST_WAIT_SECONDS
        began: float | None = None
        try:
            while True:
                try:
                    with away_errors():
                        answer = request()
                except RedisAway as error:
                    if began is None:
                        began = time.monotonic()
                        self._count(1)
                        telemetry.logger().warning(
                            "redis_away", error=str(error), next="waiting; finished work is kept"
                        )
                    if self._give_up():
                        raise
                    time.sleep(wait)
                    wait = min(wait * 2, LONGEST_WAIT_SECONDS)
                else:
                    if began is not None:
                        telemetry.logger().info("redis_back", away_seconds=round(time.monotonic() - began, 3))
                    return answer
        finally:
            if began is not None:
                self._count(-1)

    def _count(self, step: int) -> None:
        with self._lock:
            self._num_waiting += step


def through_outage(step: Callable[[], T]) -> T:
    """A step that may be repeated, again and again while Redis is away.

    Raises:
        RedisAway: it was away for `OUTAGE_SECONDS`.
    """
    until = time.monotonic() + OUTAGE_SECONDS
    return Patience(give_up=lambda: time.monotonic() >= until)(step)


def text(value: Any) -> str:
    """A reply as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def raw(value: Any) -> bytes:
    """A reply as bytes; b"" for none."""
    return value if isinstance(value, bytes) else str(value or "").encode()


def never_again() -> Retry:
    """The client library's policy of not trying again: whoever asks decides how long."""
    return Retry(NoBackoff(), 0)


def connect(
    url: str | None = None,
    *,
    password: str | None = None,
    timeout_seconds: float = 5.0,
    wait_seconds: float | None = None,
) -> redis.Redis:
    """A client of a Redis that can carry a run: reached, new enough, never dropping jobs, able to write.

    The address comes from HIDDENQ_REDIS_URL unless given, the password from the URL, HIDDENQ_REDIS_PASSWORD or the
    file named by HIDDENQ_REDIS_PASSWORD_FILE. `timeout_seconds` bounds each request; an unreachable or loading Redis
    is waited for `wait_seconds` (HIDDENQ_REDIS_WAIT_SECONDS unless given, which a supervisor sets; else 10).

    Raises:
        UsageError: no address.
        RedisRefused: wrong password, older than 6.2, an eviction policy that drops jobs, a replica. The client raises
            it as well when a key of ours holds what hiddenq never wrote.
        RedisAway: not reachable, still loading, full or failing to persist after `wait_seconds`.
    """
    url = url or os.environ.get("HIDDENQ_REDIS_URL")
    if not url:
        raise UsageError(
            "no Redis address: give --redis-url or set HIDDENQ_REDIS_URL (redis://HOST:6379/0); "
            "a look at a `hiddenq run` takes its --out"
        )
    where = _without_password(url)
    if wait_seconds is None:
        wait_seconds = float(os.environ.get(names.REDIS_WAIT_VARIABLE, DEFAULT_WAIT_SECONDS))
    if "password=" in urlsplit(url).query:
        raise UsageError(f"--redis-url {where}: a password stands in HIDDENQ_REDIS_PASSWORD, not behind the address")
    options: dict[str, Any] = {} if urlsplit(url).password else {"password": password or _password()}
    try:
        client = Client.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            socket_keepalive=True,
            retry=never_again(),
            protocol=2,
            **options,
        )
    except ValueError as error:
        raise UsageError(f"--redis-url {where}: {error}") from error
    deadline = time.monotonic() + wait_seconds
    try:
        Patience(give_up=lambda: time.monotonic() > deadline)(lambda: _check(client, where))
    except RedisAway as error:
        client.close()
        raise RedisAway(f"{where}: {error.__cause__ or error}; gave up after {wait_seconds:g} s") from error
    except BaseException:
        client.close()
        raise
    return client


def _check(client: redis.Redis, where: str) -> None:
    try:
        info: dict[str, Any] = client.info()
        client.set("hiddenq:probe", "1", ex=1)
    except (redis_errors.AuthenticationError, redis_errors.AuthorizationError) as error:
        if "without any password" in str(error):
            remedy = "it has none: unset HIDDENQ_REDIS_PASSWORD and HIDDENQ_REDIS_PASSWORD_FILE"
        else:
            remedy = "set HIDDENQ_REDIS_PASSWORD or HIDDENQ_REDIS_PASSWORD_FILE"
        raise RedisRefused(f"{where}: {error}; {remedy}") from error
    except redis_errors.ReadOnlyError as error:
        raise RedisRefused(f"{where} is a read-only replica; give the address of the primary") from error
    except redis_errors.ResponseError as error:
        if is_away(error):
            raise
        # NOAUTH comes as a plain error when no password was sent at all.
        raise RedisRefused(f"{where}: {error}; set HIDDENQ_REDIS_PASSWORD or HIDDENQ_REDIS_PASSWORD_FILE") from error
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MIN_VERSION:
        raise RedisRefused(f"{where} is Redis {info['redis_version']}; 6.2 or newer is needed")
    policy = info["maxmemory_policy"]
    if policy != "noeviction":
        raise RedisRefused(
            f"{where} has maxmemory-policy {policy}, which drops jobs when memory runs out; "
            "expected noeviction (redis-cli CONFIG SET maxmemory-policy noeviction)"
        )
    if not info.get("aof_enabled"):
        telemetry.logger().warning(
            "redis_not_durable", redis=where, hint="appendonly is off: a restart loses the queue; resume rebuilds it"
        )


def _password() -> str | None:
    if password := os.environ.get("HIDDENQ_REDIS_PASSWORD"):
        return password
    if name := os.environ.get("HIDDENQ_REDIS_PASSWORD_FILE"):
        try:
            return Path(name).read_text().strip()
        except OSError as error:
            raise UsageError(f"HIDDENQ_REDIS_PASSWORD_FILE {name}: {error.strerror}") from error
    return None


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
