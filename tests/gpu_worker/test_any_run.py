"""A worker that serves all runs of its model takes each as it comes, and none keeps another one waiting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from gpu_worker import runs, serve
from gpu_worker.extraction import Extractor
from gpu_worker.run_table import RunTable
from gpu_worker.runs import serve_run
from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch, StoreRefused, UsageError
from hiddenq.contracts.shard import ShardFormat
from hiddenq.delivery import (
    KEEP_ENDED_SECONDS,
    save_run,
)
from hiddenq.delivery import cancel as cancel_run
from hiddenq.storage.runfiles import read_token_rows
from tests.gpu_worker.conftest import tiny_decoder
from tests.gpu_worker.served import (
    LENGTHS,
    Served,
    assert_nothing_is_held,
    make_run,
    queue_state,
    serve_until,
)
from tests.support.redis_server import RedisServer


def test_any_run_takes_all_runs_of_the_same_model(
    run: Served, tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    other = make_run(
        tmp_path, model, redis_server.url, redis_client, (30, 9), name="other", storage_dtype="float8_e4m3fn"
    )
    total = run.num_batches + other.num_batches
    assert serve_until(run, lambda: len(run.spool.files()) == total, run=None, any_run=True) == 0
    assert_nothing_is_held(other)


def test_any_run_leaves_a_run_that_it_cannot_open_alone_and_serves_the_others(
    run: Served, tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    broken = make_run(tmp_path, model, redis_server.url, redis_client, (30, 9), name="a-broken-one")
    (tmp_path / "a-broken-one" / names.RUN_JSON).unlink()
    other = make_run(tmp_path, model, redis_server.url, redis_client, (30, 9), name="other")
    total = run.num_batches + other.num_batches
    assert serve_until(run, lambda: len(run.spool.files()) == total, run=None, any_run=True) == 0
    assert queue_state(broken).num_waiting == broken.num_batches


def test_one_runs_store_that_refuses_keeps_no_other_run_waiting(
    run: Served, tmp_path: Path, model: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_run(tmp_path, model, redis_server.url, run.client, LENGTHS, name="other")

    def read(store: Any, *where: int) -> Any:
        if store.uri == run.store.uri:
            raise StoreRefused(f"{store.uri}: AccessDenied")
        return read_token_rows(store, *where)

    monkeypatch.setattr(runs, "read_token_rows", read)
    changes = {"run": None, "any_run": True}
    assert serve_until(run, lambda: len(run.spool.files()) == other.num_batches, **changes) == 0
    assert queue_state(run).num_waiting + queue_state(run).num_delayed == run.num_batches
    assert_nothing_is_held(run)


def test_if_no_run_can_be_opened_any_run_says_why(run: Served) -> None:
    Path(run.store.uri, names.RUN_JSON).unlink()
    with pytest.raises(RunMismatch, match=r"no run\.json here, though Redis says that run"):
        serve(run.settings.model_copy(update={"run": None, "any_run": True}))


def test_a_run_that_ended_is_let_go_with_its_hooks_once_nothing_of_it_can_be_on_the_device(
    run: Served, tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    other = make_run(tmp_path, model, redis_server.url, redis_client, (30, 9), name="other")
    decoder = tiny_decoder("qwen3")
    extractor = Extractor(decoder, ShardFormat.of_run(run.config), masked=False)
    queues: list[Sequence[str]] = []
    now = [0.0]
    served = serve_run(redis_client, run.record, run.store, extractor)
    table = RunTable(redis_client, run.record, served, extractor, queues.append, clock=lambda: now[0])

    def num_hooks() -> int:
        return sum(len(layer._forward_hooks) for layer in decoder.layers)

    alone = num_hooks()
    table.refresh()
    assert set(table.runs) == {run.config.run, other.config.run}
    both = num_hooks()
    assert both > alone
    cancel_run(redis_client, other.config.run)
    table.refresh()
    assert num_hooks() == both, "its last batch may be on the device"
    save_run(redis_client, other.record)
    table.refresh()
    now[0] += KEEP_ENDED_SECONDS
    cancel_run(redis_client, other.config.run)
    table.refresh()
    assert num_hooks() == both, "it was live again in between"
    now[0] += KEEP_ENDED_SECONDS
    table.refresh()
    assert set(table.runs) == {run.config.run}
    assert num_hooks() == alone
    assert queues[-1] == [names.extract_queue(run.config.run)]


def test_several_live_runs_must_be_told_apart(
    run: Served, tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    make_run(tmp_path, model, redis_server.url, redis_client, (30, 9), name="other")
    with pytest.raises(UsageError, match="name a run with --run, or serve --any-run: live runs are other-"):
        serve(run.settings.model_copy(update={"run": None}))
