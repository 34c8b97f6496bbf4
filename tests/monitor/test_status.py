"""`RunStatus` tells the truth: the ledger's totals, who is there, what is wrong."""

from __future__ import annotations

import json
from io import StringIO

import pytest
import redis
from rich.console import Console

from hiddenq.contracts.errors import NonFiniteStates, RedisAway, UsageError
from hiddenq.delivery import Ledger, batch_seconds
from hiddenq.monitor import RunStatus, render, run_status, summary_line
from hiddenq.monitor.history import KEY, History
from tests.monitor.made_fleet import SHARD_BYTES, made_fleet, made_record, start_run
from tests.support.redis_server import RedisServer


def shown(status: RunStatus) -> str:
    text = StringIO()
    Console(width=200, file=text).print(render(status))
    return text.getvalue()


def test_totals_are_the_ledgers_and_executions_stand_apart(redis_client: redis.Redis) -> None:
    record = made_record(num_batches=6)
    with made_fleet(redis_client, record) as (worker, uploader):
        for _ in range(3):
            worker.extract()
        uploader.upload()
        worker.num_batches += 1  # a batch that ran twice
        worker.beat()
        status = run_status(redis_client)
        totals = Ledger(redis_client, record.run).totals()
        committed = status.committed
        assert (committed.num_batches, committed.num_samples, committed.num_tokens) == (1, 4, 100)
        assert (committed.num_batches, committed.num_samples, committed.num_tokens, status.committed_bytes) == (
            totals.num_batches,
            totals.num_samples,
            totals.num_tokens,
            totals.num_bytes,
        )
        assert status.committed_bytes == SHARD_BYTES
        assert status.executed.num_batches == 4
        assert status.share == pytest.approx(1 / 6)
        assert not status.complete
        assert status.padding == pytest.approx(1 - 100 / 120)
        assert status.batch_p99_seconds == max(batch_seconds(redis_client, record.run))
        extract, upload = status.queues
        assert (extract.num_waiting, extract.num_started) == (3, 0)
        assert (upload.num_waiting, upload.num_started, upload.host) == (2, 0, worker.report().host)
        assert "executions: a batch that ran twice counts twice" in shown(status)


def test_a_run_that_goes_well_has_no_problem_and_its_json_is_its_value(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, _):
        worker.extract()
        status = run_status(redis_client)
        assert status.problems == ()
        assert "goes well" in shown(status)
        assert "goes well" in summary_line(status)
        assert RunStatus.model_validate(json.loads(status.model_dump_json())) == status


def test_while_all_gpu_workers_load_the_model_that_is_said_and_no_rate(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, uploader):
        run_status(redis_client)
        worker.extract()
        uploader.upload()
        worker.say(state="starting", detail="loading the model")  # started again, as by a `run` typed again
        status = run_status(redis_client)
        assert status.rate is not None
        assert summary_line(status) == "demo: the GPU workers load the model, 4/24 samples (16.7 %)"
        assert "demo  the GPU workers load the model  " in shown(status)
        for word in ("goes well", "now ", "left, done at"):
            assert word not in shown(status)
        worker.say(state="idle")
        assert "demo: goes well, 4/24 samples (16.7 %), " in summary_line(run_status(redis_client))


def test_a_run_is_complete_when_its_last_batch_is_committed_and_not_before(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record(num_batches=2)) as (worker, uploader):
        worker.extract()
        worker.extract()
        uploader.upload()
        assert not run_status(redis_client).complete
        uploader.upload()
        status = run_status(redis_client)
        assert status.complete
        assert status.share == 1.0
        assert status.eta_seconds is None
        assert "complete" in shown(status)


def test_the_time_after_the_end_of_a_run_does_not_slow_its_mean(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record(num_batches=1)) as (worker, uploader):
        run_status(redis_client)
        worker.extract()
        uploader.upload()
        for _ in range(2):
            assert run_status(redis_client).mean_rate is None
        assert "mean" not in shown(run_status(redis_client))


def test_a_status_typed_once_knows_a_rate_by_the_workers_and_later_by_the_ledger(redis_client: redis.Redis) -> None:
    record = made_record(num_batches=6)
    with made_fleet(redis_client, record) as (worker, uploader):
        worker.say(state="busy", tokens_per_second=50.0)
        status = run_status(redis_client)
        assert status.rate is not None
        assert (status.rate.source, status.rate.tokens_per_second) == ("workers", 50.0)
        assert status.rate.samples_per_second == pytest.approx(2.0)
        assert status.eta_seconds == pytest.approx(600 / 50)
        worker.extract()
        uploader.upload()
        status = run_status(redis_client)
        assert status.rate is not None
        assert status.rate.source == "ledger"
        assert status.eta_seconds == pytest.approx(500 / status.rate.tokens_per_second)
        assert status.eta_at == pytest.approx(status.at + (status.eta_seconds or 0))


def test_eta_counts_tokens_not_batches(redis_client: redis.Redis) -> None:
    """Long batches come first: half of the batches left may be a tenth of the work left."""
    record = made_record(num_batches=6)
    record = record.model_copy(update={"config": record.config.model_copy(update={"num_tokens": 10_000})})
    with made_fleet(redis_client, record) as (worker, uploader):
        run_status(redis_client)
        for _ in range(3):
            worker.extract()
            uploader.upload()
        status = run_status(redis_client)
        assert status.rate is not None
        assert status.eta_seconds == pytest.approx((10_000 - 300) / status.rate.tokens_per_second)


