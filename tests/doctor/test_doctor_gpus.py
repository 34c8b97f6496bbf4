"""Promises of the doctor about driver and GPUs: the cause is named, and the command that mends it, for each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from hiddenq.doctor import DoctorSettings, Finding, diagnose, exit_status, render
from hiddenq.doctor.driver import Surroundings
from hiddenq.doctor.gpu import check_gpus
from tests.doctor.fake_nvml import FakeGpu, FakeNvml

HEALTHY = Surroundings(kernel_driver="580.95.05", in_container=False, torch_cuda="13.0", torch_version="2.13.0")
IN_CONTAINER = replace(HEALTHY, in_container=True)
BARE = replace(HEALTHY, kernel_driver=None)


def look(nvml: FakeNvml, around: Surroundings = HEALTHY, *, needed: bool = True) -> list[Finding]:
    findings, _ = check_gpus(nvml, around, needed=needed)
    assert nvml.num_open == 0, "NVML was left open"
    for finding in findings:
        assert finding.level == "ok" or (finding.why and finding.remedy), finding
    return findings


def only(findings: list[Finding], level: str) -> Finding:
    (found,) = [finding for finding in findings if finding.level == level]
    return found


def test_healthy_gpus_are_all_well() -> None:
    findings = look(FakeNvml(FakeGpu(), FakeGpu(uuid="GPU-1")))
    assert [finding.level for finding in findings] == ["ok", "ok", "ok"]
    assert exit_status(findings) == 0


@pytest.mark.parametrize(
    ("fails", "around", "what", "remedy"),
    [
        (pynvml.NVMLError_LibRmVersionMismatch(), HEALTHY, "differ in version", "sudo reboot"),
        (pynvml.NVMLError_LibraryNotFound(), IN_CONTAINER, "this container got no library", "nvidia-container-toolkit"),
        (pynvml.NVMLError_LibraryNotFound(), BARE, "no NVIDIA driver is installed", "apt-get install nvidia-driver"),
        (pynvml.NVMLError_DriverNotLoaded(), BARE, "not loaded", "sudo modprobe nvidia"),
        (pynvml.NVMLError_NoPermission(), HEALTHY, "may not open", "usermod"),
        (pynvml.NVMLError_Unknown(), HEALTHY, "NVML does not start", "nvidia-smi"),
    ],
)
def test_no_gpu_has_its_cause_and_its_own_repair(
    fails: Exception, around: Surroundings, what: str, remedy: str
) -> None:
    finding = only(look(FakeNvml(fails=fails), around), "error")
    assert what in finding.what
    assert remedy in finding.remedy


def test_no_driver_is_no_fault_where_the_cpu_will_do() -> None:
    (finding,) = look(FakeNvml(fails=pynvml.NVMLError_LibraryNotFound()), BARE, needed=False)
    assert finding.level == "ok"


def test_a_lost_gpu_is_named_and_does_not_hide_the_others() -> None:
    lost = FakeGpu(lost=pynvml.NVMLError_GpuIsLost())
    findings, memories = check_gpus(FakeNvml(FakeGpu(), lost, FakeGpu()), HEALTHY, needed=True)
    finding = only(findings, "error")
    assert "GPU 1 can't be queried: NVMLError_GpuIsLost" in finding.what
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy
    assert [memory.index for memory in memories] == [0, 2]


@pytest.mark.parametrize(
    ("gpu", "level", "what", "remedy"),
    [
        (FakeGpu(compute_mode=pynvml.NVML_COMPUTEMODE_PROHIBITED), "error", "PROHIBITED", "-i 0 -c DEFAULT"),
        (
            FakeGpu(compute_mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, pids=[77]),
            "error",
            "EXCLUSIVE_PROCESS mode, and process 77",
            "stop process 77",
        ),
        (FakeGpu(compute_mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS), "warning", "EXCLUSIVE", "-c DEFAULT"),
        (FakeGpu(mig=True), "warning", "MIG mode", "-mig 0"),
        (FakeGpu(uncorrected=3), "warning", "3 uncorrected memory errors", "--gpu-reset"),
        (FakeGpu(throttle=0x40), "warning", "held down by its hardware", "PERFORMANCE,TEMPERATURE"),
        (FakeGpu(free_bytes=20 << 30, pids=[5, 6]), "warning", "in use by process 5, 6", "stop what else runs"),
    ],
)
def test_a_gpu_that_will_not_serve_is_found_before_the_start(gpu: FakeGpu, level: str, what: str, remedy: str) -> None:
    finding = only(look(FakeNvml(gpu)), level)
    assert what in finding.what
    assert gpu.uuid in finding.what
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("around", "cuda", "what"),
    [
        (
            replace(HEALTHY, torch_cuda=None, torch_version="2.13.0+cpu"),
            13000,
            "torch 2.13.0+cpu is a build for the CPU",
        ),
        (HEALTHY, 12040, "torch is built for CUDA 13.0, driver 580.95.05 goes up to 12.4"),
        (replace(HEALTHY, kernel_driver="570.1.1"), 13000, "kernel module 570.1.1, library 580.95.05"),
    ],
)
def test_a_driver_that_torch_can_not_use_is_an_error(around: Surroundings, cuda: int, what: str) -> None:
    assert what in only(look(FakeNvml(FakeGpu(), cuda=cuda), around), "error").what


def test_the_kernel_modules_version_is_read_from_where_the_module_says_it(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"
    )
    (tmp_path / ".dockerenv").touch()
    around = Surroundings.look(tmp_path)
    assert (around.kernel_driver, around.in_container) == ("580.95.05", True)


def test_a_check_that_stumbles_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    broken = FakeNvml(FakeGpu(lost=RuntimeError("no such thing")))
    findings = diagnose(DoctorSettings(role="worker", spool=tmp_path), nvml=broken, around=HEALTHY)
    assert "the check of GPUs failed: RuntimeError: no such thing" in [finding.what for finding in findings]
    assert any(finding.what.startswith(f"spool {tmp_path}") for finding in findings)
    assert exit_status(findings) == 2


def test_what_is_shown_puts_errors_first_with_reason_and_remedy() -> None:
    text = render(look(FakeNvml(FakeGpu(mig=True), FakeGpu(lost=pynvml.NVMLError_GpuIsLost()))))
    lines = text.splitlines()
    assert lines[0].startswith("error    GPU 1")
    assert lines[1].strip().startswith("why:")
    assert lines[2].strip().startswith("do:")
    assert lines[-1] == "1 error, 1 warning, 1 thing well"
