"""A batch that goes wrong costs the others nothing, and a device that is broken ends the worker."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from gpu_worker.memory import OutOfMemory
from hiddenq.delivery import (
    dead_letters,
    each_dead_letter,
    enqueue,
)
from hiddenq.storage.runfiles import load_batches
from tests.gpu_worker.served import (
    FAST,
    Served,
    assert_nothing_is_held,
    make_run,
    published,
    queue_state,
    serve_until,
)
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


def test_out_of_memory_splits_the_batch_into_one_shard_and_is_counted(
    run: Served, meddle: Callable[[Callable[..., Any]], None]
) -> None:
    def refuse(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
        if inputs[0].shape[0] > 2:
            raise OutOfMemory("CUDA out of memory.")

    meddle(refuse)
    splits: list[int] = []

    def done() -> bool:
        report = run.worker()
        splits.append(report.num_oom_splits if report else 0)
        return len(run.spool.files()) == run.num_batches and splits[-1] > 0

    assert serve_until(run, done) == 0
    assert_nothing_is_held(run)
    assert not dead_letters(run.client, run.config.run)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_never_published_and_are_named(
    run: Served, meddle: Callable[[Callable[..., Any]], None], value: float
) -> None:
    def overflow(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] == 90:
            output = output.clone()
            output[0, 5, 7] = value
        return output

    meddle(overflow)
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches - 1) == 0
    [letter] = wait_until(lambda: dead_letters(run.client, run.config.run))
    assert "NaN or Inf in layer 2 of sample 0 (90 tokens)" in letter.attempts[-1].error
    assert letter.batch.batch_id not in published(run)
    assert_nothing_is_held(run)


def test_failures_in_a_row_make_a_worker_stop_claiming(
    run: Served, meddle: Callable[[Callable[..., Any]], None]
) -> None:
    def break_down(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
        if inputs[0].shape[1] not in (7, 24):
            raise RuntimeError("this layer is broken")

    meddle(break_down)
    details: list[str] = []

    def sick() -> bool:
        report = run.worker()
        if report is not None and report.state == "sick":
            details.append(report.detail)
        return bool(details)

    assert serve_until(run, sick, max_failures=2) == 0
    assert details[0].startswith("2 batches failed in a row; last: RuntimeError: this layer is broken")
    assert not run.spool.files()
    assert not dead_letters(run.client, run.config.run)
    assert_nothing_is_held(run)


def test_one_bad_batch_is_tried_again_and_costs_the_others_nothing(
    run: Served, meddle: Callable[[Callable[..., Any]], None]
) -> None:
    times = itertools.count()

    def fail_once(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
        if inputs[0].shape[1] == 90 and next(times) == 0:
            raise RuntimeError("once")

    meddle(fail_once)
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    assert_nothing_is_held(run)


def test_messages_that_are_no_batches_of_the_run_are_set_aside_unread_and_cost_the_others_nothing(run: Served) -> None:
    planned = load_batches(run.store)[0].job(run.config.run)
    foreign = [planned.model_copy(update={"batch_id": f"{900_000 + number}"}) for number in range(6)]
    vast = planned.model_copy(update={"padded_length": 10**9})  # two of them would take more memory than there is
    run.client.delete(f"rq:job:{run.config.run}-{planned.batch_id}")
    run.client.lrem(f"rq:queue:hiddenq-extract-{run.config.run}", 0, f"{run.config.run}-{planned.batch_id}")
    enqueue(run.client, run.record, [vast, *foreign])

    def dead() -> list[Any]:
        return list(each_dead_letter(run.client, run.config.run))

    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches - 1 and len(dead()) == 7) == 0
    errors = {letter.batch.batch_id: letter.attempts[-1].error for letter in dead()}
    assert "samples of 1000000000 padded tokens, expected at most" in errors[planned.batch_id]
    assert all(f"has {run.num_batches} batches; not one of them" in errors[job.batch_id] for job in foreign)
    assert [letter.batch for letter in dead_letters(run.client, run.config.run)] == [vast]


def test_a_dead_device_and_a_hang_end_the_process_with_their_own_status(
    tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    kinds = {"dead": (71, 60.0), "hang": (70, 1.0)}
    script = Path(__file__).with_name("broken_worker.py")
    with contextlib.ExitStack() as stack:
        started = {}
        for kind, (_, seconds) in kinds.items():
            (tmp_path / kind).mkdir()
            delivery = FAST.model_copy(update={"stage_seconds": {"gpu": seconds}})
            run = make_run(
                tmp_path / kind, model, redis_server.url, redis_client, (90, 40), name=kind, delivery=delivery
            )
            process = subprocess.Popen(
                [sys.executable, str(script), kind, run.settings.model_dump_json()], stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started[kind] = (run, process)
        for kind, (run, process) in started.items():
            _, errors = process.communicate(timeout=120)
            assert process.returncode == kinds[kind][0], errors[-2000:]
            assert not run.spool.files()
            assert queue_state(run).num_started == 0
