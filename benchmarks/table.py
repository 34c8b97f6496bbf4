"""What the extraction benchmark prints: machine, one row a way of doing the work, and what a run took of its host."""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any


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
