"""A whole run with real processes: Redis, one worker a GPU, uploaders, every shard committed in the ledger.

Invariant: the clock starts when the first batch is enqueued to workers that are ready, and stops at the last commit;
what a run took of its host is counted over the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hiddenq.delivery import (
    DeliverySettings,
    EmbeddedServer,
    Ledger,
    RunRecord,
    enqueue,
    fleet,
    save_run,
    self_checks,
)
from hiddenq.storage import Spool, StoreSettings, open_store
from hiddenq.storage.runfiles import load_batches, load_run_json


def end_to_end(
    command: Callable[..., list[str]],
    *,
    run: Path,
    folder: Path,
    redis: Path,
    devices: list[str],
    num_uploaders: int,
    keep_bytes: float,
    measure_engine: bool,
) -> dict[str, Any]:
    """One run from its first batch enqueued to its last one committed.

    `run` holds what the producer made; spool and store are made in `folder`; `command(part, …)` starts a part. Shards
    above `keep_bytes` are deleted once they are committed.
    """
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(run, folder / "out")
    store = open_store(folder / "out")
    config = load_run_json(store)
    assert config is not None
    batches = load_batches(store)
    server = EmbeddedServer.start(redis)
    processes: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {
        "HIDDENQ_REDIS_URL": server.url,
        "HIDDENQ_REDIS_PASSWORD_FILE": str(server.password_file),
        "HIDDENQ_LOG_FORMAT": "json",
    }
    log_path = folder / "worker.log"
    try:
        client = server.connect()
        client.flushall()
        record = RunRecord(
            config=config,
            location=store.uri,
            store=StoreSettings().model_dump(mode="json"),
            delivery=DeliverySettings(),
        )
        save_run(client, record)
        with log_path.open("wb") as log:
            more = [] if measure_engine else ["--skip-engine"]
            for device in devices:
                processes.append(
                    start(command("worker", *more, "--device", device, "--folder", str(folder)), log, environment)
                )
            for index in range(num_uploaders):
                processes.append(
                    start(command("uploader", "--index", str(index), "--folder", str(folder)), log, environment)
                )
        wait_until(lambda: num_idle(fleet(client)) == len(devices), processes, log_path)
        spool = Spool.open(folder / "spool")
        extracted_at: float | None = None
        cpu_before = list(map(cpu_seconds, processes))
        begun = time.monotonic()
        enqueue(client, record, (batch.job(config.run) for batch in batches))
        ledger = Ledger(client, config.run)
        prune = Pruner(folder / "out", keep_bytes)

        def is_over() -> bool:
            nonlocal extracted_at
            prune.look(ledger)
            num_committed = ledger.totals().num_batches
            if extracted_at is None and num_committed + len(spool.files()) >= len(batches):
                extracted_at = time.monotonic()
            return num_committed == len(batches)

        wait_until(is_over, processes, log_path, every_seconds=0.05)
        seconds = time.monotonic() - begun
        cores = [(cpu_seconds(p) - before) / seconds for p, before in zip(processes, cpu_before, strict=True)]
        wait_until(lambda: not spool.files(), processes, log_path, every_seconds=0.05)
        emptied_at = time.monotonic()
        checks = self_checks(client, config.run)
        totals = ledger.totals()
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(timeout=120)
        server.stop()
    events = read_events(log_path)
    device_times = [event for event in events if event["event"] == "device_time"]
    ready = next(event for event in events if event["event"] == "ready")
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "spool", ignore_errors=True)
    return {
        "seconds": seconds,
        "num_batches": len(batches),
        "num_samples": totals.num_samples,
        "num_tokens": totals.num_tokens,
        "num_bytes": totals.num_bytes,
        "tokens_per_second": totals.num_tokens / seconds,
        "gb_per_second": totals.num_bytes / seconds / 1e9,
        "device_tokens_per_second": totals.num_tokens / max(used["span_seconds"] for used in device_times)
        if device_times
        else None,
        "busy_ratio": min((used["busy_ratio"] for used in device_times), default=None),
        "num_gpus": len(devices),
        "worker_cores_per_gpu": sum(cores[: len(devices)]) / len(devices),
        "uploader_cores_per_gpu": sum(cores[len(devices) :]) / len(devices),
        "spool_empty_after_seconds": emptied_at - (extracted_at or emptied_at),
        "start": {name: value for name, value in ready.items() if name.endswith("_seconds")},
        "self_check": max((check.max_relative_difference for check in checks), default=None),
        "num_self_checks": len(checks),
        "num_pruned": prune.num_pruned,
    }


class Pruner:
    """Deletes committed shards where the machine is too small for the whole run; what was measured is done by then."""

    LOOK_SECONDS = 1.0

    def __init__(self, location: Path, keep_bytes: float) -> None:
        self.num_pruned = 0
        self._location, self._keep_bytes = location, keep_bytes
        self._next = time.monotonic()
        self._pruned: set[str] = set()

    def look(self, ledger: Any) -> None:
        """Delete the oldest committed shards above what is kept, once a second."""
        if time.monotonic() < self._next or self._keep_bytes >= 1e18:
            return
        self._next = time.monotonic() + self.LOOK_SECONDS
        entries = [entry for entry in ledger.entries().values() if entry.key not in self._pruned]
        excess = sum(entry.num_bytes for entry in entries) - self._keep_bytes
        for entry in sorted(entries, key=lambda entry: entry.batch_id):
            if excess <= 0:
                return
            (self._location / entry.key).unlink(missing_ok=True)
            self._pruned.add(entry.key)
            self.num_pruned += 1
            excess -= entry.num_bytes


def start(arguments: list[str], log: Any, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a worker or an uploader."""
    return subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)


def num_idle(snapshot: Any) -> int:
    """GPU workers of the fleet that are ready and wait for work."""
    return sum(worker.report.role == "gpu_worker" and worker.report.state == "idle" for worker in snapshot.workers)


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Processor time that a running process has used."""
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Any, processes: list[Any], log_path: Path, *, every_seconds: float = 0.2) -> None:
    """Look until it holds; a process that ended is an error."""
    while not condition():
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(f"a process ended with {process.returncode}:\n{log_path.read_text()[-3000:]}")
        time.sleep(every_seconds)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
