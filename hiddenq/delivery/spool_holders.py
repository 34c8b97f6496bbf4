"""Whether all processes that serve one `spool_id` work in one folder: a copied spool is found, and refused.

A spool's id is a file in it, so a copy of the folder, or of the machine's image, has the same id and would take the
first one's uploads, whose files it does not have. Names and paths can't tell a copy from a spool that was moved,
mounted elsewhere or has a new host name; what the folder holds can.

Invariant: nobody is refused on weak evidence. A process raises a number in its folder, and only then in Redis. Another
one is known to be in the same folder if its very file is seen (the same kernel, device and inode), or if a number that
came to Redis while we watched was found in our folder, too. It is known to be elsewhere only if it lives, because its
number rose twice while we watched, and our folder had neither. What is dead proves nothing, and is waited for no longer
than a lease. Whoever came later is the one who ends; at its start, before it has claimed anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import redis
from pydantic import ValidationError

from hiddenq import telemetry
from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import RedisAway, RedisRefused, UsageError
from hiddenq.delivery.background import Background
from hiddenq.delivery.connection import Patience, away_errors, text
from hiddenq.delivery.scripts import Scripts
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.whereabouts import whereabouts

MISSES = 2
"""So many numbers of a living process must be missing here before it is said to be elsewhere."""


class Presence(Protocol):
    """What one process shows in a spool's folder, and sees there (`hiddenq.storage.SpoolPresence`)."""

    folder: Path
    spool_id: str
    token: str

    def show(self, number: int) -> bool:
        """Put a number into this process's file; False if that can't be done."""

    def number(self, token: str) -> int | None:
        """Another process's number in this folder; 0 if it is not here, None if that can't be told."""

    def place(self, token: str) -> str:
        """Which file that is, on this host; "" if it is not here."""

    def leave(self) -> None:
        """Take this process's file away."""


class Holder(Frozen):
    """What a process says of itself in Redis."""

    token: str
    number: int
    since: float
    """Redis time at which it came."""
    seen: float
    boot: str
    place: str
    host: str
    pid: int
    folder: str


class Acquaintance:
    """Which of the others are known to work in this process's folder, and which are known not to."""

    def __init__(self, presence: Presence, boot: str) -> None:
        self._presence, self._boot = presence, boot
        self._here: set[str] = set()
        self._last: dict[str, int] = {}
        self._misses: dict[str, int] = {}

    def is_here(self, other: Holder) -> bool | None:
        """Whether another process works in this folder; None while that can't be told."""
        token = other.token
        if token in self._here:
            return True
        is_same_host = bool(self._boot) and other.boot == self._boot
        is_same_file = is_same_host and bool(other.place) and self._presence.place(token) == other.place
        has_risen = other.number > self._last.setdefault(token, other.number)
        found = self._presence.number(token) if has_risen else None
        if is_same_file or (found is not None and found >= other.number):
            self._here.add(token)
            return True
        if found is not None:
            self._last[token], self._misses[token] = other.number, self._misses.get(token, 0) + 1
        return False if self._misses.get(token, 0) >= MISSES else None


class SpoolHolders(Background):
    """Holds one process's place in a spool; a context manager with a thread that keeps it and looks at the others."""

    def __init__(
        self,
        client: redis.Redis,
        presence: Presence,
        *,
        settings: DeliverySettings,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("spool", settings.renew_seconds)
        self._run_script = Scripts(client).run
        self._presence = presence
        self._settings = settings
        self._patiently = Patience(give_up=give_up)
        me = whereabouts()
        self._me: dict[str, Any] = {
            "token": presence.token,
            "boot": me["boot"],
            "host": me["host"],
            "pid": me["pid"],
            "folder": str(presence.folder),
        }
        self._known = Acquaintance(presence, me["boot"])
        self._number = 0
        self._elsewhere: Holder | None = None
        self._client = client

    def check(self) -> None:
        """Raise `UsageError` if this folder was found to be another one than that of who was here before."""
        if self._elsewhere:
            raise self._refusal(self._elsewhere)

    def _begin(self) -> None:
        """Come in, once nobody who may live is unknown.

        Raises:
            UsageError: someone who lives works in another folder with this spool's id.
        """
        until = time.monotonic() + self._settings.lease_seconds
        has_said = False
        while True:
            unknown = self._unknown(self._patiently(lambda: self._tell(0))[1])
            self.check()
            if not unknown or time.monotonic() >= until:
                break
            if not has_said:
                telemetry.logger().info(
                    "spool_is_held", spool=self._presence.spool_id, by=f"process {unknown[0].pid} on {unknown[0].host}",
                    folder=unknown[0].folder, next="watching whether that is this folder",
                )  # fmt: skip
            has_said = True
            self._closing.wait(self._seconds / 4)
        self._patiently(self._keep)

    def _round(self) -> None:
        try:
            with away_errors():
                self._keep()
        except (RedisAway, RedisRefused) as error:
            telemetry.logger().debug("spool_waits", error=str(error))

    def _end(self) -> None:
        if not self._number:
            return
        try:
            with away_errors():
                self._client.hdel(f"hiddenq:spool:{self._presence.spool_id}:holders", self._presence.token)
            self._presence.leave()  # only now: who is in Redis and not in the folder would be watched
        except (RedisAway, RedisRefused, OSError) as error:
            telemetry.logger().debug("spool_not_left", error=str(error))

    def _keep(self) -> None:
        """Raise this process's number, and look at those who were here before it."""
        if self._presence.show(self._number + 1):
            self._number += 1
        since, others = self._tell(self._number)
        self._unknown([other for other in others if (other.since, other.token) < (since, self._presence.token)])

    def _unknown(self, others: list[Holder]) -> list[Holder]:
        """Those of whom it can't be told yet where they work; one that works elsewhere is noted."""
        verdicts = [(other, self._known.is_here(other)) for other in others]
        self._elsewhere = self._elsewhere or next((other for other, is_here in verdicts if is_here is False), None)
        return [other for other, is_here in verdicts if is_here is None]

    def _tell(self, number: int) -> tuple[float, list[Holder]]:
        """Say a number (0: nothing) and hear the others; returns since when this process is here, by Redis."""
        holder = self._me | {"number": number, "place": self._presence.place(self._presence.token)}
        since, *entries = self._run_script(
            "hold", spool_id=self._presence.spool_id, holder=holder, lease_seconds=self._settings.lease_seconds
        )
        return float(since), [read for entry in entries if (read := _read(entry)) is not None]

    def _refusal(self, other: Holder) -> UsageError:
        mine = self._presence
        return UsageError(
            f"--spool {mine.folder}: it has the id of a spool that process {other.pid} on {other.host} serves in "
            f"{other.folder}, another folder, so one is a copy of the other; to make this one a spool of its own, "
            f"delete {mine.folder}/spool_id and start again (its shards are looked through); spool {mine.spool_id}"
        )


def _read(entry: Any) -> Holder | None:
    """An entry as it lies in Redis; None if it is nothing of ours."""
    try:
        return Holder.model_validate_json(text(entry))
    except ValidationError:
        return None
