"""The NVIDIA driver and the container toolkit: why there is no GPU, and whether torch fits the driver.

Invariant: which library call failed decides the remedy, since "no GPU" has five causes with five different repairs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from hiddenq.doctor.findings import Finding, error, ok


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What NVML can't say about itself."""

    kernel_driver: str | None
    """Version of the loaded kernel module; None if none is."""
    in_container: bool
    torch_cuda: str | None
    """CUDA version torch is built for; None for a build without CUDA."""
    torch_version: str | None
    """None if torch is not installed."""

    @classmethod
    def look(cls, root: Path = Path("/")) -> Surroundings:
        """Of this machine."""
        torch_version, torch_cuda = _torch_build()
        return cls(
            kernel_driver=_kernel_driver(root),
            in_container=(root / ".dockerenv").exists() or (root / "run/.containerenv").exists(),
            torch_cuda=torch_cuda,
            torch_version=torch_version,
        )


def no_driver(failure: str, text: str, around: Surroundings) -> Finding:
    """The finding for an NVML that doesn't start, by the name of its error."""
    if "LibRmVersionMismatch" in failure or "mismatch" in text.lower():
        return error(
            f"driver and library differ in version (kernel module {around.kernel_driver or 'unknown'})",
            "an update replaced the library under a loaded module; running work goes on, every new start fails",
            "sudo reboot (or, with no GPU in use: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && "
            "sudo modprobe nvidia); then pin it: sudo apt-mark hold 'nvidia-driver-*'",
        )
    if "LibraryNotFound" in failure and around.kernel_driver and around.in_container:
        return error(
            f"the host has driver {around.kernel_driver}, this container got no library of it",
            "the NVIDIA container toolkit is missing, or this container was started without GPUs",
            "on the host: sudo apt-get install nvidia-container-toolkit && sudo nvidia-ctk runtime configure "
            "--runtime=docker && sudo systemctl restart docker; and the service needs a `devices` reservation with "
            "`capabilities: [gpu]`",
        )
    if "LibraryNotFound" in failure:
        return error(
            "no NVIDIA driver is installed" if around.kernel_driver is None else "the driver's library is missing",
            "without it no GPU can be used",
            f"{hand_gpus_in(around)}; or --devices cpu",
        )
    if "DriverNotLoaded" in failure:
        return error(
            "the NVIDIA driver is installed but not loaded",
            "no GPU can be used until it is",
            "sudo modprobe nvidia; if it refuses, sudo dmesg | grep -i nvrm says why (secure boot, a new kernel "
            "without its module: sudo dkms autoinstall)",
        )
    if "NoPermission" in failure:
        return error(
            "this user may not open the GPUs",
            "the device files belong to somebody else",
            "ls -l /dev/nvidia*; sudo usermod -aG video,render $USER, and log in again",
        )
    return error(f"NVML does not start: {failure}: {text}", "no GPU can be used", "nvidia-smi, and what it says")


def check_versions(nvml: Any, around: Surroundings) -> Iterator[Finding]:
    """Driver against kernel module, and torch against driver; NVML is running."""
    driver = text_of(nvml.nvmlSystemGetDriverVersion())
    number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    supported = (number // 1000, number % 1000 // 10)
    if around.kernel_driver and around.kernel_driver != driver:
        yield error(
            f"kernel module {around.kernel_driver}, library {driver}",
            "new starts fail as soon as the difference matters",
            "sudo reboot, so that both are the same",
        )
    if around.torch_version is None:
        yield error(
            "torch is not installed", "the GPU worker needs it", "pip install -c constraints.txt 'hiddenq[gpu]'"
        )
    elif around.torch_cuda is None:
        yield error(
            f"torch {around.torch_version} is a build for the CPU, and this machine has GPUs",
            "the GPUs would stay idle",
            "pip install --force-reinstall torch (a build with CUDA)",
        )
    elif int(around.torch_cuda.split(".")[0]) > supported[0]:
        yield error(
            f"torch is built for CUDA {around.torch_cuda}, driver {driver} goes up to {supported[0]}.{supported[1]}",
            "CUDA does not start across a major version",
            f"install a driver for CUDA {around.torch_cuda.split('.')[0]}, or a torch for CUDA {supported[0]}",
        )
    else:
        yield ok(f"driver {driver} (CUDA {supported[0]}.{supported[1]}), torch for CUDA {around.torch_cuda}")


def hand_gpus_in(around: Surroundings) -> str:
    """How GPUs get here."""
    if around.in_container:
        return "start the container with GPUs (compose: a `devices` reservation with `capabilities: [gpu]`)"
    return "install NVIDIA's driver (Debian, Ubuntu: sudo apt-get install nvidia-driver), reboot, and see nvidia-smi"


def text_of(value: str | bytes) -> str:
    """Text of what NVML returns: bytes in old bindings, text in new ones."""
    return value.decode() if isinstance(value, bytes) else value


def _kernel_driver(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else "unknown"


def _torch_build() -> tuple[str | None, str | None]:
    """Version of torch and of its CUDA, from its files, without importing it."""
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return None, None
    with contextlib.suppress(OSError):
        match = re.search(r"^cuda.*?=\s*'([\d.]+)'", Path(str(torch.locate_file("torch/version.py"))).read_text(), re.M)
        return torch.version, match[1] if match else None
    return torch.version, None
