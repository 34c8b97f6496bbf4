"""A worker waits for room in its spool and for its store at no batch's cost, and ends soon when it is told to."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import runs, serve, service
from hiddenq.contracts.errors import StoreRefused
from hiddenq.delivery import (
    refusals,
    save_run,
)
from hiddenq.storage import Spool, StoreSettings
from hiddenq.storage.runfiles import load_batches, read_token_rows
from tests.gpu_worker.served import (
    Served,
    assert_nothing_is_held,
    queue_state,
    serve_until,
)
from tests.support.small_disk import small_disk
from tests.support.waiting import wait_until

__all__ = ["small_disk"]


def test_sigterm_finishes_what_is_on_the_device_and_hands_back_the_rest(
    run: Served, meddle: Callable[[Callable[..., Any]], None]
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> None:
        if inputs[0].shape[1] > 24:
            entered.set()
            assert go_on.wait(20)

    meddle(hold)

    def stop() -> None:
        assert entered.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: run.worker() is not None)
        go_on.set()

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert serve(run.settings) == 0
    stopper.join()
    assert_nothing_is_held(run)
    finished = len(run.spool.files())
    assert 1 <= finished < run.num_batches
    assert queue_state(run).num_waiting == run.num_batches - finished


def test_over_the_spools_mark_it_pauses_and_below_the_low_mark_it_goes_on(run: Served) -> None:
    sizes = [batch.num_tokens * (64 * 4 * 3 + 16) for batch in load_batches(run.store)]
    high = int(max(sizes) * 2.2)
    seen: set[str] = set()
    removed: set[str] = set()

    def drained() -> bool:
        report = run.worker()
        if report is not None:
            seen.add(report.state)
        if "paused" in seen:
            for entry in run.spool.files():
                removed.add(entry.file_name)
                run.spool.delete(entry.file_name)
        return len(removed) == run.num_batches

    assert serve_until(run, drained, spool_high_bytes=high, spool_low_bytes=high // 2) == 0
    assert "paused" in seen
    assert_nothing_is_held(run)


def test_a_spool_without_room_for_the_next_shard_is_tried_again_when_one_has_left_not_all_the_time(
    run: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [batch.num_tokens * (64 * 4 * 3 + 16) for batch in load_batches(run.store)]
    refused: list[float] = []
    removed: set[str] = set()
    reserve = Spool.reserve

    def count(spool: Spool, file_name: str, num_bytes: int) -> Any:
        file = reserve(spool, file_name, num_bytes)
        if file is None:
            refused.append(time.monotonic())
        return file

    def drained() -> bool:
        if refused and time.monotonic() - refused[0] > 2.0:
            for entry in run.spool.files():
                removed.add(entry.file_name)
                run.spool.delete(entry.file_name)
        return len(removed) == run.num_batches

    monkeypatch.setattr(Spool, "reserve", count)
    high = int(max(sizes) * 1.3)
    assert serve_until(run, drained, spool_high_bytes=high, spool_low_bytes=high) == 0
    assert 1 <= len([moment for moment in refused if moment < refused[0] + 1.5]) <= 2
    assert_nothing_is_held(run)


def test_a_worker_told_to_stop_while_its_store_does_not_answer_ends_within_seconds(
    run: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setattr(service, "SLOW_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = StoreSettings(endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}").model_dump(mode="json")
        save_run(run.client, run.record.model_copy(update={"location": "s3://bucket/run", "store": store}))
        said: list[float] = []

        def waits() -> bool:
            worker = run.worker()
            if worker is not None and worker.state == "waiting":
                assert worker.detail == "the store does not answer: s3://bucket/run"
                said.append(time.monotonic())
            return bool(said)

        assert serve_until(run, waits) == 0
        assert time.monotonic() - said[0] < 10


def test_a_store_that_refuses_in_mid_run_is_waited_for_with_the_reason_and_costs_no_attempt(
    run: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FIRST_WAIT_SECONDS", 0.5)
    num_reads = itertools.count()
    seen: list[str] = []

    def read(store: Any, *where: int) -> Any:
        if next(num_reads) and not seen:
            raise StoreRefused(f"{store.uri}: AccessDenied")
        return read_token_rows(store, *where)

    def whole() -> bool:
        worker = run.worker()
        if worker is not None and worker.state == "waiting" and len(run.spool.files()) == 1:
            seen.append(worker.detail)
        return len(run.spool.files()) == run.num_batches

    monkeypatch.setattr(runs, "read_token_rows", read)
    assert serve_until(run, whole) == 0
    assert seen[0] == f"{run.store.uri}: AccessDenied"
    batches = [batch.batch_id for batch in load_batches(run.store)]
    assert {run.client.hget(f"rq:job:{run.config.run}-{batch}", "attempts") for batch in batches} == {None}


@pytest.mark.parametrize("what", ["location", "spool"])
def test_a_location_that_is_unmounted_and_a_spool_that_is_read_only_in_mid_run_cost_no_attempt(
    what: str, run: Served, monkeypatch: pytest.MonkeyPatch, small_disk: Path
) -> None:
    assert small_disk.exists()  # so mounting is allowed here
    monkeypatch.setattr(refusals, "FIRST_WAIT_SECONDS", 0.5)
    location, folder = Path(run.store.uri), str(run.spool.folder)
    gone, seen = threading.Event(), list[str]()

    def prepare(served: runs.ServedRun, job: Any, **options: Any) -> Any:
        if run.spool.files() and not gone.is_set():
            leave()
            gone.set()
        return prepared(served, job, **options)

    def leave() -> None:
        if what == "location":
            location.rename(location.with_name("away"))
            location.mkdir()  # the mount point
        else:
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    def come_back() -> None:
        if what == "location":
            assert list(location.iterdir()) == []
            location.rmdir()
            location.with_name("away").rename(location)
        else:
            subprocess.run(["umount", "-l", folder], check=True)

    def whole() -> bool:
        worker = run.worker()
        if gone.is_set() and worker is not None and worker.state == "waiting" and not seen:
            seen.append(worker.detail)
            come_back()
        return len(run.spool.files()) == run.num_batches

    prepared = runs.ServedRun.prepare
    monkeypatch.setattr(runs.ServedRun, "prepare", prepare)
    assert serve_until(run, whole) == 0
    assert {"location": "run.json is not there any more", "spool": f"--spool {run.spool.folder}: "}[what] in seen[0]
    batches = [batch.batch_id for batch in load_batches(run.store)]
    assert {run.client.hget(f"rq:job:{run.config.run}-{batch}", "attempts") for batch in batches} == {None}
    assert_nothing_is_held(run)
