"""Outages of any length end with everything uploaded, a refusal holds up its own run alone, no death costs a shard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import StoreRefused
from hiddenq.contracts.messages import ShardReady
from hiddenq.delivery import Ledger, dead_letters, refusals, retry_dead
from hiddenq.storage import LocalStore, ObjectStore, Spool, StoreSettings, local, open_store, s3_client
from hiddenq.storage.runfiles import load_manifest
from tests.support.faulty_proxy import Answer, BlackHole, FaultyProxy, Reset, Slow, parts, puts
from tests.support.logs import logged
from tests.support.redis_server import RedisServer
from tests.support.s3_server import S3Location, S3Server
from tests.support.waiting import wait_until
from tests.uploader.running import RunningUploader, finished, invariant_holds, running_uploader
from tests.uploader.small_run import SmallRun, small_run
from uploader import upload


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(upload, "FIRST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(upload, "LONGEST_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(upload, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(refusals, "FIRST_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(refusals, "LONGEST_WAIT_SECONDS", 0.5)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A Redis, a spool, and an S3 store that uploaders reach through a proxy which can be told to fail."""

    redis_server: RedisServer
    client: redis.Redis
    spool: Spool
    proxy: FaultyProxy
    server: S3Server
    location: S3Location

    def start(self, run: SmallRun, **options: Any) -> ObjectStore:
        """Start a run in S3; returns its store, reached directly."""
        store = open_store(self.location.uri, StoreSettings(endpoint_url=self.server.endpoint_url))
        settings = StoreSettings(endpoint_url=self.proxy.endpoint_url, part_bytes=5 << 20, **options)
        run.start(self.client, store, settings.model_dump(exclude_defaults=True))
        return store

    def extract(self, run: SmallRun, **options: Any) -> list[ShardReady]:
        """Put shards of a run into the spool."""
        return run.extract(self.client, self.spool, **options)

    def uploader(self, **settings: Any) -> AbstractContextManager[RunningUploader]:
        """An uploader of the spool."""
        return running_uploader(self.redis_server, self.spool, **settings)

    def finished(self, run: SmallRun) -> None:
        """Wait for a run's end."""
        finished(self.client, run)

    def invariant_holds(self, run: SmallRun, store: ObjectStore) -> None:
        """All of a run is in its store, and nothing is left over."""
        invariant_holds(self.client, run, store, self.spool)

    def finish(self, run: SmallRun, store: ObjectStore) -> None:
        """With an uploader of its own a run comes to its end, and the invariant holds."""
        with self.uploader():
            self.finished(run)
        self.invariant_holds(run, store)


@pytest.fixture
def scene(
    redis_server: RedisServer,
    redis_client: redis.Redis,
    spool: Spool,
    faulty_proxy: FaultyProxy,
    s3_server: S3Server,
    s3_location: S3Location,
) -> Scene:
    return Scene(
        redis_server=redis_server,
        client=redis_client,
        spool=spool,
        proxy=faulty_proxy,
        server=s3_server,
        location=s3_location,
    )


def states(request: Any) -> bool:
    return puts(request) and "/states/" in request.target


def test_a_503_ten_times_then_200_ends_with_everything_uploaded_and_no_attempt_used(scene: Scene) -> None:
    run = small_run(num_batches=2)
    store = scene.start(run)
    scene.extract(run)
    plan = scene.proxy.plan(Answer(503, "SlowDown"), times=10, when=states)
    with scene.uploader(num_concurrent=1) as uploader:
        scene.finished(run)
        assert plan.num_met == 10
        assert uploader.metric("retries_total", error="SlowDown") == 8
        assert uploader.metric("errors_total", error="StoreAway") == 2
        assert uploader.metric("store_away") == 0
        assert uploader.status.report().num_failures == 0
    scene.invariant_holds(run, store)


