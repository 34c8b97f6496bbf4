"""One `run` at a time on an output location.

Invariant: the owner is named by a key that lives only as long as its process renews it; so a location is free again
within a lease of its owner's death, and at once if that owner was on this host and its process is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from types import TracebackType
from typing import Any, Self

import redis

from hiddenq import telemetry
from hiddenq.contracts.errors import RedisAway, RunMismatch
from hiddenq.delivery.connection import Patience, away_errors, raw
from hiddenq.delivery.settings import DeliverySettings

_RENEW = """
-- The owner's key lives on (ARGV[2] > 0, milliseconds) or ends, if it is still this owner's (ARGV[1]).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return tonumber(ARGV[2]) > 0 and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or redis.call('DEL', KEYS[1])
"""


class LocationLock:
    """Holds an output location while it is open; a context manager with a thread that renews.

    `command` is what joins the run that is going on, told to whoever comes second.
    """

    def __init__(self, client: redis.Redis, location: str, *, settings: DeliverySettings, command: str) -> None:
        self._client = client
        self._key = _key(location)
        self._location = location
        self._command = command
        self._milliseconds = int(settings.lease_seconds * 1000)
        self._seconds = settings.renew_seconds
        self._value = json.dumps({"host": telemetry.host_name(), "pid": os.getpid(), "token": secrets.token_hex(8)})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="location", daemon=True)
        self._renew = client.register_script(_RENEW)

    @staticmethod
    def is_held(client: redis.Redis, location: str) -> bool:
        """Whether anyone holds a location now."""
        with away_errors():
            return bool(client.exists(_key(location)))

    def __enter__(self) -> Self:
        Patience()(self._acquire)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        try:
            with away_errors():
                self._renew(keys=[self._key], args=[self._value, 0])
        except RedisAway as away:
            telemetry.logger().warning("location_not_freed", location=self._location, error=str(away))

    def _acquire(self) -> None:
        """Take the location.

        Raises:
            RunMismatch: someone else has it.
        """
        found = self._client.get(self._key)
        if found and owner_is_gone(json.loads(raw(found))):
            self._client.delete(self._key)
        if self._client.set(self._key, self._value, nx=True, px=self._milliseconds):
            return
        owner = json.loads(raw(self._client.get(self._key)) or b"{}")
        if owner != json.loads(self._value):
            raise RunMismatch(
                f"{self._location} is being run by process {owner.get('pid')} on {owner.get('host')}; "
                f"to join it: {self._command}"
            )

    def _work(self) -> None:
        while not self._closing.wait(self._seconds):
            try:
                with away_errors():
                    if not self._renew(keys=[self._key], args=[self._value, self._milliseconds]):
                        self._client.set(self._key, self._value, nx=True, px=self._milliseconds)
            except RedisAway as error:
                telemetry.logger().debug("location_waits", error=str(error))


def _key(location: str) -> str:
    return f"hiddenq:owner:{location}"


def owner_is_gone(owner: dict[str, Any]) -> bool:
    """Whether an owner (`host`, `pid`) was on this host and its process exists no more."""
    if owner.get("host") != telemetry.host_name():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except (ProcessLookupError, ValueError, TypeError):
        return True
    except PermissionError:
        return False
    return False
