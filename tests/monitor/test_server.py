"""What the monitor serves: metrics that agree with Redis, discovery that forgets nobody, a status, a page.

Proves: the samples are the ledger's and the queues' own numbers; a dead worker stays a target until it is drained or
forgotten, and a restarted one takes its old place; while Redis is away discovery answers 503 and the metrics stand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import make_server
from wsgiref.validate import validator

import pytest
import redis
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.metrics import MONITOR_FAMILIES, MonitorMetrics
from hiddenq.delivery import Ledger, drain, forget
from hiddenq.monitor import MonitorSettings, RunStatus, serve
from hiddenq.monitor.server import _Handler, _Server, application
from hiddenq.monitor.watcher import Watcher
from hiddenq.telemetry import host_name
from tests.monitor.made_fleet import SPOOL, MadeWorker, made_fleet, made_record, start_run
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


class Monitor:
    """A monitor in this process, whose looks the test decides."""

    def __init__(self, watcher: Watcher, port: int) -> None:
        self.watcher = watcher
        self.port = port

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def json(self, path: str) -> Any:
        status, text = self.get(path)
        assert status == 200, text
        return json.loads(text)

    def sample(self, name: str, **labels: str) -> float | None:
        """The value of the one series with these labels (others may have more); None if there is none."""
        found = [
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
            if sample.name == f"hiddenq_monitor_{name}" and labels.items() <= sample.labels.items()
        ]
        assert len(found) < 2, found
        return found[0] if found else None


@contextmanager
def monitor(redis_url: str) -> Iterator[Monitor]:
    registry = CollectorRegistry()
    watcher = Watcher(redis_url, MonitorMetrics(registry), interval_seconds=3600)
    # wsgiref's validator refuses whatever breaks the WSGI contract.
    server = make_server("127.0.0.1", free_port(), validator(application(watcher, registry)), _Server, _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        watcher.start()
        yield Monitor(watcher, server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        watcher.close()


def test_metrics_are_the_numbers_of_ledger_queues_and_workers(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    record = made_record(num_batches=6)
    with made_fleet(redis_client, record) as (worker, uploader), monitor(redis_server.url) as seen:
        for _ in range(3):
            worker.extract()
        uploader.upload()
        worker.beat()
        seen.watcher.look()
        totals = Ledger(redis_client, record.run).totals()
        host, run = host_name(), record.run
        assert seen.sample("run_batches_committed", run=run) == totals.num_batches == 1
        assert seen.sample("run_samples_committed", run=run) == totals.num_samples
        assert seen.sample("run_tokens_committed", run=run) == totals.num_tokens
        assert seen.sample("run_committed_bytes", run=run) == totals.num_bytes
        assert seen.sample("run_batches", run=run) == 6
        assert seen.sample("run_complete", run=run) == 0
        assert seen.sample("queue_depth", queue="extract", run=run) == 3
        assert seen.sample("queue_depth", queue="upload", spool_id=SPOOL, host=host) == 2
        assert seen.sample("workers_live", role="gpu_worker", host=host) == 1
        assert seen.sample("workers_expected", role="uploader", host=host) == 1
        assert seen.sample("worker_up", role="gpu_worker", run=run, host=host, target=worker.report().target) == 1
        assert seen.sample("spool_high_mark_bytes", spool_id=SPOOL, host=host) == 1 << 30
        assert seen.sample("spool_alive", spool_id=SPOOL, host=host) == 1
        assert seen.sample("redis_up") == 1
        memory = seen.sample("redis_memory_bytes")
        assert memory
        assert memory > 1e5


def test_every_family_of_the_monitor_is_exported_by_a_run_that_moves(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    with made_fleet(redis_client, made_record()) as (worker, uploader), monitor(redis_server.url) as seen:
        worker.extract()
        uploader.upload()
        seen.watcher.look()
        families = {family.name: family.samples for family in text_string_to_metric_families(seen.get("/metrics")[1])}
        assert [one.full_name for one in MONITOR_FAMILIES if not families[one.full_name]] == []


def test_status_over_http_is_the_status_of_the_command(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    with made_fleet(redis_client, made_record()), monitor(redis_server.url) as seen:
        (status,) = seen.json("/api/status")["runs"]
        assert RunStatus.model_validate(status).run == "demo"
        assert seen.json("/api/status?run=demo") == status
        assert seen.get("/api/status?run=other") == (404, '{"error":"no run other; Redis knows demo"}')


def test_a_machine_that_joins_is_a_target_with_the_labels_of_its_place(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    record = made_record()
    start_run(redis_client, record)
    with monitor(redis_server.url) as seen:
        assert seen.json("/sd") == []
        with MadeWorker(redis_client, record, metrics_address="node7:9410", host="node7").consumer:
            seen.watcher.look()
            (group,) = seen.json("/sd")
    assert group["targets"] == ["node7:9410"]
    assert group["labels"] == {
        "instance": f"{SPOOL}:cuda:0",
        "target": f"{SPOOL}:cuda:0",
        "role": "gpu_worker",
        "run": "demo",
        "host": "node7",
        "device": "cuda:0",
        "spool_id": SPOOL,
    }


def test_a_dead_worker_stays_a_target_until_it_is_drained_or_forgotten(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    record = made_record()
    start_run(redis_client, record)
    workers = [
        MadeWorker(redis_client, record, f"cuda:{number}", host=f"node{number}", metrics_address=f"node{number}:9410")
        for number in (1, 2)
    ]
    for worker in workers:
        worker.beat()
    dead = {f"gpu_worker:{worker.report().target}": 1.0 for worker in workers}
    redis_client.zadd("hiddenq:workers:seen", dead)
    with monitor(redis_server.url) as seen:

        def targets() -> list[str]:
            seen.watcher.look()
            return [group["targets"][0] for group in seen.json("/sd")]

        assert targets() == ["node1:9410", "node2:9410"]
        assert seen.sample("worker_up", host="node1") == 0
        assert seen.sample("workers_live", host="node1") == 0
        assert seen.sample("workers_expected", host="node1") == 1
        drain(redis_client, "node1")
        assert targets() == ["node2:9410"]
        assert seen.sample("worker_up", host="node1") is None
        assert seen.sample("workers_expected", host="node1") is None
        forget(redis_client, "node2")
        assert targets() == []


def test_a_restarted_worker_takes_its_old_place_whatever_its_name_and_port(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    record = made_record()
    start_run(redis_client, record)
    with monitor(redis_server.url) as seen:
        MadeWorker(redis_client, record, metrics_address="node1:9410").beat()
        seen.watcher.look()
        (first,) = seen.json("/sd")
        MadeWorker(redis_client, record, metrics_address="node1:9499").beat()
        seen.watcher.look()
        (second,) = seen.json("/sd")
    assert second["targets"] == ["node1:9499"]
    assert first["labels"] == second["labels"]


def test_while_redis_is_away_discovery_answers_503_and_the_metrics_stand(own_redis_server: RedisServer) -> None:
    with own_redis_server.client() as client:
        start_run(client, made_record())
    with monitor(own_redis_server.url) as seen:
        assert seen.sample("redis_up") == 1
        own_redis_server.kill()
        seen.watcher.look()
        for path in ("/sd", "/api/status"):
            status, text = seen.get(path)
            assert status == 503
            assert "Redis is away" in json.loads(text)["error"]
        assert seen.sample("redis_up") == 0
        assert seen.sample("queue_depth", queue="extract", run="demo") == 6
        own_redis_server.start()
        seen.watcher.look()
        assert seen.sample("redis_up") == 1
        assert seen.json("/sd") == []


def test_a_monitor_started_without_redis_says_so_and_finds_it_later(own_redis_server: RedisServer) -> None:
    own_redis_server.kill()
    with monitor(own_redis_server.url) as seen:
        assert seen.sample("redis_up") == 0
        assert seen.get("/sd")[0] == 503
        own_redis_server.start()
        seen.watcher.look()
        assert seen.sample("redis_up") == 1


def test_the_page_needs_nothing_from_elsewhere_and_sets_only_text(
    redis_server: RedisServer, redis_client: redis.Redis
) -> None:
    with monitor(redis_server.url) as seen:
        status, page = seen.get("/")
    assert status == 200
    for trace in ("http://", "https://", "src=", "@import", "innerHTML", "insertAdjacentHTML", "document.write"):
        assert trace not in page


def test_unknown_paths_and_methods_are_refused(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    with monitor(redis_server.url) as seen:
        assert seen.get("/../etc/passwd")[0] == 404
        request = urllib.request.Request(f"http://127.0.0.1:{seen.port}/api/status", method="POST", data=b"x")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=10)
        assert seen.get("/healthz") == (200, "ok\n")


def test_a_taken_port_is_a_usage_error(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    with monitor(redis_server.url) as seen, pytest.raises(UsageError, match="is another monitor running"):
        serve(MonitorSettings(redis_url=redis_server.url, port=seen.port))


def test_the_command_serves_until_it_is_told_to_stop(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    port = free_port()
    code = (
        "import sys; from hiddenq.monitor import MonitorSettings, serve;"
        f"sys.exit(serve(MonitorSettings(redis_url={redis_server.url!r}, port={port}, interval_seconds=0.1)))"
    )
    process = subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                return b"hiddenq_monitor_redis_up 1.0" in answer.read()
        except urllib.error.URLError:
            return False

    try:
        wait_until(answers, what="the monitor's answer")
        process.terminate()
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
        process.wait()
