"""What NVML says reaches metrics and reports; a GPU that is gone is told at once; no NVML is no error."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gpu_worker.gpu import GpuLost, GpuReader, GpuReading, GpuSampler, open_reader
from gpu_worker.report import STATES, WorkerStatus
from hiddenq.contracts.metrics import GpuWorkerMetrics
from hiddenq.storage import Spool


class FakeNvmlError(Exception):
    """Like pynvml's."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    """One GPU that answers as told; `broken` maps a question to an error code."""

    NVMLError = FakeNvmlError
    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN = 3, 10, 15, 999
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, broken: dict[str, int] | None = None, xids: list[int] | None = None) -> None:
        self._broken, self._xids = broken or {}, xids or []

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7 << 30, total=80 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93),
            "nvmlDeviceGetPowerUsage": 650_000,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x20,
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlEventSetCreate": "events",
            "nvmlDeviceRegisterEvents": None,
        }

        def answer(*_arguments: object) -> Any:
            if name in self._broken:
                raise FakeNvmlError(self._broken[name])
            if name == "nvmlEventSetWait_v2":
                if not self._xids:
                    raise FakeNvmlError(self.NVML_ERROR_TIMEOUT)
                return SimpleNamespace(eventData=self._xids.pop())
            return answers[name]

        return answer


@pytest.fixture
def status(tmp_path: Path) -> WorkerStatus:
    return WorkerStatus(
        GpuWorkerMetrics(CollectorRegistry()),
        Spool.open(tmp_path / "spool"),
        name="gpu-worker-1",
        device="cuda:0",
        gpu_uuid="GPU-1",
        gpu_name="Test GPU",
        clock=iter(range(0, 10_000, 10)).__next__,
    )


def test_a_reading_holds_what_nvml_says() -> None:
    reading = GpuReader(FakeNvml(), "GPU-1").read()
    assert reading == GpuReading(
        memory_used_bytes=7 << 30,
        memory_total_bytes=80 << 30,
        utilization=0.93,
        temperature_celsius=71,
        power_watts=650.0,
        throttle=("power_cap", "software_thermal"),
        ecc_uncorrected_errors=2,
    )


def test_what_a_card_does_not_answer_is_left_out() -> None:
    broken = {"nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceGetPowerUsage": 3, "nvmlEventSetCreate": 3}
    reader = GpuReader(FakeNvml(broken), "GPU-1")
    assert (reader.read().ecc_uncorrected_errors, reader.read().power_watts) == (None, None)
    assert not reader.watches_xids


@pytest.mark.parametrize("code", [15, 999])
def test_a_gpu_that_is_gone_is_told_apart_from_a_silent_one(code: int) -> None:
    reader = GpuReader(FakeNvml({"nvmlDeviceGetMemoryInfo": code}), "GPU-1")
    with pytest.raises(GpuLost):
        reader.read()


def test_the_sampler_tells_of_readings_xids_and_a_lost_gpu() -> None:
    nvml = FakeNvml(xids=[79])
    told: queue.Queue[tuple[str, object]] = queue.Queue()
    sampler = GpuSampler(
        GpuReader(nvml, "GPU-1"),
        on_reading=lambda reading: told.put(("reading", reading.temperature_celsius)),
        on_xid=lambda xid: told.put(("xid", xid)),
        on_lost=lambda why: told.put(("lost", why)),
        seconds=0.01,
    )
    sampler.start()
    assert told.get(timeout=60) == ("reading", 71)
    assert told.get(timeout=60) == ("xid", 79)
    nvml._broken["nvmlDeviceGetMemoryInfo"] = 15
    while (found := told.get(timeout=60))[0] != "lost":
        assert found[0] == "reading"
    assert found == ("lost", "NVML error 15")
    sampler.close()


def test_a_host_without_nvml_has_no_readings() -> None:
    assert open_reader("GPU-1", FakeNvml({"nvmlInit": 12})) is None


def test_readings_reach_metrics_and_report(status: WorkerStatus) -> None:
    status.gpu_reading(GpuReader(FakeNvml(), "GPU-1").read())
    report = status.report()
    assert (report.memory_used_bytes, report.utilization, report.throttle) == (
        7 << 30,
        0.93,
        "power_cap,software_thermal",
    )
    assert status.metrics.throttled.labels("power_cap")._value.get() == 1
    assert status.metrics.throttled.labels("hardware_thermal")._value.get() == 0


def test_exactly_one_state_is_set(status: WorkerStatus) -> None:
    for state in STATES:
        status.become(state)
        assert [other for other in STATES if status.metrics.state.labels(other)._value.get()] == [state]
        assert status.report().state == state


def test_the_rate_is_tokens_of_the_last_minute(status: WorkerStatus) -> None:
    for _ in range(4):
        status.published(num_samples=2, num_tokens=500, num_padded_tokens=600, num_bytes=1000)
    report = status.report()
    assert (report.num_batches, report.num_samples, report.num_tokens, report.num_padded_tokens) == (4, 8, 2000, 2400)
    assert report.tokens_per_second == pytest.approx(1500 / 40)


def test_a_worker_that_waits_for_redis_says_so(status: WorkerStatus) -> None:
    status.become("busy")
    status.redis_away = lambda: True
    assert (status.report().state, status.report().detail) == ("waiting", "Redis is away")


def test_the_target_is_stable_over_restarts(status: WorkerStatus) -> None:
    assert status.report().target.endswith("-GPU-1")
