"""Redis: reachable, new enough, keeping everything, hidden from strangers, on the same clock.

Invariant: nothing is changed but one key that ends by itself; what `connect` refuses at a start is an error here, with
the same text.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import redis

from hiddenq.contracts.errors import HiddenqError, RedisAway
from hiddenq.delivery.connection import connect, never_again
from hiddenq.doctor.findings import Finding, error, ok, warning

WAIT_SECONDS = 5.0
SKEW_SECONDS = 5.0
FULL_SHARE = 0.8
CHECK_PASSWORD = (
    "the user in the address (redis://worker@…) and the password file must be of one role; this machine's own: docker "
    "compose run --rm credentials show join, in deploy/ on the machine of the queue"
)
SET_REDIS_RIGHT = (
    "what it says, in Redis's settings on the machine of the queue (those of deploy/redis/redis.conf are right), and "
    "docker compose up -d redis"
)
START_REDIS = "docker compose up -d redis in deploy/ on the machine of the queue, and see docker compose logs redis"


def check_queue(url: str, *, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """What is wrong with the Redis at `url`; the password comes from the environment, as always."""
    try:
        client = connect(url, wait_seconds=WAIT_SECONDS)
    except RedisAway as away:
        yield error(str(away), "every stage waits for Redis", START_REDIS)
        return
    except HiddenqError as refusal:
        yield error(str(refusal), "every stage is refused by it", _remedy(refusal))
        return
    with client:
        info = client.info()
        version, memory, limit = info["redis_version"], int(info["used_memory"]), int(info.get("maxmemory", 0))
        yield ok(f"Redis {version}, noeviction, {memory >> 20} MiB in use")
        if not info.get("aof_enabled"):
            yield warning(
                "Redis keeps no append-only file",
                "a restart loses the queue; resuming the run rebuilds it from the output location, in minutes",
                "redis-cli CONFIG SET appendonly yes, and the same line in its redis.conf",
            )
        elif info.get("aof_last_write_status", "ok") != "ok":
            yield error(
                "Redis can't write its append-only file", "it refuses writes until it can", "df -h on its data folder"
            )
        if limit and memory > FULL_SHARE * limit:
            yield warning(
                f"Redis uses {memory >> 20} of {limit >> 20} MiB",
                "a full Redis refuses writes, and every stage waits",
                "raise maxmemory in redis.conf and the container's memory limit",
            )
        yield from _clock(client, clock)
    yield from check_exposure(url)


def _remedy(refusal: HiddenqError) -> str:
    """What to do about a Redis that refuses us, or that we refuse."""
    cause = refusal.__cause__
    is_theirs = isinstance(cause, redis.ResponseError) and not isinstance(cause, redis.ReadOnlyError)
    return CHECK_PASSWORD if is_theirs or isinstance(cause, redis.AuthenticationError) else SET_REDIS_RIGHT


def check_exposure(url: str) -> Iterator[Finding]:
    """Whether strangers could reach Redis: a public address, or no password."""
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or 6379
    public = [address for address in _addresses(host, port) if ipaddress.ip_address(address).is_global]
    if public:
        yield warning(
            f"Redis is at a public address ({public[0]})",
            "whoever reaches it and has, or guesses, a password owns the queue",
            "bind it to a private network (deploy/README.md: WireGuard) and let the firewall drop the port",
        )
        if parts.scheme != "rediss":
            yield error(
                f"passwords cross a public network in the clear (redis://{host})",
                "whoever listens owns the queue",
                "deploy/compose.tls.yaml and a rediss:// address",
            )
    try:
        with _stranger(host, port, tls=parts.scheme == "rediss") as stranger:
            stranger.ping()
    except redis.RedisError:
        yield ok("Redis answers nobody without a password")
    else:
        yield warning(
            "Redis answers without a password",
            "whoever reaches the port can empty the queue or read every run",
            "set requirepass, or better an access list such as deploy/image/users.acl.in",
        )


def _stranger(host: str, port: int, *, tls: bool) -> redis.Redis:
    """A client without user and password, which gives up at once."""
    options: dict[str, Any] = {"socket_timeout": 3, "socket_connect_timeout": 3, "retry": never_again()}
    if tls:
        options |= {"ssl": True, "ssl_cert_reqs": "none"}
    return redis.Redis(host=host, port=port, **options)


def _clock(client: redis.Redis, clock: Callable[[], float]) -> Iterator[Finding]:
    before = clock()
    seconds, microseconds = client.time()
    after = clock()
    skew = (before + after) / 2 - (seconds + microseconds / 1e6)
    if abs(skew) > SKEW_SECONDS + (after - before) / 2:
        yield warning(
            f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} Redis's",
            "leases are safe (they use Redis's clock), but logs, graphs and the store's signatures are not",
            "sudo timedatectl set-ntp true (or chronyc makestep), here or there",
        )
    else:
        yield ok(f"this machine's clock is within {SKEW_SECONDS:g} s of Redis's")


def _addresses(host: str, port: int) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError:
        return []
