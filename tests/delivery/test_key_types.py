"""A key of ours that holds what hiddenq never wrote is named in one line, with what to do, by every command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from hiddenq.contracts.errors import NonFiniteStates, RedisRefused
from hiddenq.contracts.manifest import SelfCheck
from hiddenq.delivery import (
    LocationLock,
    batch_seconds,
    dead_letters,
    fleet,
    load_run,
    record_self_check,
    self_checks,
)
from hiddenq.delivery.connection import text
from hiddenq.delivery.key_types import expected_type
from tests.delivery.conftest import FAST, SPOOL, Bench, entry, shard
from tests.support.command import exit_status

Hiddenq = Callable[..., tuple[int, str]]


@pytest.fixture
def hiddenq(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hiddenq:
    """A command on the bench's Redis; returns its status and what it said on stderr."""
    monkeypatch.setenv("HIDDENQ_REDIS_PASSWORD", bench.server.password)

    def command(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        status = exit_status([*arguments, "--redis-url", bench.server.bare_url])
        said = capsys.readouterr().err.splitlines()  # the bench's own workers may log beside it
        assert not any("Traceback" in line for line in said)
        return status, "\n".join(line for line in said if line.startswith("hiddenq: "))

    return command


def lived(bench: Bench) -> None:
    """A run with something of everything: committed, waiting, delayed, started, dead."""
    bench.enqueue(6)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    done, waits, delayed, dead, _started = worker.claim(5)
    for claim in (done, waits):
        worker.enter(claim, "gpu")
        worker.publish(claim, shard(claim))
    worker.fail(delayed, RuntimeError("x"))
    worker.fail(dead, NonFiniteStates("x"))
    [upload] = uploader.claim()
    uploader.commit(upload, entry(upload.message))
    found = {"batch_id": "000000", "sample_id": 1, "num_tokens": 5, "padded_length": 8, "worker": "w"}
    check = SelfCheck.model_validate({**found, "max_relative_difference": 0.0, "worst_layer": "1"})
    record_self_check(bench.client, "run", check)
    bench.client.sadd("hiddenq:drained", "other")
    fleet(bench.client)


def test_every_key_that_a_run_leaves_in_redis_is_known_with_its_type(
    bench: Bench, hiddenq: Hiddenq, tmp_path: Path
) -> None:
    lived(bench)
    assert hiddenq("status") == (0, "")
    with LocationLock(bench.client, str(tmp_path), settings=FAST, command="x"):
        wrong = {
            key: found
            for key in map(text, bench.client.keys("*"))
            if (found := text(bench.client.type(key))) != expected_type(key)
        }
    assert wrong == {}
    assert len(bench.client.keys("hiddenq:*")) > 15


@pytest.mark.parametrize(
    "key",
    [
        "hiddenq:workers", "hiddenq:workers:seen", "hiddenq:spools", f"hiddenq:spool:{SPOOL}", "hiddenq:drained",
        "hiddenq:runs", "hiddenq:run:run", "hiddenq:run:run:totals", "hiddenq:run:run:dead", "hiddenq:run:run:seconds",
        "hiddenq:monitor:history", "rq:queues", "rq:queue:hiddenq-extract-run", f"rq:scheduled:hiddenq-upload-{SPOOL}",
    ],
)  # fmt: skip
def test_status_names_a_key_that_holds_another_type_in_one_line(key: str, bench: Bench, hiddenq: Hiddenq) -> None:
    lived(bench)
    bench.client.delete(key)
    kind = "list" if expected_type(key) != "list" else "hash"
    bench.client.rpush(key, "x") if kind == "list" else bench.client.hset(key, "x", "y")
    status, said = hiddenq("status", "--run", "run")
    assert status == 2
    assert f"{key} in Redis holds a {kind}, where hiddenq keeps a {expected_type(key)}" in said
    assert "another program use this database" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("failed", "list"), "hiddenq:run:run:dead"),
        (("failed", "retry"), "rq:job:run-000002"),
        (("drain", "h"), "hiddenq:drained"),
        (("forget", "h"), "hiddenq:workers"),
        (("cancel", "run"), "rq:scheduled:hiddenq-extract-run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_every_command_names_a_key_that_holds_another_type(
    command: tuple[str, ...], key: str, bench: Bench, hiddenq: Hiddenq
) -> None:
    lived(bench)
    if command[0] == "failed":
        bench.client.zadd("hiddenq:run:run:dead", {"run-000002": 1})
    bench.client.delete(key)
    bench.client.set(key, "x")
    status, said = hiddenq(*command)
    assert (status, len(said.splitlines())) == (2, 1)
    assert f"{key} in Redis holds a string, where hiddenq keeps a {expected_type(key)}" in said


