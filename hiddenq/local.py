"""The whole pipeline on one machine: `hiddenq run`.

Invariant: this process does none of the work and holds none of the truth. It starts a Redis, a producer, one GPU
worker a device and some uploaders, watches the ledger, and may be killed at any moment: what is committed is in the
store, what is not is found again by the next `run`.

    lock the location ─► produce (its own process) ─► workers and uploaders ─► watch ─► finish: index, manifest
                                                        restarted when they die         exit 0, or 1 with the reason
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import redis

from hiddenq import state
from hiddenq.contracts.errors import HiddenqError, UserError
from hiddenq.delivery import EmbeddedServer, LocationLock, Reaper, ServerGuard, connect
from hiddenq.interruption import Interrupted, interruptible
from hiddenq.owner import owned
from hiddenq.pipeline import Pipeline, RunSettings
from hiddenq.storage import ObjectStore, open_store
from hiddenq.storage.files import must_take_folder, no_empty_folders

__all__ = ["RunSettings", "run"]


def run(settings: RunSettings) -> int:
    """Bring a location to completion; returns the exit status, 128 and the signal's number if one ended it.

    Raises:
        UserError: something is not as it must be; nothing heavy was started, nothing is left behind.
        RetryableError: nothing alive could finish the run, with the reason.
    """
    with interruptible():
        try:
            return _run(settings)
        except Interrupted as interrupted:
            print("interrupted; the same command goes on from here", file=sys.stderr)
            return 128 + interrupted.number


def _run(settings: RunSettings) -> int:
    store = open_store(settings.out, settings.store)
    folder = state.state_folder(store)
    must_take_folder(store.open_local(""))
    is_new = not folder.exists()
    litter: list[Path] = []
    with no_empty_folders(folder), contextlib.ExitStack() as stack:
        stack.callback(_remove, litter)
        client, check_owner = _take(stack, store, folder, settings)
        stack.enter_context(Reaper(client, settings.delivery))
        pipeline = Pipeline(settings, store, client, folder, check_owner)
        try:
            return pipeline.run()
        except UserError:
            if is_new and not pipeline.is_prepared:
                litter.append(folder)  # no run came of it
            raise


def _take(
    stack: contextlib.ExitStack, store: ObjectStore, folder: Path, settings: RunSettings
) -> tuple[redis.Redis, Callable[[], None]]:
    """Have a Redis that children find in their environment, and own the location; the stack gives both back.

    Returns a client, and what raises `RunMismatch` once the location is someone else's.

    Raises:
        RunMismatch: another `run` owns the location.
    """
    if url := settings.redis_url or os.environ.get(state.REDIS_VARIABLE):
        os.environ[state.REDIS_VARIABLE] = url
        client, command = connect(url), _joining(url)
    else:
        server = EmbeddedServer.start(folder / "redis")
        guard = ServerGuard(server, stops_server=False)
        stack.callback(_stop_unowned, guard, store)
        stack.enter_context(guard)
        os.environ[state.REDIS_VARIABLE] = server.url
        os.environ[state.PASSWORD_VARIABLE] = server.password
        client = server.connect()
        command = _joining(server.url, f"HIDDENQ_REDIS_PASSWORD_FILE={server.password_file} ")
    stack.callback(client.close)
    check_owner = stack.enter_context(owned(client, store, settings=settings.delivery, command=command))
    return client, check_owner


def _stop_unowned(guard: ServerGuard, store: ObjectStore) -> None:
    """Stop the embedded server, whoever started it, unless another `run` holds the location by now."""
    server = EmbeddedServer.find(guard.server.data_dir) or guard.server  # found nowhere: its folder is gone, perhaps
    is_owned = False
    with (
        contextlib.suppress(HiddenqError, redis.RedisError),
        contextlib.closing(server.connect(wait_seconds=0.0)) as client,
    ):
        is_owned = LocationLock.is_held(client, store.uri)
    if not is_owned:
        server.stop()


def _joining(url: str, password: str = "") -> str:
    """How another process joins a run; never with a password in it."""
    parts = urlsplit(url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return f"HIDDENQ_REDIS_URL={shown} {password}hiddenq worker (and hiddenq upload)"


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
