"""A stand-in for pynvml: its constants and errors are the real ones, its machine is made up."""

# ruff: noqa: N802  the names are NVML's

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One made-up GPU; `lost` is the error that each question about it raises."""

    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    total_bytes: int = 80 << 30
    free_bytes: int = 79 << 30
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    mig: bool = False
    uncorrected: int = 0
    throttle: int = 0
    pids: list[int] = field(default_factory=list)
    lost: Exception | None = None


class FakeNvml:
    """The questions that the doctor asks, about made-up GPUs."""

    def __init__(
        self, *gpus: FakeGpu, fails: Exception | None = None, driver: str = "580.95.05", cuda: int = 13000
    ) -> None:
        self.gpus, self.fails, self.driver, self.cuda = gpus, fails, driver, cuda
        self.num_open = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDevice"):
            raise AssertionError(f"the doctor asks {name}, which the fake does not know")
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.fails:
            raise self.fails
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self.driver.encode()

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        gpu = self.gpus[index]
        if gpu.lost:
            raise gpu.lost
        return gpu

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(total=gpu.total_bytes, free=gpu.free_bytes)

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        return gpu.compute_mode

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> tuple[int, int]:
        if not gpu.mig:
            raise pynvml.NVMLError_NotSupported()
        return (pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        return gpu.uncorrected

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return gpu.throttle

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]
