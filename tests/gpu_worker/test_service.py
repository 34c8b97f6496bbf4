"""A worker against a real Redis and a real spool: what it publishes, and what it does when things go wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from gpu_worker import WorkerSettings, runs, serve, service, startup
from gpu_worker.decoder import Decoder, find_decoder
from gpu_worker.extraction import Extractor
from gpu_worker.memory import OutOfMemory
from gpu_worker.run_table import RunTable
from gpu_worker.runs import serve_run
from hiddenq.contracts import checksum, names
from hiddenq.contracts.errors import LeaseLost, RunMismatch, StoreRefused, UsageError
from hiddenq.contracts.shard import ShardFormat, header_num_bytes, parse_header
from hiddenq.delivery import (
    KEEP_ENDED_SECONDS,
    Consumer,
    dead_letters,
    each_dead_letter,
    enqueue,
    fleet,
    refusals,
    save_run,
    self_checks,
)
from hiddenq.delivery import cancel as cancel_run
from hiddenq.storage import Spool, StoreSettings
from hiddenq.storage.runfiles import load_batches, read_token_rows
from tests.gpu_worker.conftest import tiny_decoder
from tests.gpu_worker.served import FAST, Served, make_run, serve_until
from tests.support.models import save_fp8_model, save_tiny_model
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

LENGTHS = (90, 3, 40, 8, 17, 60, 40, 33, 12, 5, 1, 75, 20, 28)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture
def run(tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis) -> Served:
    return make_run(tmp_path, model, redis_server.url, redis_client, LENGTHS)


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Puts a hook on layer 1 of the worker's model, after it was proved."""
    handles: list[Any] = []

    def install(hook: Callable[..., Any]) -> None:
        def find_and_meddle(*arguments: Any) -> Decoder:
            decoder = find_decoder(*arguments)
            handles.append(decoder.layers[1].register_forward_hook(hook))
            return decoder

        monkeypatch.setattr(startup, "find_decoder", find_and_meddle)

    yield install
    for handle in handles:
        handle.remove()


def published(run: Served) -> dict[str, Path]:
    """Shards in the spool by batch."""
    return {entry.file_name.partition("-")[0]: run.spool.path(entry.file_name) for entry in run.spool.files()}


def queue_state(run: Served) -> Any:
    """The run's extract queue, as the fleet shows it."""
    wanted = names.extract_queue(run.config.run)
    return next(queue for queue in fleet(run.client).queues if queue.queue == wanted)


def assert_nothing_is_held(run: Served) -> None:
    """No job is started, no bytes are reserved: the invariant that every end of a worker keeps."""
    assert queue_state(run).num_started == 0
    assert run.spool.usage().reserved_bytes == 0


def test_every_batch_becomes_one_whole_shard(run: Served, model: Path) -> None:
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    assert_nothing_is_held(run)
    shards = published(run)
    network = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    for batch in load_batches(run.store):
        rows = read_token_rows(run.store, batch.token_part, batch.first_row, batch.num_samples)
        path = shards[batch.batch_id]
        data = path.read_bytes()
        specs, metadata = parse_header(data[: header_num_bytes(data[:8], name="")], name="", num_bytes=len(data))
        assert len(specs) == 4 * len(rows)
        assert metadata["batch_id"] == batch.batch_id
        assert metadata["attention"] == "sdpa"
        assert metadata["target_layer_ids"] == [0, 2]
        tensors = load_file(path)
        for row in rows:
            ids = torch.from_numpy(row.input_ids).long()
            assert torch.equal(tensors[f"{row.sample_id}.input_ids"], ids)
            assert tensors[f"{row.sample_id}.loss_mask"].tolist() == row.loss_mask.tolist()
            with torch.inference_mode():
                plain = network(input_ids=ids[None], output_hidden_states=True).hidden_states
            stored = tensors[f"{row.sample_id}.hidden_states"]
            assert stored.shape == (len(ids), 2, 64)
            assert torch.allclose(stored[:, 0], plain[1][0], atol=1e-5)
            assert torch.allclose(stored[:, 1], plain[3][0], atol=1e-5)


