"""The catalogue: names, units and labels as Prometheus's own linter wants them, and no label without bound."""

from __future__ import annotations

import math
import subprocess

from prometheus_client import CollectorRegistry, generate_latest

from hiddenq.contracts.metrics import MONITOR_FAMILIES, GpuWorkerMetrics, MonitorMetrics, UploaderMetrics
from tests.grafana.programs import program
from tests.monitor.filled import fill

BOUNDED = {
    "attention", "device", "error", "gpu_name", "gpu_uuid", "host", "index", "model", "queue", "reason", "result",
    "role", "run", "spool_id", "stage", "state", "target", "version", "xid",
}  # fmt: skip


def every_metric() -> CollectorRegistry:
    registry = CollectorRegistry()
    fill(GpuWorkerMetrics(registry))
    fill(UploaderMetrics(registry))
    MonitorMetrics(registry).replace((one.name, tuple("x" for _ in one.labels), 1.0) for one in MONITOR_FAMILIES)
    return registry


def test_promtool_finds_nothing_to_say_of_names_units_and_helps() -> None:
    text = generate_latest(every_metric())
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_names_say_the_stage_and_labels_are_bounded() -> None:
    for family in every_metric().collect():
        assert family.name.startswith(("hiddenq_gpu_worker_", "hiddenq_uploader_", "hiddenq_monitor_")), family.name
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} <= BOUNDED, family.name


def test_what_nobody_measured_is_not_a_zero() -> None:
    """A host without NVML has no memory of 0 bytes, and a model without fast kernels has none that are missing."""
    registry = CollectorRegistry()
    GpuWorkerMetrics(registry)
    for name in ("fast_kernels", "memory_used_bytes", "temperature_celsius", "ecc_uncorrected_errors"):
        value = registry.get_sample_value(f"hiddenq_gpu_worker_{name}")
        assert value is not None
        assert math.isnan(value), name


def test_a_scrape_sees_one_moment_and_what_has_left_leaves() -> None:
    registry = CollectorRegistry()
    metrics = MonitorMetrics(registry)
    metrics.replace([("dead_letters", ("a",), 1.0), ("dead_letters", ("b",), 2.0)])
    assert registry.get_sample_value("hiddenq_monitor_dead_letters", {"run": "b"}) == 2
    metrics.replace([("dead_letters", ("a",), 1.0)])
    assert registry.get_sample_value("hiddenq_monitor_dead_letters", {"run": "b"}) is None
