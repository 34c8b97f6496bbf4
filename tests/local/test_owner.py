"""Two hosts, no Redis in common, one location: one of them runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch
from hiddenq.owner import OwnerMark
from hiddenq.storage import ObjectStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "out")


def mark(store: ObjectStore) -> OwnerMark:
    return OwnerMark(store, renew_seconds=0.05, watch_seconds=0.3)


def test_the_second_host_is_refused_naming_the_first(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENQ_HOST", "first")
    with mark(store):
        monkeypatch.setenv("HIDDENQ_HOST", "second")
        with pytest.raises(RunMismatch, match=rf"being run by process {os.getpid()} on first, which has a"):
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
