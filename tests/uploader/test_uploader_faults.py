"""Outages of any length end with everything uploaded, a refusal holds up its own run alone, no death costs a shard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import StoreRefused
from hiddenq.delivery import Ledger, dead_letters, retry_dead, run_state
from hiddenq.storage import LocalStore, ObjectStore, Spool, StoreSettings, local, open_store, s3_client
from hiddenq.storage.runfiles import load_manifest
from tests.support.faulty_proxy import Answer, BlackHole, FaultyProxy, Reset, Slow, parts, puts
from tests.support.redis_server import RedisServer
from tests.support.s3_server import S3Location, S3Server
from tests.support.waiting import wait_until
from tests.uploader.running import invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run
from uploader import upload, waiting


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(upload, "FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(upload, "LONGEST_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(upload, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(waiting, "FIRST_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "LONGEST_WAIT_SECONDS", 0.5)


def start_in_s3(
    run: SmallRun, client: redis.Redis, server: S3Server, location: S3Location, endpoint_url: str, **options: Any
) -> ObjectStore:
    """Start a run in S3, reached by the uploader through `endpoint_url`; returns the store, reached directly."""
    store = open_store(location.uri, StoreSettings(endpoint_url=server.endpoint_url))
    settings = StoreSettings(endpoint_url=endpoint_url, part_bytes=5 << 20, **options)
    run.start(client, store, settings.model_dump(exclude_defaults=True))
    return store


def finished(client: redis.Redis, run: SmallRun, seconds: float = 30) -> None:
    wait_until(lambda: run_state(client, run.name) == "finished", seconds=seconds, what="the run is finished")


def states(request: Any) -> bool:
    return puts(request) and "/states/" in request.target


def test_a_503_ten_times_then_200_ends_with_everything_uploaded_and_no_attempt_used(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=2)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    run.extract(redis_client, spool)
    plan = faulty_proxy.plan(Answer(503, "SlowDown"), times=10, when=states)
    with running_uploader(redis_server, spool, num_concurrent=1) as uploader:
        finished(redis_client, run)
        assert plan.num_met == 10
        assert uploader.metric("retries_total", error="SlowDown") == 8
        assert uploader.metric("errors_total", error="StoreAway") == 2
        assert uploader.metric("store_away") == 0
        assert uploader.status.report().num_failures == 0
    invariant_holds(redis_client, run, store, spool)


def test_an_outage_is_told_and_waited_for_longer_than_any_lease(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=3)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url, timeout_seconds=0.5)
    run.extract(redis_client, spool)
    with running_uploader(redis_server, spool) as uploader:
        for fault in (BlackHole(), Reset(), Answer(500, "InternalError")):
            faulty_proxy.plan(fault)
            wait_until(lambda: uploader.metric("store_away") == 1)
        report = wait_until(lambda: (r := uploader.status.report()).state == "waiting" and r)
        assert report.detail
        time.sleep(2 * run.settings.lease_seconds)  # longer than a lease lasts without a renewal
        assert len(spool.files()) == 3
        faulty_proxy.heal()
        finished(redis_client, run)
        assert uploader.error is None
    invariant_holds(redis_client, run, store, spool)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Answer(403, "AccessDenied"), "permission denied"), (Answer(503, "SlowDown"), "asks to slow down")],
    ids=["refuses", "is away"],
)
def test_a_run_whose_store_fails_waits_while_the_other_runs_of_the_spool_go_on(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    store: LocalStore,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
    fault: Answer,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, other = small_run(name="failing", num_batches=3), small_run(name="other", num_batches=3, seed=1)
    failing_store = start_in_s3(failing, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    other.start(redis_client, store)
    failing.extract(redis_client, spool)
    other.extract(redis_client, spool)
    faulty_proxy.plan(fault, when=states)
    caplog.set_level("INFO")
    with running_uploader(redis_server, spool, num_concurrent=1) as uploader:
        finished(redis_client, other)
        assert len(spool.files()) == 3, "every shard of the run that waits is kept"
        wait_until(lambda: uploader.metric("waiting_runs") == 1 and uploader.metric("store_away") == 1)
        report = wait_until(lambda: (r := uploader.status.report()).state == "waiting" and r)
        assert reason in report.detail
        told = {record.msg["event"] for record in caplog.records if reason in str(record.msg)}  # type: ignore[index]
        assert told & {"run_refused", "handed_back"}
        faulty_proxy.heal()
        finished(redis_client, failing)
        wait_until(lambda: uploader.metric("waiting_runs") == 0 and uploader.metric("store_away") == 0)
        assert uploader.error is None
    invariant_holds(redis_client, failing, failing_store, spool)
    invariant_holds(redis_client, other, store, spool)


def test_a_run_that_worked_and_is_refused_later_waits_until_it_is_mended(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=3)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    run.extract(redis_client, spool, limit=1)
    with running_uploader(redis_server, spool) as uploader:
        wait_until(lambda: uploader.metric("files_total", result="committed") == 1)
        faulty_proxy.plan(Answer(403, "AccessDenied"), when=states)
        run.extract(redis_client, spool)
        wait_until(lambda: uploader.metric("errors_total", error="StoreRefused") > 1)
        wait_until(lambda: "run small waits: " in uploader.status.report().detail)
        faulty_proxy.heal()
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(403, "AccessDenied"), "permission denied; it takes s3:ListBucket"),
        (Answer(400, "EntityTooLarge"), "the store takes no object of this size; lower --max-shard-bytes"),
    ],
    ids=["access", "size"],
)
def test_the_only_run_refused_from_the_start_ends_the_process_and_the_next_one_uploads_everything(
    answer: Answer,
    reason: str,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=3)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    run.extract(redis_client, spool)
    faulty_proxy.plan(answer, when=states)
    with running_uploader(redis_server, spool) as uploader:
        error = uploader.join()
    assert isinstance(error, StoreRefused)
    assert reason in str(error)
    assert len(spool.files()) == 3
    faulty_proxy.heal()
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_a_shard_too_large_for_its_store_is_a_dead_letter_with_the_reason_and_a_later_retry_mends_it(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=3)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    run.extract(redis_client, spool, limit=1)
    with running_uploader(redis_server, spool) as uploader:
        wait_until(lambda: uploader.metric("files_total", result="committed") == 1)
        faulty_proxy.plan(Answer(400, "EntityTooLarge"), when=lambda r: states(r) and "/000001-" in r.target)
        run.extract(redis_client, spool)
        manifest = wait_until(lambda: load_manifest(store))
        assert (manifest.complete, manifest.dead_letters) == (False, ("000001",))
        [letter] = dead_letters(redis_client, run.name)
        assert letter.reason.startswith("hiddenq.contracts.errors.ObjectTooLarge: ")
        assert "the store takes no object of this size; lower --max-shard-bytes (EntityTooLarge)" in letter.reason
        name = run.published["000001"].file_name
        assert (spool.folder / "quarantine" / name).exists(), "the file is set aside, not lost"
        assert "takes no object of this size" in (spool.folder / "quarantine" / f"{name}.reason").read_text()
        assert uploader.error is None
        faulty_proxy.heal()
        retry_dead(redis_client, run.name)
        wait_until(lambda: run.extract(redis_client, spool))
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


def test_a_stop_during_an_outage_hands_the_shard_back_at_once(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=1)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    run.extract(redis_client, spool)
    faulty_proxy.plan(Answer(503, "SlowDown"), when=states)
    with running_uploader(redis_server, spool) as uploader:
        wait_until(lambda: uploader.metric("store_away") == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert redis_client.llen(f"rq:queue:{names.upload_queue(spool.spool_id)}") == 1
    faulty_proxy.heal()
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
    invariant_holds(redis_client, run, store, spool)


@pytest.mark.slow
def test_a_slow_store_pauses_the_workers_at_the_mark_and_throughput_returns(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    tmp_path: Path,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    run = small_run(num_batches=24, num_samples=40)
    size = len(run.shard_bytes("000000")[0])
    spool = Spool.open(tmp_path / "spool", high_bytes=6 * size, low_bytes=3 * size)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    slow = faulty_proxy.plan(Slow(5 * size), times=8, when=states)
    most, pauses = 0, 0

    def work() -> None:
        nonlocal most, pauses
        with run.worker(redis_client, spool) as consumer:
            while claims := consumer.claim(1):
                for claim in claims:
                    name = names.shard_file_name(claim.message.batch_id, claim.execution)
                    while (file := spool.reserve(name, 2 * size)) is None:
                        pauses += 1
                        time.sleep(0.01)
                    most = max(most, spool.usage().num_bytes)
                    file.discard()
                    consumer.publish(claim, run.put_into_spool(spool, claim.message, claim.execution))

    worker = threading.Thread(target=work)
    with running_uploader(redis_server, spool) as uploader:
        worker.start()
        wait_until(lambda: "GPU workers wait" in uploader.status.report().detail)
        worker.join(60)
        finished(redis_client, run)
    assert slow.num_met == 8
    assert pauses > 0
    assert most <= 6 * size
    invariant_holds(redis_client, run, store, spool)


KILL = """
import os, signal, sys
from pathlib import Path
import {module} as module
from uploader import UploaderSettings, serve
owner = {owner}
original = getattr(owner, {name!r})
def killed(*args, **kwargs):
    if {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    original(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, {name!r}, killed)
serve(UploaderSettings(spool=Path(sys.argv[1]), metrics_port=0, nice=0))
"""
MOMENTS = {
    "before the put": ("hiddenq.storage.local", "module.LocalStore", "put_file", True),
    "in the put, with a half-done object there": ("hiddenq.storage.local", "module", "_verify", True),
    "after the put, before the commit": ("hiddenq.storage.local", "module.LocalStore", "put_file", False),
    "after the commit, before the delete": ("hiddenq.delivery", "module.Consumer", "commit", False),
    "after the delete": ("hiddenq.storage.spool", "module.Spool", "delete", False),
    "while finishing": ("uploader.finish", "module", "_write_letters", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_at_any_moment_costs_nothing(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    store: LocalStore,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, owner, name, before = MOMENTS[moment]
    run = small_run(num_batches=1)
    run.start(redis_client, store)
    (shard,) = run.extract(redis_client, spool)
    program = KILL.format(module=module, owner=owner, name=name, before=before)
    environment = {**os.environ, "HIDDENQ_REDIS_URL": redis_server.url}
    killed = subprocess.run([sys.executable, "-c", program, str(spool.folder)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr(local, "UNFINISHED_SECONDS", -1)
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
        wait_until(lambda: not spool.files() and not list(store.folder.rglob(".tmp-*")), what="nothing is left")
    assert Ledger(redis_client, run.name).entries()[shard.batch.batch_id].execution == shard.execution
    manifest = load_manifest(store)
    assert manifest is not None
    invariant_holds(redis_client, run, store, spool)


def test_kill_9_in_a_multipart_upload_leaves_parts_that_are_swept_and_the_shard_is_sent_again(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(num_batches=1, num_samples=80, hidden_size=2048)
    store = start_in_s3(run, redis_client, s3_server, s3_location, faulty_proxy.endpoint_url)
    (shard,) = run.extract(redis_client, spool)
    assert shard.num_bytes > 10 << 20
    plan = faulty_proxy.plan(BlackHole(), when=lambda r: parts(r) and states(r))
    program = (
        "import sys; from pathlib import Path; from uploader import UploaderSettings, serve\n"
        "serve(UploaderSettings(spool=Path(sys.argv[1]), metrics_port=0, nice=0))"
    )
    environment = {**os.environ, "HIDDENQ_REDIS_URL": redis_server.url}
    process = subprocess.Popen([sys.executable, "-c", program, str(spool.folder)], env=environment)
    wait_until(lambda: plan.num_met > 0)
    process.kill()
    process.wait()
    faulty_proxy.heal()
    monkeypatch.setattr("hiddenq.storage.s3.UNFINISHED_SECONDS", -1)

    def open_uploads() -> list[Any]:
        answer = s3_server.client().list_multipart_uploads(Bucket=s3_location.bucket, Prefix=s3_location.prefix)
        return list(answer.get("Uploads", ()))

    assert len(open_uploads()) == 1
    with running_uploader(redis_server, spool):
        finished(redis_client, run)
        wait_until(lambda: not open_uploads(), what="the killed upload is aborted")
    assert store.checksum(names.shard_key(shard.batch.batch_id, shard.execution)) == shard.checksum
    invariant_holds(redis_client, run, store, spool)