def test_an_outage_is_told_and_waited_for_longer_than_any_lease(scene: Scene) -> None:
    run = small_run(num_batches=3)
    store = scene.start(run, timeout_seconds=0.5)
    scene.extract(run)
    with scene.uploader() as uploader:
        for fault in (BlackHole(), Reset(), Answer(500, "InternalError")):
            scene.proxy.plan(fault)
            wait_until(lambda: uploader.metric("store_away") == 1)
        report = wait_until(lambda: (r := uploader.status.report()).state == "waiting" and r)
        assert report.detail
        time.sleep(2 * run.settings.lease_seconds)  # longer than a lease lasts without a renewal
        assert len(scene.spool.files()) == 3
        scene.proxy.heal()
        scene.finished(run)
        assert uploader.error is None
    scene.invariant_holds(run, store)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Answer(403, "AccessDenied"), "permission denied"), (Answer(503, "SlowDown"), "asks to slow down")],
    ids=["refuses", "is away"],
)
def test_a_run_whose_store_fails_waits_while_the_other_runs_of_the_spool_go_on(
    scene: Scene,
    store: LocalStore,
    fault: Answer,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, other = small_run(name="failing", num_batches=3), small_run(name="other", num_batches=3, seed=1)
    failing_store = scene.start(failing)
    other.start(scene.client, store)
    scene.extract(failing)
    scene.extract(other)
    scene.proxy.plan(fault, when=states)
    caplog.set_level("INFO")
    with scene.uploader(num_concurrent=1) as uploader:
        scene.finished(other)
        assert len(scene.spool.files()) == 3, "every shard of the run that waits is kept"
        wait_until(lambda: uploader.metric("waiting_runs") == 1 and uploader.metric("store_away") == 1)
        report = wait_until(lambda: (r := uploader.status.report()).state == "waiting" and r)
        assert reason in report.detail
        told = {line["event"] for line in logged(caplog, reason)}
        assert told & {"run_refused", "handed_back"}
        scene.proxy.heal()
        scene.finished(failing)
        wait_until(lambda: uploader.metric("waiting_runs") == 0 and uploader.metric("store_away") == 0)
        assert uploader.error is None
    scene.invariant_holds(failing, failing_store)
    scene.invariant_holds(other, store)


def test_a_run_that_worked_and_is_refused_later_waits_until_it_is_mended(scene: Scene) -> None:
    run = small_run(num_batches=3)
    store = scene.start(run)
    scene.extract(run, limit=1)
    with scene.uploader() as uploader:
        wait_until(lambda: uploader.metric("files_total", result="committed") == 1)
        scene.proxy.plan(Answer(403, "AccessDenied"), when=states)
        scene.extract(run)
        wait_until(lambda: uploader.metric("errors_total", error="StoreRefused") > 1)
        wait_until(lambda: "run small waits: " in uploader.status.report().detail)
        scene.proxy.heal()
        scene.finished(run)
    scene.invariant_holds(run, store)


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
    scene: Scene,
) -> None:
    run = small_run(num_batches=3)
    store = scene.start(run)
    scene.extract(run)
    scene.proxy.plan(answer, when=states)
    with scene.uploader() as uploader:
        error = uploader.join()
    assert isinstance(error, StoreRefused)
    assert reason in str(error)
    assert len(scene.spool.files()) == 3
    scene.proxy.heal()
    scene.finish(run, store)


def test_a_shard_too_large_for_its_store_is_a_dead_letter_with_the_reason_and_a_later_retry_mends_it(
    scene: Scene,
) -> None:
    run = small_run(num_batches=3)
    store = scene.start(run)
    scene.extract(run, limit=1)
    with scene.uploader() as uploader:
        wait_until(lambda: uploader.metric("files_total", result="committed") == 1)
        scene.proxy.plan(Answer(400, "EntityTooLarge"), when=lambda r: states(r) and "/000001-" in r.target)
        scene.extract(run)
        manifest = wait_until(lambda: load_manifest(store))
        assert (manifest.complete, manifest.dead_letters) == (False, ("000001",))
        [letter] = dead_letters(scene.client, run.name)
        assert letter.reason.startswith("hiddenq.contracts.errors.ObjectTooLarge: ")
        assert "the store takes no object of this size; lower --max-shard-bytes (EntityTooLarge)" in letter.reason
        name = run.published["000001"].file_name
        assert (scene.spool.folder / "quarantine" / name).exists(), "the file is set aside, not lost"
        assert "takes no object of this size" in (scene.spool.folder / "quarantine" / f"{name}.reason").read_text()
        assert uploader.error is None
        scene.proxy.heal()
        retry_dead(scene.client, run.name)
        wait_until(lambda: scene.extract(run))
        scene.finished(run)
    scene.invariant_holds(run, store)


