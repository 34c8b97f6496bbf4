"""Which GPUs a worker has: each belongs to one, however many a worker takes."""

from __future__ import annotations

import pytest

from hiddenq import devices
from hiddenq.contracts.errors import UsageError


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: 8)


@pytest.mark.parametrize(
    ("text", "gpus_per_worker", "expected"),
    [
        ("auto", 1, [f"cuda:{index}" for index in range(8)]),
        ("auto", 2, ["cuda:0", "cuda:2", "cuda:4", "cuda:6"]),
        ("cuda", 3, ["cuda:0", "cuda:3"]),
        ("auto", 8, ["cuda:0"]),
        ("cuda:0,cuda:4", 4, ["cuda:0", "cuda:4"]),
        ("cuda:5, cuda:1", 2, ["cuda:5", "cuda:1"]),
        ("cpu", 1, ["cpu"]),
        ("cpu,cpu", 1, ["cpu", "cpu"]),
    ],
)
def test_no_two_workers_share_a_gpu(text: str, gpus_per_worker: int, expected: list[str]) -> None:
    assert devices.resolve_devices(text, gpus_per_worker=gpus_per_worker) == expected


@pytest.mark.parametrize(
    ("text", "gpus_per_worker", "message"),
    [
        ("cuda:0,cuda:1", 2, r"cuda:1 would belong to two workers of 2 GPUs each \(--gpus-per-worker\)"),
        ("cuda:1,cuda:1", 1, "cuda:1 would belong to two workers"),
        ("cuda:7", 2, "cuda:8 is not there; 8 GPUs are visible"),
        ("auto", 9, "--gpus-per-worker 9: 8 GPUs are visible"),
        ("gpu", 1, "'gpu' is no device; expected auto, cpu, cuda or cuda:0,cuda:1"),
    ],
)
def test_a_list_that_cannot_be_is_refused(text: str, gpus_per_worker: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        devices.resolve_devices(text, gpus_per_worker=gpus_per_worker)


def test_without_gpus_auto_is_the_cpu_and_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_cuda_devices", lambda: 0)
    assert devices.resolve_devices("auto", gpus_per_worker=2) == ["cpu"]
    with pytest.raises(UsageError, match="no NVIDIA GPU is visible here; `hiddenq doctor` says why"):
        devices.resolve_devices("cuda")
