"""What NVML says of the worker's GPU: memory, heat, power, throttling, errors; sampled by a thread.

Invariant: a reading never decides whether work is done (a GPU that hangs reads 100 % busy); only one thing here ends
the worker: the device itself is gone. A host without NVML, or a query that a card does not answer, is no error.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hiddenq import telemetry

SAMPLE_SECONDS = 2.0
THROTTLE_REASONS = {
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "sync_boost": 0x10,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""NVML's bits that hold clocks down against the work's interest (idle and user settings left out)."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One look at a GPU; None for what it does not tell."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None
    """0 to 1."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    throttle: tuple[str, ...] = ()
    ecc_uncorrected_errors: int | None = None


class GpuLost(Exception):
    """The device is gone: fell off the bus, or the driver lost it."""


class GpuReader:
    """Asks NVML (`pynvml`, or what speaks like it) about one GPU."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._events = self._watch_xids()

    def read(self) -> GpuReading:
        """One reading.

        Raises:
            GpuLost: the GPU is gone.
        """
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        return GpuReading(
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization=None if rates is None else rates.gpu / 100,
            temperature_celsius=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power_watts=None if power is None else power / 1000,
            throttle=tuple(name for name, bit in THROTTLE_REASONS.items() if reasons & bit),
            ecc_uncorrected_errors=self._ask(
                nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        )

    def next_xid(self, timeout_seconds: float) -> int | None:
        """Wait for an XID event of the GPU; None if none came (or this host can't tell)."""
        if self._events is None:
            return None
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(timeout_seconds * 1000))
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                self._events = None
            return None
        return int(event.eventData)

    @property
    def watches_xids(self) -> bool:
        """Whether `next_xid` waits at all."""
        return self._events is not None

    def _watch_xids(self) -> Any:
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            return None
        return events

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_UNKNOWN):
                raise GpuLost(str(error)) from error
            return None


class GpuSampler:
    """A thread that keeps the newest reading, and tells at once of XIDs and of a GPU that is gone."""

    def __init__(
        self,
        reader: GpuReader,
        *,
        on_reading: Callable[[GpuReading], None],
        on_xid: Callable[[int], None],
        on_lost: Callable[[str], None],
        seconds: float = SAMPLE_SECONDS,
    ) -> None:
        self._reader = reader
        self._on_reading, self._on_xid, self._on_lost = on_reading, on_xid, on_lost
        self._seconds = seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._stopping.set()
        self._thread.join(timeout=2 * self._seconds + 1)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._on_reading(self._reader.read())
            except GpuLost as lost:
                self._on_lost(str(lost))
                return
            if self._reader.watches_xids:
                xid = self._reader.next_xid(self._seconds)
                if xid is not None:
                    self._on_xid(xid)
            else:
                self._stopping.wait(self._seconds)


def open_reader(uuid: str, nvml: Any = None) -> GpuReader | None:
    """NVML's view of a GPU; None where NVML is not there."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    with contextlib.suppress(nvml.NVMLError):
        return GpuReader(nvml, uuid)
    telemetry.logger().warning("nvml_unavailable", gpu=uuid, next="no GPU readings in the metrics")
    return None
