"""Who owns a location: said in Redis, for all that share it, and in the location itself, for those that do not.

Invariant: two `run`s (or `produce`s) do not both work on one location for longer than a moment. The mark in the
location is an object that its owner changes every ten seconds; whoever finds one watches whether it changes, so no
clock is compared, and takes over one that stands still (or whose process can be seen to be gone). A store needs no
conditional writes for it: of two that write at once the later one stays, and the earlier one sees it when it looks
again, as does an owner that was stopped for so long that it was taken for dead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import HiddenqError, ObjectMissing, RunMismatch
from hiddenq.delivery import DeliverySettings, LocationLock
from hiddenq.delivery.background import Background
from hiddenq.delivery.whereabouts import is_gone, whereabouts
from hiddenq.storage import ObjectStore
from hiddenq.telemetry import logger

RENEW_SECONDS = 10.0
WATCH_SECONDS = 3 * RENEW_SECONDS
"""A mark that does not change for so long has no owner any more."""
SETTLE_SECONDS = 0.5
"""Between writing the mark and looking at it again."""


@contextlib.contextmanager
def owned(
    client: redis.Redis, store: ObjectStore, *, settings: DeliverySettings, command: str
) -> Iterator[Callable[[], None]]:
    """Own a location inside; yields what raises `RunMismatch` once someone else has taken it.

    `command` is what joins the run, told to whoever comes second.

    Raises:
        RunMismatch: someone else has it.
    """
    with LocationLock(client, store.uri, settings=settings, command=command) as lock, OwnerMark(store) as mark:

        def check() -> None:
            lock.check()
            mark.check()

        yield check


class OwnerMark(Background):
    """Holds a location while it is open; a context manager with a thread that renews."""

    def __init__(
        self, store: ObjectStore, *, renew_seconds: float = RENEW_SECONDS, watch_seconds: float = WATCH_SECONDS
    ) -> None:
        super().__init__("owner", renew_seconds)
        self._store = store
        self._watch_seconds = watch_seconds
        self._me = {**whereabouts(), "token": secrets.token_hex(8)}
        self._taken_by: dict[str, Any] | None = None
        self._count = itertools.count()

    def check(self) -> None:
        """Raise `RunMismatch` if another owner has taken the location by now."""
        if self._taken_by:
            raise self._refusal(self._taken_by)

    def _begin(self) -> None:
        """Take the location.

        Raises:
            RunMismatch: another `run` has it, with another Redis than this one's.
        """
        found = self._read()
        if found and not is_gone(found):
            logger().warning("location_has_an_owner", owner=found, next="watching whether it is alive")
            self._closing.wait(self._watch_seconds)
            if (now := self._read()) and now != found:
                raise self._refusal(now)
        try:
            self._write()
            self._closing.wait(min(SETTLE_SECONDS, self._seconds / 2))
            self._look()
            self.check()
        except BaseException:  # interrupted, perhaps: nobody would take the mark away
            self._end()
            raise

    def _end(self) -> None:
        try:
            if not self._taken_by:
                self._store.delete(names.OWNER)
        except HiddenqError as away:
            logger().warning("owner_mark_left", location=self._store.uri, error=str(away))

    def _round(self) -> None:
        if self._taken_by:
            return
        try:
            self._look()
            if not self._taken_by:
                self._write()
        except HiddenqError as away:
            logger().debug("owner_mark_waits", error=str(away))

    def _look(self) -> None:
        """See whether the mark is still this owner's; one that was removed is nobody else's."""
        found = self._read()
        if found and found["token"] != self._me["token"]:
            self._taken_by = found

    def _write(self) -> None:
        self._store.put_bytes(names.OWNER, json.dumps(self._me | {"count": next(self._count)}).encode())

    def _read(self) -> dict[str, Any] | None:
        """The mark as it lies there; None if there is none, or none of ours."""
        try:
            found = json.loads(self._store.get_bytes(names.OWNER))
        except (ObjectMissing, ValueError):
            return None
        return found if isinstance(found, dict) and {"host", "pid", "token"} <= found.keys() else None

    def _refusal(self, owner: dict[str, Any]) -> RunMismatch:
        return RunMismatch(
            f"{self._store.uri} is being run by process {owner['pid']} on {owner['host']}, with another Redis "
            "than this one's; start that run with --redis-url to let other machines join it"
        )
