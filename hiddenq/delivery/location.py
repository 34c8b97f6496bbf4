"""One `run` at a time on an output location.

Invariant: the owner is named by a key that lives only as long as its process renews it; so a location is free again
within a lease of its owner's death, and at once if that owner can be seen from here and its process is gone. An owner
whose key someone else has taken meanwhile (it was stopped for longer than a lease) learns so: `check` raises.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import redis

from hiddenq import telemetry
from hiddenq.contracts.errors import RedisAway, RedisRefused, RunMismatch
from hiddenq.delivery.background import Background
from hiddenq.delivery.connection import Patience, away_errors, raw
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.whereabouts import is_gone, whereabouts

_RENEW = """
-- The owner's key lives on (ARGV[2] > 0, milliseconds) or ends, if it is still this owner's (ARGV[1]).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return tonumber(ARGV[2]) > 0 and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or redis.call('DEL', KEYS[1])
"""


class LocationLock(Background):
    """Holds an output location while it is open; a context manager with a thread that renews.

    `command` is what joins the run that is going on, told to whoever comes second.
    """

    def __init__(self, client: redis.Redis, location: str, *, settings: DeliverySettings, command: str) -> None:
        super().__init__("location", settings.renew_seconds)
        self._client = client
        self._key = _key(location)
        self._location = location
        self._command = command
        self._milliseconds = int(settings.lease_seconds * 1000)
        self._value = json.dumps({**whereabouts(), "token": secrets.token_hex(8)})
        self._is_lost = False
        self._renew = client.register_script(_RENEW)

    @staticmethod
    def is_held(client: redis.Redis, location: str) -> bool:
        """Whether anyone holds a location now; nobody does whose process can be seen to be gone."""
        with away_errors():
            found = client.get(_key(location))
        return bool(found) and not is_gone(_said(found))

    def check(self) -> None:
        """Raise `RunMismatch` if someone else holds the location by now."""
        if self._is_lost:
            raise self._refusal()

    def _begin(self) -> None:
        Patience()(self._acquire)

    def _end(self) -> None:
        try:
            with away_errors():
                self._renew(keys=[self._key], args=[self._value, 0])
        except (RedisAway, RedisRefused) as away:
            telemetry.logger().warning("location_not_freed", location=self._location, error=str(away))

    def _acquire(self) -> None:
        """Take the location.

        Raises:
            RunMismatch: someone else has it.
        """
        found = self._client.get(self._key)
        if found and is_gone(_said(found)):
            self._renew(keys=[self._key], args=[found, 0])
        if not self._take():
            raise self._refusal()

    def _take(self) -> bool:
        """Whether the location is this owner's: it was already, or nobody's."""
        taken = self._client.set(self._key, self._value, nx=True, px=self._milliseconds)
        return bool(taken) or raw(self._client.get(self._key)) == self._value.encode()

    def _refusal(self) -> RunMismatch:
        with away_errors():
            owner = _said(self._client.get(self._key))
        if not {"pid", "host"} <= owner.keys():
            return RunMismatch(
                f"{self._location} is being run by someone who does not say who; if nobody runs it, delete the key "
                f"that says so: redis-cli DEL {self._key}"
            )
        return RunMismatch(
            f"{self._location} is being run by process {owner['pid']} on {owner['host']}; to join it: {self._command}"
        )

    def _round(self) -> None:
        try:
            with away_errors():
                renewed = self._renew(keys=[self._key], args=[self._value, self._milliseconds])
                self._is_lost = not (renewed or self._take())
        except (RedisAway, RedisRefused) as error:
            telemetry.logger().debug("location_waits", error=str(error))


def _said(value: Any) -> dict[str, Any]:
    """What an owner says of itself; {} if that is nothing of ours."""
    try:
        said = json.loads(raw(value))
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _key(location: str) -> str:
    return f"hiddenq:owner:{location}"
