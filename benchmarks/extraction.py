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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder: its queue.py would be taken for the standard one

PARITY_SLACK = 1.1
"""Our error against fp32 may be this much of plain Transformers' own."""


def main() -> int:
    """Run a part, or all of them."""
    options = parse_options()
    if options.part:
        return run_part(options)
    from benchmarks.table import describe_machine, print_table

    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"shape": options.shape, "machine": describe_machine(options.device)}
    result["workload"] = run_child(options, "workload")
    result["end_to_end"] = run_whole(options, work, [options.device], engine=True)
    result["engine"] = json.loads((work / "engine.json").read_text())
    if options.gpus > 1:
        devices = [f"cuda:{index}" for index in range(options.gpus)]
        result["all_gpus"] = run_whole(options, work, devices)
    if options.disk:
        result["disk"] = {"folder": options.disk, **run_child(options, "host", "--folder", options.disk)}
        result["disk"]["end_to_end"] = run_whole(options, Path(options.disk), [options.device])
    (work / "result.json").write_text(json.dumps(result, indent=1))
    print_table(result)
    return check(result, options)


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b", help="a name of benchmarks.workload.SHAPES")
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


def run_whole(options: argparse.Namespace, folder: Path, devices: list[str], *, engine: bool = False) -> dict[str, Any]:
    """Make the whole run in a folder."""
    from benchmarks.end_to_end import end_to_end

    return end_to_end(
        command,
        run=models_folder(options) / "run",
        folder=folder,
        redis=Path(options.work) / "redis",
        devices=devices,
        num_uploaders=options.uploaders,
        keep_bytes=options.keep_gb * 1e9,
        measure_engine=engine,
    )


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
    from gpu_worker.service import serve

    def built(*_arguments: Any, **_named: Any) -> Any:
        return build_decoder(options.shape, options.device)

    if options.random_weights:
        mock.patch.object(startup, "load_decoder", built).start()

    def prepare(settings: Any, config: Any, *arguments: Any, **named: Any) -> Any:
        ready = startup.make_ready(settings, config, *arguments, **named)
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
