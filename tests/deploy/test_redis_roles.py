"""Redis's access list: each role can do the whole of its work against a real server, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ResponseError
from redis.retry import Retry

from hiddenq.contracts import names
from hiddenq.contracts.errors import RedisRefused
from hiddenq.contracts.manifest import SelfCheck
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.delivery import (
    Consumer,
    DeliverySettings,
    Ledger,
    LocationLock,
    cancel,
    connect,
    dead_letters,
    drain,
    enqueue,
    fleet,
    forget,
    list_runs,
    load_run,
    mark_finished,
    record_self_check,
    retry_dead,
    save_run,
    worker_name,
)
from hiddenq.delivery.reaper import Reaping
from hiddenq.delivery.transitions import Transitions, claim_of
from tests.delivery.conftest import FAST, SPOOL, batch, entry, record, report, shard
from tests.deploy.programs import load
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("worker", "uploader", "producer", "monitor", "operator")
Connect = Callable[[str], redis.Redis]


class Fortress(RedisServer):
    """A server with the access list of deploy/redis/."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.passwords = {role: f"{role}-planted-password" for role in (*ROLES, "admin", "join")}
        text = (ROOT / "deploy/image/users.acl.in").read_text()
        (folder / "users.acl").write_text(load("credentials").users_acl(text, self.passwords))
        super().__init__(folder, password="", aclfile=str(folder / "users.acl"))

    @property
    def url(self) -> str:
        return f"redis://admin:{self.passwords['admin']}@127.0.0.1:{self.port}/0"

    def url_of(self, role: str) -> str:
        """Address with the role in it, without its password."""
        return f"redis://{role}@127.0.0.1:{self.port}/0"

    def denials(self) -> list[str]:
        """What the server refused so far, as `user: command key`."""
        with self.client() as client:
            log: Any = client.acl_log()
            return [f"{line['username'].decode()}: {line['reason'].decode()} {line['object'].decode()}" for line in log]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    fortress = Fortress(tmp_path_factory.mktemp("fortress") / "redis")
    yield fortress
    fortress.stop()


@pytest.fixture
def as_role(server: Fortress) -> Iterator[Connect]:
    """Clients of hiddenq's own making, by role; at the end nothing may have been refused that no test meant to be."""
    with server.client() as client:
        client.flushall()
        client.execute_command("ACL", "LOG", "RESET")
    clients: dict[str, redis.Redis] = {}

    def connect_as(role: str) -> redis.Redis:
        if role not in clients:
            clients[role] = connect(server.url_of(role), password=server.passwords[role])
        return clients[role]

    yield connect_as
    for client in clients.values():
        client.close()


def test_every_role_can_do_all_of_its_work(server: Fortress, as_role: Connect) -> None:
    producer, worker, uploader = as_role("producer"), as_role("worker"), as_role("uploader")
    made = record(num_batches=4)
    with LocationLock(producer, "s3://b/run", settings=FAST, command="hiddenq worker"):
        save_run(producer, made)
        enqueue(producer, made, [batch(number) for number in range(4)])
    assert load_run(worker, None).run == "run"

    gpu = Consumer(
        worker, names.extract_queue("run"), BatchJob,
        name=worker_name("gpu"), settings=FAST, report=lambda: report("gpu_worker"),
    )  # fmt: skip
    up = Consumer(
        uploader, names.upload_queue(SPOOL), ShardReady,
        name=worker_name("up"), settings=FAST, report=lambda: report("uploader"),
    )  # fmt: skip
    with gpu, up:
        first, second, third, fourth = gpu.claim(4)
        for claim in (first, second, third):
            gpu.enter(claim, "gpu")
            gpu.publish(claim, shard(claim))
        gpu.hand_back(fourth)
        [again] = gpu.claim(1)
        gpu.fail(again, ValueError("nobody can help"))
        record_self_check(
            worker, "run",
            SelfCheck(batch_id="000000", sample_id=0, num_tokens=1, padded_length=1, worker="w",
                      max_relative_difference=0.0, worst_layer="1"),
        )  # fmt: skip
        ready = up.claim(3)
        assert up.commit(ready[0], entry(ready[0].message))
        assert up.commit(ready[1], entry(ready[1].message))
        assert up.remake(ready[2], "its file is gone") == "remade"
        assert fleet(as_role("monitor")).runs[0].totals.num_batches == 2
    Ledger(producer, "run").forget([entry(ready[1].message)])
    Ledger(producer, "run").adopt([entry(ready[1].message)])
    mark_finished(uploader, "run")

    operator = as_role("operator")
    assert fleet(operator).workers is not None
    dead_letters(operator, "run")
    retry_dead(operator, "run", None)
    drain(operator, "h")
    forget(operator, "h")
    cancel(operator, "run")
    assert [made.run for made in list_runs(operator)] == ["run"]
    assert server.denials() == []


