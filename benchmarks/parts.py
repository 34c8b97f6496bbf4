"""The benchmark's parts, each a process of its own: the engine alone, parity, baselines; a worker, an uploader.

Invariant: every part loads the model as the worker does and prints one JSON object as its last line.

Shape legend: S tokens, H hidden size.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import measure_peer, measure_scripts
from benchmarks.workload import Workload, build_model, write_workload
from gpu_worker.engine import DeviceTime
from gpu_worker.gather import Destination, columns_of, load_states, store_states, store_tokens
from gpu_worker.inputs import PaddedBatch, pad_rows
from gpu_worker.pipeline import ON_DEVICE
from gpu_worker.runs import ServedRun
from gpu_worker.selfcheck import token_differences
from gpu_worker.startup import Ready
from gpu_worker.warmup import matrix_ceiling
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage import open_store
from hiddenq.storage.runfiles import TokenRow, load_batches

PARITY_LENGTHS = (600, 333, 120, 40)


def measure_engine(ready: Ready, config: RunConfig, *, every: int, parity: bool) -> dict[str, Any]:
    """The pipeline's device side alone: the same batches, nothing written, no queue; then parity on a few samples."""
    store = open_store(Path(config.model.model).parent / "run")
    run = ServedRun(config=config, store=store, shard_format=ready.extractor.shard_format, extractor=ready.extractor)
    plan = load_batches(store)[::every]
    batches: queue.Queue[PaddedBatch | None] = queue.Queue(maxsize=2)
    on_gpu = ready.engine.device.type == "cuda"

    def feed() -> None:
        for batch in plan:
            batches.put(run.prepare(batch.job(config.run), pinned=on_gpu))
        batches.put(None)

    threading.Thread(target=feed, daemon=True).start()
    used = _drive(ready, batches)
    tokens = sum(batch.num_tokens for batch in plan)
    span = used.span_seconds or used.busy_seconds
    return {
        "num_tokens": tokens,
        "padding": sum(batch.num_samples * batch.padded_length for batch in plan) / tokens,
        "tokens_per_second": tokens / span,
        "busy_ratio": used.busy_seconds / span,
        "flops_per_token": ready.flops_per_token,
        "compiled": ready.host.compiled,
        "kernels": ready.host.kernels,
        "gather_equal": check_gather(ready.engine.device),
        "parity": measure_parity(ready, config.model.model) if parity else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
    }


def check_gather(device: torch.device) -> dict[str, bool]:
    """Whether this device's gather gives the CPU's bytes, by storage dtype."""
    equal = {}
    for storage in ("bfloat16", "float16", "float32", "float8_e4m3fn"):
        layers = ShardFormat(
            target_layer_ids=(1, 3, 2), hidden_size=512, model_dtype="float32", storage_dtype=storage,
            final_hidden_state=True,
        )  # fmt: skip
        lengths = (5, 90, 1, 127)
        begins = tuple(sum(lengths[:row]) * layers.bytes_per_token for row in range(4))
        generator = torch.Generator().manual_seed(0)
        columns = columns_of(layers)
        states = [torch.randn(4, 127, 512, generator=generator) for _ in columns]
        payloads = []
        for place in (torch.device("cpu"), device):
            destination = Destination(
                payload=torch.zeros(sum(lengths) * layers.bytes_per_token, dtype=torch.uint8, device=place),
                lengths_B=torch.tensor(lengths, dtype=torch.int32, device=place),
                begins_B=torch.tensor(begins, device=place),
                nonfinite_CB=torch.zeros(len(columns), 4, dtype=torch.int32, device=place),
                bytes_per_token=layers.bytes_per_token,
                host_lengths=lengths,
                host_begins=begins,
            )
            for index, column in enumerate(columns):
                store_states(column, index, states[index].to(place), destination)
            ids_BS = torch.arange(4 * 127, device=place).view(4, 127)
            store_tokens(ids_BS, ids_BS.remainder(2).to(torch.uint8), destination)
            payloads.append(destination.payload.cpu())
        equal[storage] = torch.equal(*payloads)
    return equal


def _drive(ready: Ready, batches: queue.Queue[PaddedBatch | None]) -> DeviceTime:
    used, room = DeviceTime(), threading.Semaphore(ON_DEVICE)
    launched: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def collect() -> None:
        while (item := launched.get()) is not None:
            item.wait()
            used.add(item)
            room.release()
            ready.ring.give(item.slot)

    collector = threading.Thread(target=collect)
    collector.start()
    while (batch := batches.get()) is not None:
        slot = ready.ring.take(60)
        assert slot is not None
        room.acquire()
        launched.put(ready.engine.launch(ready.extractor, batch, slot))
    launched.put(None)
    collector.join()
    return used


