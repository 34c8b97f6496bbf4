"""The whole of it, live: two hosts that extract and upload with real parts, watched by the shipped configuration.

Redis, SeaweedFS, `hiddenq produce | worker-process | upload-process | monitor` on a tiny model, Debian's Prometheus and
Alertmanager with the built configuration (only addresses and intervals are the test's), and a webhook that keeps what
Alertmanager sends. A second, made run stands beside it for what no CPU can show: NVML's figures, XIDs, failures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from grafana.builder.alerts import Timing
from grafana.builder.configuration import alertmanager_configuration, prometheus_configuration
from grafana.builder.files import to_yaml
from grafana.builder.rules import rule_file
from hiddenq import telemetry
from hiddenq.contracts.errors import NonFiniteStates, TransientError
from hiddenq.contracts.metrics import GpuWorkerMetrics, UploaderMetrics
from hiddenq.delivery import DeliverySettings, RunRecord, load_run, save_run
from tests.grafana.programs import program
from tests.local.conftest import chats, write_rows
from tests.monitor.filled import fill
from tests.monitor.made_fleet import MadeUploader, MadeWorker, made_record, start_run
from tests.support.command import make_command
from tests.support.models import save_tiny_model
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, start_server
from tests.support.waiting import wait_until

DELIVERY = DeliverySettings(lease_seconds=8, renew_seconds=1, reap_seconds=1, retry_delays=(600.0,))
TIMING = Timing(floor_seconds=15, restart_seconds=5, window="20s", interval_seconds=1)
ROWS = 12000
"""Enough that batches wait all along: nothing here waits for the run to end."""


@dataclass
class Stack:
    """What a test may ask and do."""

    folder: Path
    client: redis.Redis
    s3: S3Server
    record: RunRecord
    prometheus: str
    alertmanager: str
    made_worker: MadeWorker | None = None
    """The GPU worker of the made run, on node3."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    """What Alertmanager sent, with the time it came."""

    @property
    def run(self) -> str:
        """The run that is extracted."""
        return self.record.run

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The answer to an instant query."""
        answer = self.get("query", query=expr)
        assert answer["status"] == "success", f"{expr}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expr: str) -> float | None:
        """The one value of a query; None if there is none."""
        result = self.query(expr)
        assert len(result) < 2, f"{expr}: {result}"
        return float(result[0]["value"][1]) if result else None

    def get(self, path: str, **parameters: str | list[str]) -> dict[str, Any]:
        """Prometheus's own API."""
        url = f"http://{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                return dict(json.load(error))

    def answers(self) -> bool:
        """Whether Prometheus answers yet."""
        try:
            with urllib.request.urlopen(f"http://{self.prometheus}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:
            return False

    def kept_back(self, alert: str, **labels: str) -> bool:
        """Whether Alertmanager has the alert and keeps it back because of another one."""
        matchers = [f'{name}="{value}"' for name, value in {"alertname": alert, **labels}.items()]
        url = f"http://{self.alertmanager}/api/v2/alerts?{urllib.parse.urlencode({'filter': matchers}, doseq=True)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return any(one["status"]["inhibitedBy"] for one in json.load(answer))

    def first_told(self, alert: str, status: str = "firing", **labels: str) -> dict[str, Any] | None:
        """The first notice of an alert with these labels."""
        wanted = {"alertname": alert, **labels}
        for one in self.told:
            if one["status"] == status and wanted.items() <= one["labels"].items():
                return one
        return None


@contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    """Start everything; end everything."""
    with ExitStack() as stack:
        server = RedisServer(folder / "redis", port=free_port(), maxmemory="512mb")
        stack.callback(server.stop)
        client = stack.enter_context(server.client())
        (folder / "s3").mkdir()
        s3 = start_server(folder / "s3")
        stack.callback(s3.stop)
        home = folder / "home"
        home.mkdir()
        environment = {
            "HIDDENQ_REDIS_URL": server.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        command = make_command(home, **environment)
        model = save_tiny_model(folder / "model")
        data = write_rows(folder / "chats.jsonl", chats(ROWS))
        produced = command(
            "produce", "--model", model, "--data", data, "--out", f"s3://{BUCKET}/watched",
            "--endpoint-url", s3.endpoint_url, "--target-layers", "0,1", "--token-budget", "256", "--run", "watched",
        )  # fmt: skip
        assert produced.status == 0, produced
        record = load_run(client).model_copy(update={"delivery": DELIVERY})
        save_run(client, record)

        watched = Stack(folder, client, s3, record, f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
        stack.callback(_end, watched)
        webhook = stack.enter_context(_webhook(watched.told))
        monitor = _start_monitor(watched, environment)
        _start_prometheus(watched, monitor, webhook)
        for host in ("node1", "node2"):
            for role, arguments in (("worker", ("--device", "cpu")), ("upload", ("--index", "0"))):
                _start_process(watched, command.environment | {"HIDDENQ_HOST": host}, host, role, arguments)
        watched.made_worker = _start_made_fleet(stack, client)
        yield watched


def signal_process(watched: Stack, name: str, signum: signal.Signals) -> float:
    """Send a signal to one process; returns when."""
    os.kill(watched.processes[name].pid, signum)
    return time.time()


def _start(watched: Stack, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
    with (watched.folder / f"{name}.log").open("wb") as log:
        watched.processes[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=watched.folder
        )


def _start_process(
    watched: Stack, environment: dict[str, str], host: str, role: str, arguments: tuple[str, ...]
) -> None:
    name = f"{role} {host}"
    run = ("--run", watched.run) if role == "worker" else ()
    command = [sys.executable, "-m", "hiddenq", f"{role}-process", "--spool", str(watched.folder / f"spool-{host}")]
    _start(watched, name, [*command, "--metrics-port", str(free_port()), *run, *arguments], environment)


def _start_monitor(watched: Stack, environment: dict[str, str]) -> str:
    port = free_port()
    code = (
        "import sys; from hiddenq.monitor import MonitorSettings, serve;"
        f"sys.exit(serve(MonitorSettings(port={port}, interval_seconds=1)))"
    )
    _start(watched, "monitor", [sys.executable, "-c", code], os.environ | environment)
    return f"127.0.0.1:{port}"


def _start_prometheus(watched: Stack, monitor: str, webhook: str) -> None:
    configuration = prometheus_configuration(
        monitor=monitor, alertmanager=watched.alertmanager, rules="rules.yaml", scrape_seconds=1, discovery_seconds=1
    )
    (watched.folder / "prometheus.yml").write_text(to_yaml(configuration))
    (watched.folder / "rules.yaml").write_text(to_yaml(rule_file(TIMING)))
    told = alertmanager_configuration(webhook=webhook, group_wait="1s", group_interval="1s")
    (watched.folder / "alertmanager.yml").write_text(to_yaml(told))
    _start(
        watched,
        "alertmanager",
        [
            program("prometheus-alertmanager", "alertmanager"),
            "--config.file=alertmanager.yml",
            "--storage.path=alertmanager",
            f"--web.listen-address={watched.alertmanager}",
            "--cluster.listen-address=",
        ],
    )
    _start(
        watched,
        "prometheus",
        [
            program("prometheus"),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=prometheus",
            f"--web.listen-address={watched.prometheus}",
        ],
    )
    eventually(watched, watched.answers, seconds=60, what="Prometheus's first answer")


@contextmanager
def _webhook(told: list[dict[str, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class names it so
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.extend({**alert, "came_at": time.time()} for alert in body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _start_made_fleet(stack: ExitStack, client: redis.Redis) -> MadeWorker:
    """A GPU worker and an uploader of another run that have met everything: one batch dead, one delayed."""
    record = made_record("made", num_batches=2, delivery=DELIVERY)
    start_run(client, record)
    gpu, uploads = CollectorRegistry(), CollectorRegistry()
    ports = [telemetry.serve_metrics(registry, port=free_port()) for registry in (gpu, uploads)]
    address, upload_address = (f"127.0.0.1:{port}" for port in ports)
    worker = MadeWorker(client, record, host="node3", metrics_address=address)
    uploader = MadeUploader(client, record, host="node3", metrics_address=upload_address)
    for consumer in (worker.consumer, uploader.consumer):
        consumer.start()
        stack.callback(consumer.close)
    errors = (NonFiniteStates("sample 1: layer 1 has NaN"), TransientError("again"))
    for claim, error in zip(worker.consumer.claim(2), errors, strict=True):
        worker.consumer.enter(claim, "gpu")
        worker.consumer.fail(claim, error)
    fill(GpuWorkerMetrics(gpu))
    fill(UploaderMetrics(uploads))
    return worker


def _end(watched: Stack) -> None:
    for process in watched.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
    for process in watched.processes.values():
        process.wait(timeout=60)


def logs_of(watched: Stack) -> str:
    """The ends of all logs, for a failing test's message."""
    return "\n".join(
        f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in watched.folder.glob("*.log")
    )


def eventually(watched: Stack, happened: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Wait for a state of the stack, and show its logs if it does not come."""
    try:
        return wait_until(happened, seconds=seconds, what=what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs_of(watched)}") from error