def test_a_stop_during_an_outage_hands_the_shard_back_at_once(scene: Scene) -> None:
    run = small_run(num_batches=1)
    store = scene.start(run)
    scene.extract(run)
    scene.proxy.plan(Answer(503, "SlowDown"), when=states)
    with scene.uploader() as uploader:
        wait_until(lambda: uploader.metric("store_away") == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert scene.client.llen(f"rq:queue:{names.upload_queue(scene.spool.spool_id)}") == 1
    scene.proxy.heal()
    scene.finish(run, store)


@pytest.mark.slow
def test_a_slow_store_pauses_the_workers_at_the_mark_and_throughput_returns(scene: Scene, tmp_path: Path) -> None:
    run = small_run(num_batches=24, num_samples=40)
    size = len(run.shard_bytes("000000")[0])
    spool = Spool.open(tmp_path / "spool", high_bytes=6 * size, low_bytes=3 * size)
    scene = replace(scene, spool=spool)
    store = scene.start(run)
    slow = scene.proxy.plan(Slow(5 * size), times=8, when=states)
    most, pauses = 0, 0

    def work() -> None:
        nonlocal most, pauses
        with run.worker(scene.client, scene.spool) as consumer:
            while claims := consumer.claim(1):
                for claim in claims:
                    name = names.shard_file_name(claim.message.batch_id, claim.execution)
                    while (file := scene.spool.reserve(name, 2 * size)) is None:
                        pauses += 1
                        time.sleep(0.01)
                    most = max(most, scene.spool.usage().num_bytes)
                    file.discard()
                    consumer.publish(claim, run.put_into_spool(scene.spool, claim.message, claim.execution))

    worker = threading.Thread(target=work)
    with scene.uploader() as uploader:
        worker.start()
        wait_until(lambda: "GPU workers wait" in uploader.status.report().detail)
        worker.join(60)
        scene.finished(run)
    assert slow.num_met == 8
    assert pauses > 0
    assert most <= 6 * size
    scene.invariant_holds(run, store)


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
    "in the put, with a half-done object there": ("hiddenq.storage.local", "module", "verify", True),
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
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(num_batches=1, num_samples=80, hidden_size=2048)
    store = scene.start(run)
    (shard,) = scene.extract(run)
    assert shard.num_bytes > 10 << 20
    plan = scene.proxy.plan(BlackHole(), when=lambda r: parts(r) and states(r))
    program = (
        "import sys; from pathlib import Path; from uploader import UploaderSettings, serve\n"
        "serve(UploaderSettings(spool=Path(sys.argv[1]), metrics_port=0, nice=0))"
    )
    environment = {**os.environ, "HIDDENQ_REDIS_URL": scene.redis_server.url}
    process = subprocess.Popen([sys.executable, "-c", program, str(scene.spool.folder)], env=environment)
    wait_until(lambda: plan.num_met > 0)
    process.kill()
    process.wait()
    scene.proxy.heal()
    monkeypatch.setattr("hiddenq.storage.s3_sweep.UNFINISHED_SECONDS", -1)

    def open_uploads() -> list[Any]:
        answer = scene.server.client().list_multipart_uploads(
            Bucket=scene.location.bucket, Prefix=scene.location.prefix
        )
        return list(answer.get("Uploads", ()))

    assert len(open_uploads()) == 1
    with scene.uploader():
        scene.finished(run)
        wait_until(lambda: not open_uploads(), what="the killed upload is aborted")
    assert store.checksum(names.shard_key(shard.batch.batch_id, shard.execution)) == shard.checksum
    scene.invariant_holds(run, store)
