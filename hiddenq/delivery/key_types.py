"""What each key in Redis is, and how one is found that holds what hiddenq never wrote: another program's, or a hand's.

Invariant: whoever meets such a key learns its name, what it holds and what to do, whatever the command was; so it is
said here, by the client that every process has, and by nobody else. Redis itself names no key.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import redis
from redis.client import Pipeline

from hiddenq.contracts.errors import RedisRefused, words_of

TYPES = {
    "string": r"hiddenq:(epoch|probe|swept|monitor:history|owner:.*|run:[^:]+:finishing)",
    "hash": r"hiddenq:(workers|run:[^:]+(:ledger|:totals)?|spool:[^:]+(:files|:holders)?)"
    r"|rq:(job|execution):.*|rq:worker:[^:]+",
    "list": r"hiddenq:run:[^:]+:(seconds|checks)|rq:queue:.*",
    "set": r"hiddenq:(runs|drained)|rq:(queues|workers(:.*)?|worker:[^:]+:executions)",
    "zset": r"hiddenq:(leases|delayed|executions|spools|workers:seen|run:[^:]+:(dead|foreign))"
    r"|rq:(wip|finished|failed|scheduled|executions):.*",
    "stream": r"rq:results:.*",
}
"""What each key is, by pattern of its name; lua/common.lua says what is in it."""
SHARED = (
    *(f"hiddenq:{name}" for name in ("epoch", "swept", "workers", "workers:seen", "spools", "runs", "drained")),
    *("hiddenq:leases", "hiddenq:delayed", "hiddenq:executions", "rq:queues", "rq:workers"),
)
"""Keys of no one run, worker or job: looked at first, and by accounts that may not list the others."""
COMPLAINTS = ("WRONGTYPE", "hash value is not an integer")
"""What Redis says of a command that a key is not made for."""
REMEDY = (
    "does another program use this database? Give hiddenq one of its own, or delete the key (redis-cli DEL) and start "
    "again: a run is rebuilt from its location"
)


class Client(redis.Redis):
    """A client that names the key which is not what hiddenq keeps under that name, as `RedisRefused`."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            _refuse(self, args[1:2], error)
            raise

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = self.command_stack
        try:
            return super().execute(raise_on_error)
        except redis.ResponseError as error:
            _refuse(self, [args[1] for args, _ in commands if len(args) > 1], error)
            raise


def expected_type(key: str) -> str | None:
    """What hiddenq keeps under a key; None if the key is not ours."""
    return next((kind for kind, pattern in TYPES.items() if re.fullmatch(pattern, key)), None)


@contextlib.contextmanager
def reading(key: str) -> Iterator[None]:
    """Inside, what lies under a key is made sense of.

    Raises:
        RedisRefused: it makes none.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise RedisRefused(f"{key} in Redis holds what hiddenq can't read ({words_of(error)}): {REMEDY}") from error


def _refuse(client: redis.Redis, keys: Iterable[Any], error: redis.ResponseError) -> None:
    """Raise `RedisRefused` with the key's name if what Redis complains of is a key that is not what we made it."""
    if not any(complaint in str(error) for complaint in COMPLAINTS):
        return
    try:
        found = _find(redis.Redis(connection_pool=client.connection_pool), keys)
    except redis.RedisError:  # an account that may not look, or a Redis that went away
        found = f"a key of hiddenq is not what hiddenq made it ({error})"
    if found is not None:
        raise RedisRefused(f"{found}: {REMEDY}") from error


def _find(client: redis.Redis, keys: Iterable[Any]) -> str | None:
    """Which key is wrong, and how: one of those that the command named, or else any of ours."""
    for chunk in itertools.chain((list(keys), SHARED), _chunks(client)):
        named = [key.decode(errors="replace") if isinstance(key, bytes) else str(key) for key in chunk]
        pipeline: Any = client.pipeline(transaction=False)
        for key in chunk:
            pipeline.type(key)
        for key, found in zip(named, pipeline.execute(), strict=True):
            expected = expected_type(key)
            if expected and found.decode() not in (expected, "none"):
                return f"{key} in Redis holds a {found.decode()}, where hiddenq keeps a {expected}"
            if key.endswith(":totals") and expected and (reason := _not_numbers(client, key)):
                return f"{key} in Redis holds {reason}, where hiddenq keeps numbers"
    return None


def _chunks(client: Any) -> Iterator[list[bytes]]:
    for pattern in ("hiddenq:*", "rq:*"):
        cursor = -1
        while cursor:
            cursor, found = client.scan(max(cursor, 0), match=pattern, count=1000)
            yield found


def _not_numbers(client: redis.Redis, key: str) -> str | None:
    values: Any = client.hgetall(key)
    return next((f"{name.decode()} {value!r}"[:100] for name, value in values.items() if not value.isdigit()), None)
