"""Where a machine keeps what belongs to a run but is not its result: embedded Redis, spool, logs.

Invariant: the folder follows from the output location alone, so `status`, `failed` and a second `run` find it by
`--out`. A local location holds it itself (`<location>/.hiddenq`), so removing the location removes it, and spool and
location share a file system; for S3 it lies under `$XDG_STATE_HOME/hiddenq`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import redis

from hiddenq.contracts.errors import UsageError
from hiddenq.delivery import EmbeddedServer, LocationLock, connect
from hiddenq.storage import ObjectStore

LOCAL_FOLDER = ".hiddenq"
REDIS_VARIABLE = "HIDDENQ_REDIS_URL"
PASSWORD_VARIABLE = "HIDDENQ_REDIS_PASSWORD"


def home_folder() -> Path:
    """`$XDG_STATE_HOME/hiddenq`, by default `~/.local/state/hiddenq`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hiddenq"


def default_spool() -> Path:
    """The spool of a machine that joins a fleet and was not told another folder."""
    return home_folder() / "spool"


def state_folder(store: ObjectStore) -> Path:
    """The folder of one location; it may not exist yet."""
    if not store.uri.startswith("s3://"):
        return Path(store.uri) / LOCAL_FOLDER
    return home_folder() / hashlib.blake2b(store.uri.encode(), digest_size=8).hexdigest()


def names_redis(redis_url: str | None) -> bool:
    """Whether a Redis is named, by an option or in the environment, so that no embedded one is meant."""
    return bool(redis_url or os.environ.get(REDIS_VARIABLE))


def is_own_redis(store: ObjectStore, redis_url: str | None) -> bool:
    """Whether the Redis that is meant is the embedded one of this location: none is named, or that one is."""
    named = redis_url or os.environ.get(REDIS_VARIABLE)
    if not named:
        return True
    server = EmbeddedServer.find(state_folder(store) / "redis")
    return server is not None and server.url == named


@contextlib.contextmanager
def redis_of(store: ObjectStore, redis_url: str | None) -> Iterator[redis.Redis]:
    """A client of the Redis that has this location's run: the one named, else the embedded one, woken if it sleeps.

    Raises:
        UsageError: no address is given and this machine has no state of the location.
    """
    if names_redis(redis_url):
        with contextlib.closing(connect(redis_url)) as client:
            yield client
        return
    data_folder = state_folder(store) / "redis"
    if not data_folder.is_dir():
        raise UsageError(
            f"{store.uri}: this machine has no queue of it; name the Redis of its run with --redis-url, or look at "
            "what is stored with `hiddenq verify`"
        )
    running = EmbeddedServer.find(data_folder)
    server = running or EmbeddedServer.start(data_folder)
    is_owned = False
    try:
        with contextlib.closing(server.connect()) as client:
            try:
                yield client
            finally:
                # A `run` that came meanwhile has taken this server over.
                is_owned = LocationLock.is_held(client, store.uri)
    finally:
        if running is None and not is_owned:
            server.stop()
