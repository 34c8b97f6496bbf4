"""`status` names what is wrong together with the remedy, the worst first. Pure: made values in, problems out."""

from __future__ import annotations

from typing import Any

import pytest

from hiddenq.monitor.embedded import Embedded
from hiddenq.monitor.model import Problem, QueueStatus, RedisStatus, SpoolStatus, WorkerStatus
from hiddenq.monitor.problems import find_problems

GIB = 1 << 30


def worker(device: str = "cuda:0", **fields: Any) -> WorkerStatus:
    return WorkerStatus.model_validate(
        {
            "role": "gpu_worker", "name": device, "target": device, "host": "node1", "pid": 7, "device": device,
            "gpu_name": "", "gpu_uuid": "", "alive": True, "drained": False, "heartbeat_seconds": 1.0,
            "state": "busy", "detail": "", "state_seconds": 5.0, "stalled_seconds": 0.0, "batch_id": None,
            "batch_seconds": None, "num_batches": 3, "num_failures": 0, "num_oom_splits": 0, "num_leases_lost": 0,
            "tokens_per_second": 1000.0, "useful_mfu": None, "padding": None, "memory_used_bytes": None,
            "memory_total_bytes": None, "temperature_celsius": None, "utilization": None, "throttle": "",
            "fast_kernels": None, "attention": "", "metrics_address": None,
        }
        | fields
    )  # fmt: skip


def queue(kind: str, num_waiting: int, **fields: Any) -> QueueStatus:
    made = {"queue": kind, "run": "demo", "spool_id": "s1", "host": "node1", "num_waiting": num_waiting}
    return QueueStatus.model_validate(
        made | {"oldest_seconds": 1.0, "num_started": 0, "num_delayed": 0} | fields,
    )


def spool(**fields: Any) -> SpoolStatus:
    made = {"spool_id": "s1", "host": "node1", "alive": True, "num_files": 1, "num_bytes": GIB, "high_bytes": 10 * GIB}
    return SpoolStatus.model_validate(made | {"disk_free_bytes": 500 * GIB} | fields)


UPLOADER = worker("", role="uploader", state="idle")
EXTRACT = queue("extract", 10)


def found(**fields: Any) -> tuple[Problem, ...]:
    situation: dict[str, Any] = {
        "run": "demo",
        "location": "/data/out of it",
        "state": "live",
        "num_left": 10,
        "num_dead_letters": 0,
        "p99_seconds": 10.0,
        "workers": [worker(), UPLOADER],
        "queues": [EXTRACT],
        "spools": [spool()],
        "redis": RedisStatus(memory_bytes=1, memory_max_bytes=0),
    }
    return find_problems(**(situation | fields))


def test_all_is_well() -> None:
    assert found() == ()


@pytest.mark.parametrize(
    ("situation", "severity", "what", "remedy"),
    [
        ({"redis": RedisStatus(memory_bytes=90, memory_max_bytes=100)}, "critical", "Redis uses", "maxmemory"),
        ({"queues": []}, "critical", "no queue holds any of them", "hiddenq run"),
        ({"workers": [UPLOADER]}, "critical", "no GPU worker is alive", "hiddenq worker"),
        ({"num_dead_letters": 2}, "warning", "2 dead letters", "hiddenq failed list --run demo"),
        (
            {"workers": [worker(state="sick", detail="8 failures in a row"), UPLOADER]},
            "critical",
            "stopped claiming: 8 failures in a row",
            "hiddenq doctor",
        ),
        ({"workers": [worker(stalled_seconds=181.0), UPLOADER]}, "critical", "finished for 3m 01s", "kill pid 7"),
        (
            {"workers": [worker(state="starting", state_seconds=1900.0), UPLOADER]},
            "warning",
            "has been starting for 31m 40s",
            "slow disk",
        ),
        (
            {"workers": [worker(state="waiting", detail="Redis is away"), UPLOADER]},
            "warning",
            "waits: Redis is away",
            "nothing is lost",
        ),
        ({"workers": [worker(fast_kernels=False), UPLOADER]}, "warning", "without the model's fast kernels", "doctor"),
        (
            {"workers": [worker("cuda:0", tokens_per_second=500.0, throttle="hardware_thermal"), worker("cuda:1"),
                         worker("cuda:2"), UPLOADER]},
            "warning",
            "node1 cuda:0: 500.0 tokens/s, 50.0 % of the median, throttled: hardware_thermal",
            "nvidia-smi",
        ),
        (
            {"queues": [EXTRACT, queue("upload", 4)], "workers": [worker()]},
            "critical",
            "4 finished shards left, but no uploader is alive there",
            "hiddenq upload",
        ),
        (
            {"queues": [EXTRACT, queue("upload", 4, oldest_seconds=900.0)]},
            "warning",
            "the oldest shard has waited 15m 00s",
            "--uploaders",
        ),
        ({"spools": [spool(num_bytes=9.5 * GIB)]}, "warning", "the spool holds 9.5 GiB of 10.0 GiB", "bottleneck"),
        ({"spools": [spool(disk_free_bytes=3 * GIB)]}, "warning", "3.0 GiB left on the spool's disk", "free space"),
    ],
)  # fmt: skip
def test_a_problem_is_said_with_its_remedy(situation: dict[str, Any], severity: str, what: str, remedy: str) -> None:
    (problem,) = found(**situation)
    assert problem.severity == severity
    assert what in problem.what
    assert remedy in problem.do


@pytest.mark.parametrize(
    "situation",
    [
        {"workers": [worker(stalled_seconds=179.0), UPLOADER]},
        {"workers": [worker(stalled_seconds=1000.0), UPLOADER], "p99_seconds": 400.0},
        {"workers": [worker("cuda:0", tokens_per_second=650.0), worker("cuda:1"), worker("cuda:2"), UPLOADER]},
        {"workers": [worker("cuda:0", tokens_per_second=5.0, state="idle"), worker("cuda:1"), UPLOADER]},
        {"workers": [worker(alive=False, drained=True), worker("cuda:1"), UPLOADER]},
        {"state": "finished", "workers": [], "queues": []},
        {"num_left": 0, "workers": [worker(alive=False)], "queues": []},
    ],
)
def test_what_only_comes_close_is_not_said(situation: dict[str, Any]) -> None:
    assert found(**situation) == ()


def test_the_worst_comes_first() -> None:
    said = found(num_dead_letters=1, workers=[worker(alive=False, heartbeat_seconds=300.0), UPLOADER])
    assert [problem.severity for problem in said] == ["critical", "critical", "warning"]


def test_dead_letters_of_a_run_with_its_own_redis_are_shown_by_its_location() -> None:
    (problem,) = found(num_dead_letters=1, embedded=Embedded(is_running=True, logs="/logs"))
    assert "`hiddenq failed list --out '/data/out of it'`" in problem.do


def test_a_host_all_of_whose_processes_are_gone_may_be_taken_out() -> None:
    gone = [worker(alive=False, heartbeat_seconds=300.0), worker("cuda:1", host="node2"), UPLOADER]
    (problem,) = found(workers=[*gone[:2], worker("", role="uploader", host="node2")])
    assert "`hiddenq forget node1`, or `hiddenq drain node1`" in problem.do
