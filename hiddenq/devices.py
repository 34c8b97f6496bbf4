"""Which devices `--devices` names, found without importing torch.

Invariant: the answer is a list of torch device names, one a worker, never empty, and no GPU belongs to two of them;
CUDA devices are counted as CUDA itself would number them, so `CUDA_VISIBLE_DEVICES` is honoured.
"""

from __future__ import annotations

import os

from hiddenq.contracts.errors import UsageError


def resolve_devices(text: str, *, gpus_per_worker: int = 1) -> list[str]:
    """`auto`, `cpu`, `cuda` (all there are) or `cuda:0,cuda:2` → each worker's device.

    A worker with several GPUs has its device and those that follow it.

    Raises:
        UsageError: a name that is no device, a GPU that is not there, or one that two workers would share.
    """
    found, step = num_cuda_devices(), gpus_per_worker
    if text == "cuda" and not found:
        raise UsageError("--devices cuda: no NVIDIA GPU is visible here; `hiddenq doctor` says why")
    if text in ("auto", "cuda"):
        if 0 < found < step:
            raise UsageError(f"--gpus-per-worker {step}: {found} GPUs are visible (`hiddenq doctor`)")
        return [name_of(first) for first in range(0, found - step + 1, step)] or ["cpu"]
    devices = [name.strip() for name in text.split(",")]
    taken: set[int] = set()
    for name in devices:
        if name == "cpu":
            continue
        kind, _, index = name.partition(":")
        if kind != "cuda" or not index.isdigit():
            raise UsageError(f"--devices {text}: {name!r} is no device; expected auto, cpu, cuda or cuda:0,cuda:1")
        own = set(range(int(index), int(index) + step))
        if max(own) >= found:
            raise UsageError(
                f"--devices {text}: {name_of(max(own))} is not there; {found} GPUs are visible (`hiddenq doctor`)"
            )
        if own & taken:
            raise UsageError(
                f"--devices {text}: {name_of(min(own & taken))} would belong to two workers"
                + (f" of {step} GPUs each (--gpus-per-worker)" if step > 1 else "")
            )
        taken |= own
    return devices


def name_of(index: int) -> str:
    """The torch name of a GPU."""
    return f"cuda:{index}"


def num_cuda_devices() -> int:
    """GPUs that CUDA would see in this environment."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        present = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = 0
    for name in visible.split(","):
        if not name.strip() or name.strip() == "-1":
            break
        chosen += 1
    return min(chosen, present)
