"""The Lua scripts in `lua/`, by name: each is one atomic step, on the Redis server's clock.

Invariant: whatever a script decides, it decides and does in one step that nothing can come between; so a process may
die before or after it, never inside.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import redis

Encodable = bytes | str | int | float


@cache
def source(name: str) -> str:
    """A script's text, with what all scripts stand on in front of it."""
    folder = resources.files(__package__) / "lua"
    return "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name))


class Scripts:
    """Runs the scripts on one client."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._registered: dict[str, Any] = {}

    def run(self, name: str, *values: Encodable, **arguments: Any) -> Any:
        """Run `lua/<name>.lua` with named arguments (None is left out) and further values, and return its answer."""
        script = self._registered.get(name)
        if script is None:
            script = self._registered[name] = self._client.register_script(source(name))
        named = {key: value for key, value in arguments.items() if value is not None}
        return script(args=[json.dumps(named), *values])
