"""Which devices `--devices` names, found without importing torch.

Invariant: the answer is a list of torch device names, never empty; CUDA devices are counted as CUDA itself would
number them, so `CUDA_VISIBLE_DEVICES` is honoured.
"""

from __future__ import annotations

import os

from hiddenq.contracts.errors import UsageError


def resolve_devices(text: str) -> list[str]:
    """`auto`, `cpu`, `cuda` (all there are) or `cuda:0,cuda:2` → device names.

    Raises:
        UsageError: a name that is no device, or a GPU that is not there.
    """
    found = num_cuda_devices()
    if text == "auto":
        return [f"cuda:{index}" for index in range(found)] or ["cpu"]
    if text == "cuda":
        if not found:
            raise UsageError("--devices cuda: no NVIDIA GPU is visible here; `hiddenq doctor` says why")
        return [f"cuda:{index}" for index in range(found)]
    devices = [name.strip() for name in text.split(",")]
    for name in devices:
        if name == "cpu":
            continue
        kind, _, index = name.partition(":")
        if kind != "cuda" or not index.isdigit():
            raise UsageError(f"--devices {text}: {name!r} is no device; expected auto, cpu, cuda or cuda:0,cuda:1")
        if int(index) >= found:
            raise UsageError(f"--devices {text}: {name} is not there; {found} GPUs are visible")
    if len(set(devices)) != len(devices) and devices != ["cpu"] * len(devices):
        raise UsageError(f"--devices {text}: a GPU is named twice; one worker a GPU")
    return devices


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
