"""Fixtures of the uploader's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiddenq.storage import LocalStore, Spool
from tests.support.faulty_proxy import faulty_proxy
from tests.support.redis_server import own_redis_server, redis_client, redis_server, shared_redis_server
from tests.support.s3_server import s3_location, s3_server
from uploader import service

__all__ = [
    "faulty_proxy",
    "own_redis_server",
    "redis_client",
    "redis_server",
    "s3_location",
    "s3_server",
    "shared_redis_server",
]


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "OVERSEE_SECONDS", 0.3)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.open(tmp_path / "spool")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")
