"""How fast hiddenq extracts, end to end, beside the same work done without it: one command, one table.

    python benchmarks/extraction.py --shape qwen3-8b --work /dev/shm/hiddenq --device cuda:0
    python benchmarks/extraction.py --shape qwen3-8b --work /dev/shm/hiddenq --gpus 2     # one GPU, then two
    python benchmarks/extraction.py --tiny --device cpu          # seconds; checks that it runs and that parity holds

End to end means: batches enqueued in a real Redis, one worker process, shards in the spool, uploader processes, every
shard committed in the ledger. The clock starts when the first batch is enqueued to a worker that is ready and stops at
the last commit. Useful MFU is 2 x parameters in matrix products x real tokens / seconds / the matrix rate measured on
this device, so padding, attention and everything else count as losses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: its queue.py would be taken for the standard one

PARITY_SLACK = 1.1
"""Our error against fp32 may be this much of plain Transformers' own."""


def main() -> int:
    """Run a part, or all of them."""
    options = parse_options()
    if options.part:
        return run_part(options)
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"shape": options.shape, "machine": describe_machine(options.device)}
    result["workload"] = run_child(options, "workload")
    result["end_to_end"] = end_to_end(options, work)
    result["engine"] = json.loads((work / "engine.json").read_text())
    options.skip_engine = True
    if options.gpus > 1:
        devices = [f"cuda:{index}" for index in range(options.gpus)]
        result["all_gpus"] = end_to_end(options, work, devices)
    if options.disk:
        result["disk"] = {"folder": options.disk, **run_child(options, "host", "--folder", options.disk)}
        result["disk"]["end_to_end"] = end_to_end(options, Path(options.disk))
    (work / "result.json").write_text(json.dumps(result, indent=1))
    print_table(result)
    return check(result, options)


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b", help="qwen3-8b, qwen3.6-27b, qwen3.6-16-layers")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few samples")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gpus", type=int, default=1, help="end to end once more with so many GPUs, a worker each")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument(
        "--work", default="/dev/shm/hiddenq-benchmark", help="model, spool and store: RAM-backed for 8B"
    )
    parser.add_argument("--model-folder", default="", help="where the model's weights go, if not in --work")
    parser.add_argument("--disk", default="", help="run once more with spool and store in this folder")
    parser.add_argument("--every", type=int, default=1, help="engine alone: only every so many-th batch")
    parser.add_argument("--uploaders", type=int, default=2)
    parser.add_argument("--layers", default="dflash")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--parity", action="store_true", help="compare stored states with fp32 (needs memory for both)")
    parser.add_argument("--random-weights", action="store_true", help="build the weights on the device, read none")
    parser.add_argument("--keep-gb", type=float, default=1e9, help="delete committed shards above so many GB of them")
    parser.add_argument("--skip-engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.shape, options.samples, options.parity = "tiny", min(options.samples, 48), not options.random_weights
    return options


# Parts: each in a process of its own


def run_child(options: argparse.Namespace, part: str, *more: str) -> dict[str, Any]:
    """Run a part to its end and read its result."""
    begun = time.monotonic()
    done = subprocess.run(command(part, *more), stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    print(f"{part}: {time.monotonic() - begun:.1f} s {lines[-1][:600]}", flush=True)
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def command(part: str, *more: str) -> list[str]:
    """This script again, as one of its parts."""
    return [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--part", part, *more]


def run_part(options: argparse.Namespace) -> int:
    """Be a part."""
    from gpu_worker import WorkerSettings
    from hiddenq.telemetry import configure_logging

    work = Path(options.work)
    folder = Path(options.folder) if options.folder else work
    settings = WorkerSettings(device=options.device, spool=folder / "spool", cache=work / "cache", attention="auto")
    settings.set_environment()
    configure_logging(part=options.part)
    if options.part == "uploader":
        from uploader import UploaderSettings
        from uploader import serve as upload

        return upload(UploaderSettings(spool=folder / "spool", index=options.index, metrics_port=0))
    from benchmarks import parts

    if options.part == "worker":
        return worker(options, settings)
    if options.part == "host":
        parts.print_result(parts.measure_host(folder, options.device))
        return 0
    from benchmarks.workload import SHAPES, make_workload
    from hiddenq.contracts.layers import resolve_target_layers

    models = models_folder(options)
    models.mkdir(parents=True, exist_ok=True)
    workload = make_workload(models, options.shape, num_samples=options.samples, tiny=options.tiny)
    layers = list(resolve_target_layers(options.layers, SHAPES[options.shape]().num_hidden_layers))
    result = parts.run_workload(
        workload,
        options.shape,
        layers,
        work / "baseline",
        options.device,
        baselines=not options.no_baselines,
        save=not options.random_weights,
    )
    plan(options, workload, models / "run")
    parts.print_result(result)
    return 0


def worker(options: argparse.Namespace, settings: Any) -> int:
    """A worker as it is, but for one thing: once its model is ready, its engine is measured without queue and disk."""
    from benchmarks import parts
    from benchmarks.workload import build_decoder
    from gpu_worker import startup
    from gpu_worker.service import make_ready, serve

    if options.random_weights:
        startup.load_decoder = lambda *_, **__: build_decoder(options.shape, options.device)  # type: ignore[assignment]

    def prepare(settings: Any, config: Any, *arguments: Any, **named: Any) -> Any:
        ready = make_ready(settings, config, *arguments, **named)
        if not options.skip_engine:
            found = parts.measure_engine(ready, config, every=options.every, parity=options.parity)
            (Path(options.work) / "engine.json").write_text(json.dumps(found))
        return ready

    return serve(settings, prepare=prepare)


def models_folder(options: argparse.Namespace) -> Path:
    """Where the model and the run's plan lie."""
    return Path(options.model_folder or options.work)


def plan(options: argparse.Namespace, workload: Any, location: Path) -> Any:
    """Make the run exist at a location, as `hiddenq produce` does."""
    from hiddenq.storage import open_store
    from producer import ProducerSettings, prepare

    settings = ProducerSettings(
        model=str(workload.model),
        data=(str(workload.data),),
        target_layers=options.layers,
        token_budget=32768 if not options.tiny else 1024,
        max_length=4096 if not options.tiny else 256,
        run="benchmark",
    )
    return prepare(settings, open_store(location))


# End to end


def end_to_end(options: argparse.Namespace, folder: Path, devices: list[str] | None = None) -> dict[str, Any]:
    """Redis, workers and uploaders as real processes; from the first batch enqueued to the last one committed."""
    devices = devices or [options.device]
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

    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(models_folder(options) / "run", folder / "out")
    store = open_store(folder / "out")
    config = load_run_json(store)
    assert config is not None
    batches = load_batches(store)
    server = EmbeddedServer.start(Path(options.work) / "redis")
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
            more = ["--skip-engine"] * options.skip_engine
            for device in devices:
                processes.append(start("worker", folder, log, environment, *more, "--device", device))
            for index in range(options.uploaders):
                processes.append(start("uploader", folder, log, environment, "--index", str(index)))
        wait_until(lambda: num_idle(fleet(client)) == len(devices), processes, log_path)
        spool = Spool.open(folder / "spool")
        extracted_at: float | None = None
        cpu_before = list(map(cpu_seconds, processes))
        begun = time.monotonic()
        enqueue(client, record, (batch.job(config.run) for batch in batches))
        ledger = Ledger(client, config.run)
        prune = Pruner(folder / "out", options.keep_gb * 1e9)

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


def start(part: str, folder: Path, log: Any, environment: dict[str, str], *more: str) -> subprocess.Popen[bytes]:
    """Start a worker or an uploader."""
    return subprocess.Popen(command(part, "--folder", str(folder), *more), stdout=log, stderr=log, env=environment)


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


# The table


def describe_machine(device: str) -> dict[str, str]:
    """Machine and versions."""
    import torch
    import transformers

    name = torch.cuda.get_device_name(0) if device != "cpu" and torch.cuda.is_available() else platform.processor()
    return {
        "device": name or platform.machine(),
        "cpus": str(os.cpu_count()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(sys.argv),
    }


def print_table(result: dict[str, Any]) -> None:
    """The figures, one row a way of doing it."""
    engine, whole = result["engine"], result["end_to_end"]
    workload = result["workload"]
    ceiling, peer = workload["ceiling_flops"], workload.get("peer", {}).get("tokens_per_second")

    def row(name: str, rate: float, more: str = "") -> None:
        mfu = f"{rate * engine['flops_per_token'] / ceiling:.3f}" if ceiling else "-"
        factor = f"{rate / peer:.1f}" if peer else "-"
        print(f"| {name} | {rate:,.0f} | {mfu} | {factor} | {more} |")

    print(json.dumps(result["machine"]), f"matrix ceiling {ceiling / 1e12:.0f} TFLOP/s", sep="\n")
    print("| the same work | tokens/s | useful MFU | x peer | |\n|---|---|---|---|---|")
    for name in ("peer", "scripts"):
        if name in workload:
            row(name, workload[name]["tokens_per_second"])
    row("engine alone, nothing written", engine["tokens_per_second"], f"padding {engine['padding']:.3f}")
    if whole["device_tokens_per_second"]:
        row("worker, first to last batch", whole["device_tokens_per_second"], f"GPU busy {whole['busy_ratio']:.4f}")
    row("end to end, committed", whole["tokens_per_second"], f"{whole['gb_per_second']:.2f} GB/s, {host_use(whole)}")
    if "all_gpus" in result:
        several = result["all_gpus"]
        scaling = several["tokens_per_second"] / whole["tokens_per_second"]
        busy = f"GPUs busy {several['busy_ratio']:.4f} or more"
        more = f"{scaling:.3f} x one GPU, {several['gb_per_second']:.2f} GB/s, {busy}, {host_use(several)}"
        row(f"end to end, {several['num_gpus']} GPUs", several["tokens_per_second"], more)
    if "disk" in result:
        disk = result["disk"]["end_to_end"]
        buffered, synced = (result["disk"][f"{how}_gb_per_second"] for how in ("buffered", "fsync"))
        limits = f"{buffered:.2f} buffered, {synced:.2f} fsync"
        row("end to end, on disk", disk["tokens_per_second"], f"{disk['gb_per_second']:.2f} GB/s ({limits})")
    print("start:", whole["start"])
    print("parity:", engine["parity"], "gather as on the CPU:", engine["gather_equal"], "compiled:", engine["compiled"])
    print("self-checks:", whole["num_self_checks"], "largest difference", whole["self_check"])


def host_use(whole: dict[str, Any]) -> str:
    """What a run took of its host, in words."""
    workers, uploaders = whole["worker_cores_per_gpu"], whole["uploader_cores_per_gpu"]
    return (
        f"cores a GPU: worker {workers:.2f}, uploaders {uploaders:.2f}; "
        f"spool empty {whole['spool_empty_after_seconds']:.1f} s after the last batch"
    )


def check(result: dict[str, Any], options: argparse.Namespace) -> int:
    """Parity must hold anywhere; 1 if it does not."""
    parity = result["engine"]["parity"] or {"ours": 0.0, "transformers": 0.0}
    floor = 1e-5 if options.tiny else 0.0
    if not all(result["engine"]["gather_equal"].values()):
        print("the gather does not give the CPU's bytes")
        return 1
    if parity["ours"] > max(parity["transformers"] * PARITY_SLACK, floor):
        print(f"error against fp32 is {parity['ours']:.2e}, plain Transformers' {parity['transformers']:.2e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
