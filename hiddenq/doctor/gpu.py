"""Each GPU, through NVML: reachable, in a mode that serves, healthy, free.

Invariant: a GPU that can't be queried is named by its index and UUID and never hides the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hiddenq.doctor.driver import Surroundings, check_versions, hand_gpus_in, no_driver, text_of
from hiddenq.doctor.findings import Finding, error, gib, ok, warning

MIN_FREE_SHARE = 0.9
"""A GPU with less free memory is in use by somebody else."""
HARD_THROTTLE = 0x8 | 0x40 | 0x80
"""NVML's clock-event bits for hardware slowdown, thermal and power brake."""


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """One usable GPU."""

    index: int
    total_bytes: int


def check_gpus(nvml: Any, around: Surroundings, *, needed: bool) -> tuple[list[Finding], list[GpuMemory]]:
    """What is wrong with the GPUs, and those that can be used. `nvml` is pynvml, or what stands in for it."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as failure:
        found = no_driver(type(failure).__name__, str(failure), around)
        if not needed and around.kernel_driver is None:
            return [ok("no NVIDIA driver here; the CPU is used")], []
        return [found], []
    with _shut_down(nvml):
        findings = [*check_versions(nvml, around)]
        memories: list[GpuMemory] = []
        count = int(nvml.nvmlDeviceGetCount())
        if count == 0:
            findings.append(
                error("the driver works, but shows no GPU", "there is nothing to run on", hand_gpus_in(around))
            )
        for index in range(count):
            found_here, memory = _check_gpu(nvml, index)
            findings += found_here
            memories += [memory] if memory else []
    return findings, memories


def _check_gpu(nvml: Any, index: int) -> tuple[list[Finding], GpuMemory | None]:
    name = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
        name = f"GPU {index} ({text_of(nvml.nvmlDeviceGetName(handle))}, {uuid})"
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        findings = [*_mode(nvml, handle, index, name), *_health(nvml, handle, index, name)]
        used = _others(nvml, handle)
    except nvml.NVMLError as failure:
        return [
            error(
                f"{name} can't be queried: {type(failure).__name__}: {failure}",
                "it has fallen off the bus or hangs; a worker on it would die again and again",
                "leave it out: CUDA_VISIBLE_DEVICES with the UUIDs of the others (nvidia-smi -L); then "
                f"sudo nvidia-smi --gpu-reset -i {index}, or reboot; sudo dmesg | grep -i xid says more",
            )
        ], None
    if memory.free < MIN_FREE_SHARE * memory.total:
        findings.append(
            warning(
                f"{name}: {gib(memory.total - memory.free)} of {gib(memory.total)} are in use"
                + (f" by process {', '.join(map(str, used))}" if used else ""),
                "the model and its batches need the whole GPU",
                f"nvidia-smi -i {index}; stop what else runs there",
            )
        )
    if not findings:
        findings.append(ok(f"{name}: {gib(memory.total)}, free and healthy"))
    return findings, GpuMemory(index=index, total_bytes=int(memory.total))


def _mode(nvml: Any, handle: Any, index: int, name: str) -> Iterator[Finding]:
    mode = _optional(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        yield error(
            f"{name} is in compute mode PROHIBITED", "nothing may run on it", f"sudo nvidia-smi -i {index} -c DEFAULT"
        )
    elif mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and (others := _others(nvml, handle)):
        yield error(
            f"{name} is in EXCLUSIVE_PROCESS mode, and process {others[0]} has it",
            "a second process is refused: a worker there would die at its start",
            f"stop process {others[0]}, or sudo nvidia-smi -i {index} -c DEFAULT",
        )
    elif mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        yield warning(
            f"{name} is in EXCLUSIVE_PROCESS mode",
            "a restarted worker is refused while its dead predecessor is still being cleaned up",
            f"sudo nvidia-smi -i {index} -c DEFAULT",
        )
    mig = _optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mig and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        yield warning(
            f"{name} is in MIG mode",
            "CUDA sees one slice of it a process, not the GPU",
            f"sudo nvidia-smi -i {index} -mig 0; or name slices: CUDA_VISIBLE_DEVICES=MIG-… (nvidia-smi -L)",
        )


def _health(nvml: Any, handle: Any, index: int, name: str) -> Iterator[Finding]:
    uncorrected = _optional(
        nvml,
        nvml.nvmlDeviceGetTotalEccErrors,
        handle,
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    )
    if uncorrected:
        yield warning(
            f"{name}: {uncorrected} uncorrected memory errors since the driver was loaded",
            "the process that met one was killed; more will follow",
            f"drain this host, then sudo nvidia-smi --gpu-reset -i {index}; if they come back, replace the GPU",
        )
    reasons = _optional(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    if reasons & HARD_THROTTLE:
        yield warning(
            f"{name} is held down by its hardware (throttle reasons {reasons:#x})",
            "it runs at a fraction of its speed, for days if nobody looks",
            f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {index}; look at cooling and power",
        )


def _others(nvml: Any, handle: Any) -> list[int]:
    processes = _optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return [int(process.pid) for process in processes]


def _optional(nvml: Any, question: Any, *arguments: Any) -> Any:
    """An answer that some GPUs don't have; a lost GPU is still an error."""
    try:
        return question(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
        return None


@contextlib.contextmanager
def _shut_down(nvml: Any) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