def test_a_dead_letter_is_shown_with_its_reason_and_what_to_type(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, _):
        (claim,) = worker.consumer.claim(1)
        worker.consumer.enter(claim, "gpu")
        worker.consumer.fail(claim, NonFiniteStates("batch 000000: sample 3: layer 1 has NaN"))
        status = run_status(redis_client)
        assert status.num_dead_letters == 1
        (letter,) = status.dead_letters
        assert letter.batch_id == "000000"
        assert "sample 3: layer 1 has NaN" in letter.reason
        (problem,) = status.problems
        assert problem.severity == "warning"
        assert "1 dead letter, set aside after the last attempt" in problem.what
        assert "hiddenq failed list --run demo" in problem.do
        assert "sample 3: layer 1 has NaN" in shown(status)


def test_batches_without_a_living_worker_need_help(redis_client: redis.Redis) -> None:
    start_run(redis_client, made_record())
    (problem,) = run_status(redis_client).problems
    assert problem.severity == "critical"
    assert problem.what == "batches wait, but no GPU worker is alive"
    assert "hiddenq worker" in problem.do


def test_shards_without_an_uploader_need_help(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, uploader):
        worker.extract()
        uploader.consumer.close(withdraw=True)
        (problem,) = run_status(redis_client).problems
        assert "1 finished shard left, but no uploader is alive there" in problem.what


def test_a_worker_that_left_without_a_word_is_missed(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, _):
        worker.say(detail="loading")
        redis_client.zadd("hiddenq:workers:seen", {f"gpu_worker:{worker.report().target}": 1.0})
        status = run_status(redis_client)
        missed = [problem for problem in status.problems if "no heartbeat for" in problem.what]
        assert len(missed) == 1
        assert f"hiddenq forget {worker.report().host}" in missed[0].do
        assert "gone" in shown(status)


def test_a_worker_that_hangs_is_seen_though_its_heart_beats(redis_client: redis.Redis) -> None:
    """The forward pass never returns; heartbeats and 100 % utilisation go on; no batch is finished."""
    with made_fleet(redis_client, made_record()) as (worker, _):
        worker.extract()
        (claim,) = worker.consumer.claim(1)
        worker.consumer.enter(claim, "gpu")
        worker.say(state="busy", batch_id=claim.message.batch_id, utilization=1.0)
        assert run_status(redis_client).workers[0].stalled_seconds < 1
        _age_history(redis_client, 400.0)
        worker.beat()
        status = run_status(redis_client)
        hung = next(one for one in status.workers if one.role == "gpu_worker")
        assert hung.alive
        assert hung.stalled_seconds == pytest.approx(400, abs=5)
        (problem,) = status.problems
        assert problem.severity == "critical"
        assert "no batch finished for 6m 4" in problem.what
        assert "kill pid 4242" in problem.do
        worker.consumer.hand_back(claim)
        worker.extract()
        worker.beat()
        assert run_status(redis_client).problems == ()


@pytest.mark.parametrize("state", ["starting", "paused", "waiting", "draining"])
def test_a_worker_that_cannot_work_for_a_reason_is_not_called_stalled(redis_client: redis.Redis, state: str) -> None:
    with made_fleet(redis_client, made_record()) as (worker, _):
        worker.say(state=state)
        run_status(redis_client)
        _age_history(redis_client, 400.0)
        assert run_status(redis_client).workers[0].stalled_seconds == 0


def test_an_idle_worker_at_the_end_of_a_run_is_not_called_stalled(redis_client: redis.Redis) -> None:
    """The last batch runs elsewhere; nothing waits."""
    with made_fleet(redis_client, made_record(num_batches=1)) as (worker, _):
        worker.consumer.claim(1)
        run_status(redis_client)
        _age_history(redis_client, 400.0)
        assert run_status(redis_client).workers[0].stalled_seconds == 0


def test_nobody_needs_to_be_there_once_a_run_is_complete(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record(num_batches=1)) as (worker, uploader):
        worker.extract()
        uploader.upload()
    redis_client.zadd("hiddenq:workers:seen", {f"gpu_worker:{worker.report().target}": 1.0})
    status = run_status(redis_client)
    assert status.complete
    assert status.problems == ()


def test_a_drained_worker_is_nobodys_problem(redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()) as (worker, _):
        redis_client.zadd("hiddenq:workers:seen", {f"gpu_worker:{worker.report().target}": 1.0})
        redis_client.sadd("hiddenq:drained", worker.report().host)
        assert not [problem for problem in run_status(redis_client).problems if "heartbeat" in problem.what]


def test_an_unknown_run_is_a_usage_error_and_a_redis_away_is_said(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client:
        start_run(client, made_record())
        with pytest.raises(UsageError, match="Redis knows no such run; it knows demo"):
            run_status(client, "other")
        own_redis_server.kill()
        with pytest.raises(RedisAway, match="Redis is away"):
            run_status(client, "demo")


def test_a_full_redis_can_still_be_looked_at(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client:
        start_run(client, made_record())
        client.config_set("maxmemory", "1mb")
        status = run_status(client)
        assert "Redis uses" in status.problems[0].what
        assert status.problems[0].severity == "critical"


def test_an_account_that_may_only_read_can_look(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client:
        start_run(client, made_record())
        client.acl_setuser(
            "reader", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@read", "+info", "+time"]
        )
        client.execute_command("ACL", "SETUSER", "reader", "resetkeys", "%R~*")
        url = own_redis_server.url.replace("redis://:test-password@", "redis://reader:secret@")
        with redis.Redis.from_url(url) as reader:
            assert run_status(reader).queues[0].num_waiting == 6


def _age_history(client: redis.Redis, seconds: float) -> None:
    """As if the last looks had been so long ago."""
    history = History.load(client)
    marks = {
        target: mark.model_copy(update={"since": mark.since - seconds, "state_since": mark.state_since - seconds})
        for target, mark in history.marks.items()
    }
    client.set(KEY, history.model_copy(update={"marks": marks}).to_json())
