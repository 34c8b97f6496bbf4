"""What commands for people say where there is nothing to show, and what a Redis in trouble makes of their answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddenq.delivery import cancel, connect
from tests.monitor.made_fleet import made_record, start_run
from tests.support.command import Command, Ended, make_command
from tests.support.redis_server import RedisServer


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis whose appendonly is off."""
    server = RedisServer(tmp_path / "redis", appendonly="no")
    yield server
    server.stop()


def typed(server: RedisServer, home: Path, *arguments: str, **extra: str) -> Ended:
    return make_command(home, HIDDENQ_REDIS_URL=server.url, **extra)(*arguments)


def test_a_redis_that_is_not_durable_is_said_in_one_readable_line_beside_the_answer(
    forgetful: RedisServer, tmp_path: Path
) -> None:
    with forgetful.client() as client:
        start_run(client, made_record())
    for arguments, answer in (
        (("status",), "demo  needs help"),
        (("failed", "list"), "no dead letters"),
        (("cancel", "demo"), "6 batches taken out of the queue"),
    ):
        ended = typed(forgetful, tmp_path, *arguments)
        assert ended.status == 0, ended
        assert answer in ended.out
        assert ended.err == (
            f"hiddenq: redis not durable: {forgetful.bare_url}; appendonly is off: a restart loses the queue; resume "
            "rebuilds it\n"
        )


def test_a_redis_that_is_away_is_said_in_readable_lines(own_redis_server: RedisServer, tmp_path: Path) -> None:
    own_redis_server.kill()
    ended = typed(own_redis_server, tmp_path, "drain", "node1", HIDDENQ_REDIS_WAIT_SECONDS="0.1")
    assert ended.status == 1, ended
    waits, gave_up = ended.err.splitlines()
    assert waits.startswith("hiddenq: redis away: Redis is away: ConnectionError: ")
    assert waits.endswith("; waiting; finished work is kept")
    assert gave_up.startswith(f"hiddenq: {own_redis_server.bare_url}: ")
    assert gave_up.endswith("; gave up after 0.1 s")


def test_a_log_format_that_was_asked_for_is_kept(forgetful: RedisServer, tmp_path: Path) -> None:
    ended = typed(forgetful, tmp_path, "status", HIDDENQ_LOG_FORMAT="json")
    assert '"event": "redis_not_durable"' in ended.err.splitlines()[0]


def test_where_no_run_is_live_status_says_how_to_start_one(own_redis_server: RedisServer, tmp_path: Path) -> None:
    said = "hiddenq: no run is live here; start one with `hiddenq run` or `hiddenq produce`"
    for arguments in (("status",), ("status", "--watch")):
        assert typed(own_redis_server, tmp_path, *arguments) == Ended(2, "", f"{said}\n")
    with connect(own_redis_server.url) as client:
        start_run(client, made_record())
        cancel(client, "demo")
    assert typed(own_redis_server, tmp_path, "status").err == f"{said}; --run shows one that ended: demo\n"
    shown = typed(own_redis_server, tmp_path, "status", "--run", "demo")
    assert "demo  cancelled  " in shown.out, shown


@pytest.mark.parametrize("arguments", [("drain", "node1"), ("forget", "node1"), ("cancel", "demo")])
def test_a_fleets_command_without_an_address_names_the_two_variables_of_a_run(
    hiddenq: Command, arguments: tuple[str, str]
) -> None:
    ended = hiddenq(*arguments)
    assert ended.status == 2, ended
    assert "no Redis address: give --redis-url or set HIDDENQ_REDIS_URL" in ended.err
    assert "set HIDDENQ_REDIS_URL and HIDDENQ_REDIS_PASSWORD_FILE to what the same `hiddenq run` says" in ended.err
    assert "--out" not in ended.err
