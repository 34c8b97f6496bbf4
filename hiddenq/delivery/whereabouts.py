"""Which process, in which world of process ids: how one process says who it is, and another whether it is gone.

Invariant: a process is called gone only by one that could see it. A process id means something only on one host, since
one boot, inside one namespace; there it is compared together with the moment the process was started, so an id that
was given out again is not taken for its former owner. Of anyone else nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiddenq import telemetry

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_ENDED_STATES = ("Z", "X")
"""Of a process that has ended and that nobody has waited for: in a container whose first process waits for none, it is
listed for ever."""


def worker_name(role: str) -> str:
    """A name that no other process has, whatever container or host it runs on."""
    return f"{role}-{telemetry.host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


def this_world() -> dict[str, Any]:
    """Host, boot and namespace in which a process id of ours means something."""
    boot, namespace = "", 0
    with contextlib.suppress(OSError):  # where there is no /proc, the host's name has to do
        boot, namespace = _BOOT_ID.read_text().strip(), _NAMESPACE.stat().st_ino
    return {"host": telemetry.host_name(), "boot": boot, "pid_namespace": namespace}


def whereabouts(pid: int | None = None) -> dict[str, Any]:
    """A process of this world (by default this one), for `is_gone` and for people to read."""
    pid = pid or os.getpid()
    return {**this_world(), "pid": pid, "started": _told(pid)[1]}


def is_same_world(known: Mapping[str, Any]) -> bool:
    """Whether process ids of `known` mean the same here."""
    here = this_world()
    return all(known.get(name) == value for name, value in here.items())


def is_gone(known: Mapping[str, Any]) -> bool:
    """Whether a process has ended for certain; False for one that can't be seen from here."""
    if not is_same_world(known):
        return False
    try:
        pid = int(known["pid"])
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, KeyError, TypeError, ValueError):
        return True
    except PermissionError:
        pass
    state, started = _told(pid)
    return state in _ENDED_STATES or (started is not None and known.get("started") not in (None, started))


def _told(pid: int) -> tuple[str, int | None]:
    """State of a process, and its start in ticks since this host's boot; "" and None where that is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", None
