"""A Redis that cannot carry a run is refused at the start, in one line that says what to do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hiddenq.cli import stages
from hiddenq.contracts.errors import RedisAway, RedisRefused, UsageError
from hiddenq.delivery import connect
from tests.support.command import exit_status
from tests.support.ports import free_port
from tests.support.redis_proxy import RedisProxy
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HIDDENQ_REDIS_URL", "HIDDENQ_REDIS_PASSWORD", "HIDDENQ_REDIS_PASSWORD_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def odd_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "odd", **request.param)
    yield server
    server.stop()


def test_without_an_address_it_says_how_to_give_one() -> None:
    with pytest.raises(UsageError, match="no Redis address: give --redis-url or set HIDDENQ_REDIS_URL"):
        connect()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--redis-url ftp://x"):
        connect("ftp://x")


@pytest.mark.parametrize("password", ["wrong", None])
def test_a_wrong_or_missing_password_is_refused(redis_server: RedisServer, password: str | None) -> None:
    with pytest.raises(RedisRefused, match="set HIDDENQ_REDIS_PASSWORD or HIDDENQ_REDIS_PASSWORD_FILE") as caught:
        connect(redis_server.bare_url, password=password)
    assert caught.value.exit_status == 2
    assert "test-password" not in str(caught.value)


@pytest.mark.parametrize("odd_server", [{"password": ""}], indirect=True)
def test_a_password_for_a_redis_that_has_none_is_refused_with_the_word_to_unset_it(odd_server: RedisServer) -> None:
    connect(odd_server.bare_url).close()
    with pytest.raises(RedisRefused, match="it has none: unset HIDDENQ_REDIS_PASSWORD and HIDDENQ_REDIS_PASSWORD_FILE"):
        connect(odd_server.bare_url, password="one too many")


def test_the_password_comes_from_the_environment_or_a_file(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_URL", redis_server.bare_url)
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", redis_server.password)
    connect().close()
    monkeypatch.delenv("HIDDENQ_REDIS_PASSWORD")
    secret = tmp_path / "secret"
    secret.write_text(redis_server.password + "\n")
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD_FILE", str(secret))
    connect().close()
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD_FILE", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"HIDDENQ_REDIS_PASSWORD_FILE .*none: No such file"):
        connect()


@pytest.mark.parametrize("odd_server", [{"maxmemory_policy": "allkeys-lru"}], indirect=True)
def test_a_policy_that_drops_jobs_is_refused(odd_server: RedisServer) -> None:
    with pytest.raises(
        RedisRefused, match=r"has maxmemory-policy allkeys-lru, which drops jobs .* expected noeviction"
    ):
        connect(odd_server.url)


@pytest.mark.parametrize("version", ["4.0", "5.0", "6.0"])
def test_a_redis_older_than_required_is_refused_in_one_line(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", redis_server.password)
    monkeypatch.setattr(stages, "configure_logging", lambda **options: None)  # it is the whole process's
    own = ".".join(redis_client.info("server")["redis_version"].split(".")[:2])
    assert len(own) == len(version), own
    with RedisProxy(redis_server.port) as proxy:
        proxy.misquote(f"redis_version:{own}".encode(), f"redis_version:{version}".encode())
        for command in (["status"], ["upload"], ["monitor", "--port", "0"]):
            assert exit_status([*command, "--redis-url", proxy.url]) == 2
            said = capsys.readouterr().err
            assert re.fullmatch(rf"hiddenq: {proxy.url} is Redis {version}\S*; 6\.2 or newer is needed\n", said), said


def test_a_replica_is_refused(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client:
        client.replicaof("127.0.0.1", 1)
        with pytest.raises(RedisRefused, match="is a read-only replica; give the address of the primary"):
            connect(own_redis_server.url)
        client.replicaof("NO", "ONE")


def test_an_unreachable_server_is_waited_for_then_given_up() -> None:
    with pytest.raises(RedisAway, match=r"redis://127\.0\.0\.1:\d+/0: .*refused.*; gave up after 0\.2 s"):
        connect(f"redis://user:secret@127.0.0.1:{free_port()}/0", wait_seconds=0.2)


def test_no_password_in_an_address_is_ever_shown() -> None:
    with pytest.raises(UsageError, match="a password stands in HIDDENQ_REDIS_PASSWORD") as caught:
        connect("redis://127.0.0.1:1/0?password=planted")
    assert "planted" not in str(caught.value)
    with pytest.raises(UsageError) as caught:
        connect("nonsense://me:planted@127.0.0.1:1/0")
    assert "planted" not in str(caught.value)


def test_a_supervisors_children_wait_for_a_redis_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENQ_REDIS_WAIT_SECONDS", "0.2")
    with pytest.raises(RedisAway, match=r"gave up after 0\.2 s"):
        connect(f"redis://127.0.0.1:{free_port()}/0")


def test_a_full_server_is_away_not_refused(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(RedisAway, match="used memory > 'maxmemory'"):
            connect(own_redis_server.url, wait_seconds=0.1)


def test_a_server_that_comes_up_late_is_waited_for(own_redis_server: RedisServer) -> None:
    own_redis_server.kill()
    threading.Timer(0.4, own_redis_server.start).start()
    connect(own_redis_server.url, wait_seconds=20).close()


def test_a_server_that_is_loading_is_waited_for(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client, client.pipeline() as pipeline:
        for number in range(1200):
            pipeline.set(f"key{number}", "x")
        pipeline.execute()
        client.bgrewriteaof()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
    own_redis_server.kill()
    with own_redis_server.config.open("a") as config:
        config.write("key-load-delay 1000\nloading-process-events-interval-bytes 1024\n")
    starting = threading.Thread(target=own_redis_server.start)
    starting.start()
    with own_redis_server.client() as client:
        wait_until(lambda: is_loading(client), what="it says that it is loading")
        with pytest.raises(RedisAway, match="loading"):
            connect(own_redis_server.url, wait_seconds=0)
        connect(own_redis_server.url, wait_seconds=60).close()
        assert client.get("key1199") == b"x"
    starting.join()


def is_loading(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        pass
    return False