@torch.inference_mode()
def measure_parity(ready: Ready, path: str) -> dict[str, float] | None:
    """Relative error of the stored states against fp32, ours (batched) and plain Transformers' (one sample, eager).

    None where the model does not fit beside its copy in fp32.
    """
    device = str(ready.engine.device)
    if device != "cpu":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < 5 * sum(weight.numel() for weight in ready.decoder.model.parameters()):
            return None
    from transformers import AutoModel

    generator = torch.Generator().manual_seed(3)
    vocab_size = ready.decoder.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    rows = [torch.randint(3, vocab_size, (length,), generator=generator) for length in PARITY_LENGTHS]
    batch = pad_rows(
        [TokenRow(n, row.int().numpy(), row.new_ones(len(row)).byte().numpy()) for n, row in enumerate(rows)],
        ready.extractor.shard_format,
        padded_length=max(PARITY_LENGTHS),
        vocab_size=vocab_size,
        pinned=device != "cpu",
    )
    payload = torch.empty(batch.num_bytes, dtype=torch.uint8, device=ready.engine.device)
    ready.engine.run_into(ready.extractor, batch, payload)
    hidden = ready.decoder.hidden_size
    ours = [
        dict(load_states(ready.extractor.columns, payload, begin, length, hidden))
        for begin, length in zip(batch.begins, batch.lengths, strict=True)
    ]
    layers = ready.extractor.shard_format.target_layer_ids

    def plain(dtype: torch.dtype) -> list[dict[str, Tensor]]:
        model = AutoModel.from_pretrained(path, dtype=dtype, device_map={"": device}).eval()
        found = []
        for row in rows:
            states = model(row[None].to(device), use_cache=False, output_hidden_states=True).hidden_states
            found.append({f"layer {layer}": states[layer + 1][0].float() for layer in layers})
        return found

    theirs = plain(next(ready.decoder.model.parameters()).dtype)
    exact = plain(torch.float32)

    def error(found: list[dict[str, Tensor]]) -> float:
        return max(
            float(token_differences(one[name], reference[name]).mean())
            for one, reference in zip(found, exact, strict=True)
            for name in reference
        )

    return {"ours": error(ours), "transformers": error(theirs)}


def measure_ceiling(device: str) -> float:
    """Operations a second over 60 large matrix products on random data, before anything else has run."""
    return matrix_ceiling(torch.device(device), torch.bfloat16, rounds=60)


def run_workload(
    workload: Workload, shape: str, layers: list[int], out: Path, device: str, *, baselines: bool, save: bool
) -> dict[str, Any]:
    """Build the model, run the baselines on it, and save it (or its config alone) for the worker."""
    result: dict[str, Any] = {
        "num_samples": len(workload.lengths),
        "num_tokens": workload.num_tokens,
        "ceiling_flops": measure_ceiling(device),
    }
    model = build_model(shape, device)
    if baselines:
        result["peer"] = measure_peer(model, workload, layers, out, device=device)
        result["scripts"] = measure_scripts(model, workload, layers, out, device=device)
    write_workload(workload, shape, model if save else None)
    return result


def measure_host(folder: Path, device: str) -> dict[str, float]:
    """What a folder takes from three writers, GB/s over 12 GiB on a GPU machine: buffered, and with fsync."""
    from concurrent.futures import ThreadPoolExecutor

    size = 1 << 30 if device != "cpu" else 1 << 22
    block = torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().data
    folder.mkdir(parents=True, exist_ok=True)

    def write(number: int, fsync: bool) -> None:
        path = folder / f"probe-{number}"
        with path.open("wb", buffering=0) as file:
            for first in range(0, size, 32 << 20):
                file.write(block[first : first + (32 << 20)])
            if fsync:
                os.fsync(file.fileno())
        path.unlink()

    rates = {}
    for name, fsync in (("buffered", False), ("fsync", True)):
        begun = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(write, range(12), [fsync] * 12))
        rates[f"{name}_gb_per_second"] = 12 * size / (time.monotonic() - begun) / 1e9
    return rates


def print_result(result: dict[str, Any]) -> None:
    """The one line that the parent reads."""
    print("RESULT " + json.dumps(result), flush=True)
