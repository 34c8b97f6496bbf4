"""Which checks a role needs, and their findings together.

Invariant: one check never hides another: whatever it stumbles over becomes a finding of its own, and the rest go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import HiddenqError
from hiddenq.contracts.run import RunConfig
from hiddenq.delivery.connection import connect
from hiddenq.doctor.driver import Surroundings
from hiddenq.doctor.findings import Finding, error
from hiddenq.doctor.gpu import check_gpus
from hiddenq.doctor.host import check_cache, check_shared_memory, check_spool
from hiddenq.doctor.location import check_location, run_config
from hiddenq.doctor.model import check_named_model
from hiddenq.doctor.queue import check_queue
from hiddenq.storage import StoreSettings, open_store

Role = Literal["all", "produce", "worker", "upload", "monitor"]
DEFAULT_SHARD_BYTES = 1 << 30


class DoctorSettings(Frozen):
    """What is about to be used; None leaves a check out."""

    role: Role = "all"
    """`all` for a machine that does everything itself."""
    devices: str = "auto"
    """As `--devices`: with `cpu`, a missing GPU is no fault."""
    redis_url: str | None = None
    spool: Path | None = None
    location: str | None = None
    """Output location; a worker learns it from Redis instead."""
    store: StoreSettings = StoreSettings()
    model: str | None = None
    """Folder (or hub id) of the target model on this machine; None for the one that the run names."""
    gpus_per_worker: int = 1

    @property
    def uses_gpus(self) -> bool:
        """Whether this role computes, and not on the CPU."""
        return self.role in ("all", "worker") and self.devices != "cpu"


def diagnose(settings: DoctorSettings, *, nvml: Any = None, around: Surroundings | None = None) -> list[Finding]:
    """Look at everything the role needs; `nvml` stands in for pynvml in tests."""
    return list(_findings(settings, nvml, around))


def _findings(settings: DoctorSettings, nvml: Any, around: Surroundings | None) -> Iterator[Finding]:
    gpu_bytes: list[int] = []

    def gpus() -> list[Finding]:
        found, memories = check_gpus(
            nvml or import_module("pynvml"), around or Surroundings.look(), needed=settings.devices != "auto"
        )
        gpu_bytes.extend(memory.total_bytes for memory in memories)
        return found

    run = _run(settings)
    if settings.uses_gpus:
        yield from _guarded("GPUs", gpus)
        yield from _guarded("caches", lambda: [check_cache(cache_folder()), check_shared_memory()])
    model = settings.model or _model_of(run, settings.role)
    spool, url, location = settings.spool, settings.redis_url, settings.location
    if model:
        yield from _guarded(
            "model", lambda: check_named_model(model, gpu_bytes, gpus_per_worker=settings.gpus_per_worker, run=run)
        )
    if spool:
        shard_bytes = run.max_shard_bytes if run else DEFAULT_SHARD_BYTES
        yield from _guarded("spool", lambda: check_spool(spool, max_shard_bytes=shard_bytes))
    if url:
        yield from _guarded("Redis", lambda: check_queue(url))
    if location:
        yield from _guarded("store", lambda: check_location(location, settings.store))


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except ModuleNotFoundError as missing:
        yield error(
            f"{missing.name} is not installed",
            f"{name} can't be looked at, nor used",
            "pip install -c constraints.txt 'hiddenq[local]'",
        )
    except Exception as fault:
        yield error(
            f"the check of {name} failed: {type(fault).__name__}: {fault}",
            "whether it is well is not known",
            "look at it by hand; and report this: a check should not fail",
        )


def _run(settings: DoctorSettings) -> RunConfig | None:
    """The run these settings lead to, if it is there and can be read; its own check says why if not."""
    try:
        if settings.location:
            return run_config(open_store(settings.location, settings.store))
        if settings.redis_url and settings.role in ("worker", "upload"):
            from hiddenq.delivery import list_runs

            with connect(settings.redis_url, wait_seconds=1.0) as client:
                runs = list_runs(client)
            return max((record.config for record in runs), key=lambda config: config.max_shard_bytes, default=None)
    except (HiddenqError, OSError):
        return None
    return None


def _model_of(run: RunConfig | None, role: Role) -> str | None:
    """The folder that the run names, if it is here, for who loads it; what else it names is found out by the load."""
    if run is None or role not in ("all", "worker"):
        return None
    return run.model.model if Path(run.model.model).expanduser().is_dir() else None


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or "~/.cache/hiddenq").expanduser()