@pytest.mark.parametrize("role", ROLES[:4])
def test_every_long_lived_role_can_put_back_what_the_dead_left(server: Fortress, as_role: Connect, role: str) -> None:
    settings = DeliverySettings(lease_seconds=0.3, renew_seconds=0.09, reap_seconds=0.1, spool_dead_seconds=0.1)
    made = record(num_batches=2, settings=settings)
    save_run(as_role("producer"), made)
    enqueue(as_role("producer"), made, [batch(0), batch(1)])
    dying = Transitions(as_role("worker"), settings)
    queue, executions = names.extract_queue("run"), ["00000001", "00000002"]
    raws = dying.claim(queue, worker="w", host="h", executions=executions)
    first, second = (claim_of(raw, BatchJob) for raw in raws)
    dying.enter(first.job_id, first.execution, "gpu")
    dying.publish(second.job_id, second.execution, shard(second), host="h")

    reaping, total = Reaping(as_role(role), settings), [0, 0]

    def all_back() -> bool:
        if reaped := reaping.once():
            total[0] += reaped.num_back
            total[1] += reaped.num_remade
        return total == [1, 1]

    wait_until(all_back)
    assert server.denials() == []


EVERYONE = [
    ("KEYS", "*"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "dir", "/tmp"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "default", "on", "nopass"),
    ("DEBUG", "SLEEP", "0"),
    ("MONITOR",),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("MODULE", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LIST"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("SUBSCRIBE", "anything"),
    ("SAVE",),
    ("SCAN", "0"),
    ("GET", "somebody:else"),
    ("SET", "somebody:else", "1"),
    ("RPUSH", "rq:queue:default", "a job of another application"),
    ("EVAL", "return redis.call('SET', 'somebody:else', '1')", "0"),
]
BEYOND_A_ROLE = [
    ("worker", "HSET", "hiddenq:run:run", "record", "{}"),
    ("worker", "HSET", "hiddenq:run:run:ledger", "000000", "{}"),
    ("worker", "EVAL", "return redis.call('HSET', 'hiddenq:run:run:ledger', '000000', '{}')", "0"),
    ("worker", "SADD", "hiddenq:runs", "other"),
    ("worker", "SADD", "hiddenq:drained", "host"),
    ("uploader", "SADD", "hiddenq:runs", "other"),
    ("uploader", "SADD", "hiddenq:drained", "host"),
    ("producer", "SADD", "hiddenq:drained", "host"),
    ("monitor", "HSET", "hiddenq:run:run", "state", "cancelled"),
    ("monitor", "HDEL", "hiddenq:run:run:ledger", "000000"),
    ("monitor", "SADD", "hiddenq:drained", "host"),
    ("operator", "SET", "hiddenq:owner:s3://b/run", "me"),
]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_can_do_anything_else(as_role: Connect, role: str) -> None:
    client = as_role(role)
    for command in (*EVERYONE, *(command for owner, *command in BEYOND_A_ROLE if owner == role)):
        with pytest.raises(ResponseError, match=r"(?i)permission|ACL failure|not allowed"):
            client.execute_command(*command)


def test_without_a_password_or_with_another_roles_nobody_gets_in(server: Fortress) -> None:
    no_patience = Retry(NoBackoff(), 0)
    with redis.Redis(port=server.port, retry=no_patience) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
    with pytest.raises(RedisRefused, match="HIDDENQ_REDIS_PASSWORD") as refusal:
        connect(server.url_of("operator"), password=server.passwords["worker"])
    assert "planted" not in str(refusal.value)


def test_another_machines_one_password_is_a_worker_and_an_uploader_and_nothing_more(server: Fortress) -> None:
    for role in ("worker", "uploader"):
        connect(server.url_of(role), password=server.passwords["join"]).close()
    for role in ("producer", "monitor", "operator", "admin"):
        with pytest.raises(RedisRefused):
            connect(server.url_of(role), password=server.passwords["join"])


def test_the_access_list_holds_hashes_and_no_password(server: Fortress) -> None:
    text = (server.folder / "users.acl").read_text()
    assert "planted" not in text
    assert len(text.splitlines()) == len(ROLES) + 2