def test_a_script_names_the_key_though_redis_does_not(bench: Bench) -> None:
    bench.enqueue(1)
    worker = bench.gpu_worker()
    bench.client.delete("hiddenq:leases")
    bench.client.set("hiddenq:leases", "x")
    with pytest.raises(RedisRefused, match="hiddenq:leases in Redis holds a string, where hiddenq keeps a zset"):
        worker.claim()
    bench.client.delete("hiddenq:leases")


def test_the_owners_key_of_a_location_is_named(bench: Bench, tmp_path: Path) -> None:
    bench.client.rpush(f"hiddenq:owner:{tmp_path}", "x")
    with pytest.raises(RedisRefused, match=f"hiddenq:owner:{tmp_path} in Redis holds a list"):
        LocationLock(bench.client, str(tmp_path), settings=FAST, command="x").__enter__()


def test_an_account_that_may_not_list_keys_still_learns_what_it_can(bench: Bench) -> None:
    bench.enqueue(1)
    bench.client.acl_setuser("blind", enabled=True, passwords="+x", keys=["*"], commands=["+@all", "-scan"])
    try:
        url = bench.server.bare_url.replace("//", "//blind:x@")
        with contextlib.closing(bench.connect(url)) as blind:
            bench.client.set("hiddenq:leases", "x")
            with pytest.raises(RedisRefused, match="hiddenq:leases in Redis holds a string"):
                bench.gpu_worker(client=blind).claim()
            bench.client.delete("hiddenq:leases")
            bench.client.delete("rq:queue:hiddenq-extract-run")
            bench.client.set("rq:queue:hiddenq-extract-run", "x")
            with pytest.raises(RedisRefused, match=r"a key of hiddenq is not what hiddenq made it \(WRONGTYPE"):
                bench.gpu_worker(client=blind).claim()
    finally:
        bench.client.acl_deluser("blind")


def test_what_is_not_ours_is_left_to_whoever_asked(bench: Bench) -> None:
    bench.client.set("theirs", "x")
    with pytest.raises(redis.ResponseError, match=r"^WRONGTYPE"):
        bench.client.lpush("theirs", "y")
    with pytest.raises(redis.ResponseError, match="unknown command"):
        bench.client.execute_command("NONSENSE")


@pytest.mark.parametrize(
    ("key", "field", "read"),
    [
        ("hiddenq:run:run:totals", "num_batches", lambda bench: fleet(bench.client)),
        ("hiddenq:run:run:totals", "another", lambda bench: fleet(bench.client)),
        ("hiddenq:run:run:seconds", None, lambda bench: batch_seconds(bench.client, "run")),
        ("hiddenq:run:run:checks", None, lambda bench: self_checks(bench.client, "run")),
    ],
)
def test_a_value_that_makes_no_sense_is_named_too(
    key: str, field: str | None, read: Callable[[Bench], object], bench: Bench
) -> None:
    lived(bench)
    bench.client.hset(key, field, "nonsense") if field else bench.client.rpush(key, "nonsense")
    with pytest.raises(RedisRefused, match=rf"{key} in Redis holds what hiddenq can't read \(.*another program"):
        read(bench)


def test_a_dead_letter_or_a_time_that_makes_no_sense_troubles_no_other(bench: Bench) -> None:
    lived(bench)
    bench.client.hdel("rq:job:run-000003", "origin")
    bench.client.hset("rq:job:run-000005", "enqueued_at", "yesterday")
    assert dead_letters(bench.client, "run") == []
    assert [queue.num_dead for queue in fleet(bench.client).queues if queue.run] == [1]
    assert load_run(bench.client).run == "run"
