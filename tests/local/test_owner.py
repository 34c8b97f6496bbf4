"""Two hosts, one location: one of them runs it, and one that lost it learns so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch
from hiddenq.delivery import LocationLock, connect
from hiddenq.interruption import Interrupted, interruptible
from hiddenq.owner import OwnerMark, owned
from hiddenq.storage import ObjectStore, open_store
from tests.delivery.conftest import FAST
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "out")


def is_refused(check: Callable[[], None]) -> bool:
    with contextlib.suppress(RunMismatch):
        check()
        return False
    return True


def mark(store: ObjectStore) -> OwnerMark:
    return OwnerMark(store, renew_seconds=0.05, watch_seconds=0.3)


def test_the_second_host_is_refused_naming_the_first(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENQ_HOST", "first")
    with mark(store):
        monkeypatch.setenv("HIDDENQ_HOST", "second")
        with pytest.raises(RunMismatch, match=rf"being run by process {os.getpid()} on first, with another Redis"):
            mark(store).__enter__()
    assert store.stat(names.OWNER) is None, "a run that ended leaves no mark"
    with mark(store):
        assert json.loads(store.get_bytes(names.OWNER))["host"] == "second"


def test_the_mark_of_a_host_that_died_is_taken_over(store: ObjectStore) -> None:
    store.put_bytes(names.OWNER, json.dumps({"host": "gone", "pid": 1, "token": "x", "count": 3}).encode())
    with mark(store):
        assert json.loads(store.get_bytes(names.OWNER))["pid"] == os.getpid()


def test_a_mark_that_is_no_mark_holds_nobody_up(store: ObjectStore) -> None:
    store.put_bytes(names.OWNER, b"[not a mark")
    with mark(store):
        assert json.loads(store.get_bytes(names.OWNER))["pid"] == os.getpid()


def test_an_owner_interrupted_while_it_takes_the_location_leaves_no_mark(store: ObjectStore) -> None:
    def interrupt() -> None:
        wait_until(lambda: store.stat(names.OWNER))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    with interruptible():
        thread.start()
        with pytest.raises(Interrupted):
            OwnerMark(store).__enter__()
    thread.join()
    assert store.stat(names.OWNER) is None


def test_an_owner_that_was_stopped_and_taken_for_dead_learns_so(store: ObjectStore) -> None:
    with mark(store) as first:
        first.check()
        other = {"host": "second", "pid": 7, "token": "y", "count": 0}
        store.put_bytes(names.OWNER, json.dumps(other).encode())  # as the second one did, while the first was stopped
        wait_until(lambda: is_refused(first.check))
        with pytest.raises(RunMismatch, match="being run by process 7 on second, with another Redis"):
            first.check()
    assert json.loads(store.get_bytes(names.OWNER)) == other, "it is the second one's, and stays"


def test_a_mark_that_someone_removed_is_written_again(store: ObjectStore) -> None:
    with mark(store) as owner:
        store.delete(names.OWNER)
        wait_until(lambda: store.stat(names.OWNER))
        owner.check()


def test_whoever_owns_a_location_holds_it_in_redis_and_in_the_location(
    store: ObjectStore, redis_server: RedisServer
) -> None:
    with connect(redis_server.url) as client, owned(client, store, settings=FAST, command="hiddenq worker") as check:
        check()
        assert LocationLock.is_held(client, store.uri)
        assert store.stat(names.OWNER)
        with pytest.raises(RunMismatch, match="to join it: hiddenq worker"):
            owned(client, store, settings=FAST, command="hiddenq worker").__enter__()
        client.set(f"hiddenq:owner:{store.uri}", json.dumps({"pid": 8, "host": "third"}))
        wait_until(lambda: is_refused(check))
        with pytest.raises(RunMismatch, match="being run by process 8 on third"):
            check()


def test_an_owner_that_says_nothing_of_itself_is_still_one(redis_server: RedisServer, store: ObjectStore) -> None:
    with contextlib.closing(connect(redis_server.url)) as client:
        client.set(f"hiddenq:owner:{store.uri}", "[not an owner")
        with pytest.raises(
            RunMismatch, match=rf"someone who does not say who; .*redis-cli DEL hiddenq:owner:{store.uri}$"
        ):
            owned(client, store, settings=FAST, command="hiddenq worker").__enter__()