def test_a_shard_can_be_read_by_another_user_of_the_group_and_its_message_is_true(run: Served) -> None:
    serve_until(run, lambda: len(run.spool.files()) == run.num_batches)
    jobs = run.client.lrange(f"rq:queue:{names.upload_queue(run.spool.spool_id)}", 0, -1)
    assert len(jobs) == run.num_batches
    for path in published(run).values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    consumer_side = _shards_ready(run)
    for shard in consumer_side:
        path = run.spool.path(shard.file_name)
        assert (shard.num_bytes, shard.checksum) == (path.stat().st_size, checksum.of_file(path))
        assert shard.data_offset == header_num_bytes(path.read_bytes()[:8], name="")


def _shards_ready(run: Served) -> list[Any]:
    """Claim all upload jobs, as an uploader would."""
    from hiddenq.contracts.messages import ShardReady
    from hiddenq.contracts.reports import WorkerReport

    report = WorkerReport(role="uploader", name="u", target="u", host="h", pid=1, spool_id=run.spool.spool_id)
    queue = names.upload_queue(run.spool.spool_id)
    with Consumer(run.client, queue, ShardReady, name="u", settings=FAST, report=lambda: report) as consumer:
        return [claim.message for claim in consumer.claim(100)]


def test_one_sample_of_each_length_band_is_checked_alone(run: Served) -> None:
    serve_until(run, lambda: len(run.spool.files()) == run.num_batches)
    checks = self_checks(run.client, run.config.run)
    bands = {(check.padded_length - 1).bit_length() for check in checks}
    assert bands == {(batch.padded_length - 1).bit_length() for batch in load_batches(run.store)}
    assert len(checks) == len(bands)
    assert all(check.max_relative_difference < 1e-5 for check in checks)


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


def test_a_worker_whose_lease_is_lost_deletes_its_own_file(run: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Consumer.publish
    lost: list[Any] = []

    def lose_one(self: Any, claim: Any, shard: Any) -> None:
        if not lost:
            lost.append(shard.file_name)
            self.hand_back(claim)
            raise LeaseLost("another execution has it")
        publish(self, claim, shard)

    monkeypatch.setattr(Consumer, "publish", lose_one)
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    assert not run.spool.path(lost[0]).exists()
    assert_nothing_is_held(run)


def test_a_run_decides_whether_a_quantised_model_is_dequantised_and_its_shards_say_so(
    tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    model = save_fp8_model(tmp_path / "fp8")
    run = make_run(tmp_path, model, redis_server.url, redis_client, (30, 9), dequantize=True, dtype="float32")
    assert serve_until(run, lambda: len(run.spool.files()) == run.num_batches) == 0
    data = next(iter(published(run).values())).read_bytes()
    _, metadata = parse_header(data[: header_num_bytes(data[:8], name="")], name="", num_bytes=len(data))
    assert metadata["quantization"] == "fp8 (dequantized)"


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


def test_another_model_under_the_same_path_is_refused(run: Served, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=7)
    with pytest.raises(RunMismatch, match=r"weights_digest is \w+ here, run run-\w+ was made with \w+; it is another"):
        serve(run.settings.model_copy(update={"model": str(other)}))
    assert_nothing_is_held(run)


def test_a_location_that_is_another_place_on_this_host_is_refused(run: Served) -> None:
    run.store.delete(names.RUN_JSON)
    with pytest.raises(RunMismatch, match=r"no run\.json here, though Redis says that run run-\w+ lies there"):
        serve(run.settings)


def test_a_drained_host_is_refused(run: Served) -> None:
    from hiddenq import telemetry

    run.client.sadd("hiddenq:drained", telemetry.host_name())  # as `drain` does with a host that Redis knows
    with pytest.raises(UsageError, match="is drained"):
        serve(run.settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line(run: Served) -> None:
    with pytest.raises(UsageError, match=r"--device cuda:0: torch .* sees no GPU"):
        serve(run.settings.model_copy(update={"device": "cuda:0"}))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"device": "gpu"}, "--device gpu: expected cpu or cuda:N"),
        ({"attention": "fast"}, "--attention fast: expected one of auto, sdpa"),
        ({"gpus_per_worker": 2}, "--gpus-per-worker: has no effect on the CPU"),
        ({"run": "r", "any_run": True}, "--any-run: has no effect with --run r"),
    ],
)
def test_settings_that_can_not_be_are_refused_in_one_line(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        WorkerSettings(spool=tmp_path, **fields)


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
