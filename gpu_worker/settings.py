"""What one GPU worker is told: the part of its behaviour that the run itself does not decide.

Invariant: nothing here changes what is stored, only how fast and where; what decides the states is in `run.json`.
Everything is checked before Redis, the store or the model is touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import UsageError

_DEVICE = re.compile(r"^(cpu|cuda:\d+)$")
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


class WorkerSettings(Frozen):
    """Settings of one GPU worker process. Redis's password comes from the environment, never from here."""

    redis_url: str | None = None
    """Redis address; None: `HIDDENQ_REDIS_URL`."""
    run: str | None = None
    """Run id; None: the only live run there is."""
    any_run: bool = False
    """Also take batches of other runs that need the same model."""
    device: str = "cpu"
    """`cpu` or `cuda:N`."""
    spool: Path
    """Folder of the host's spool."""
    spool_high_bytes: int | None = Field(default=None, ge=1)
    """Stop above so many bytes; None: what the spool decides."""
    spool_low_bytes: int | None = Field(default=None, ge=0)
    """Go on below so many bytes."""
    model: str | None = None
    """Where the model lies on this host, if not where `run.json` says."""
    attention: str = "auto"
    """Attention implementation; `auto`: the fastest that the model supports."""
    compile: Literal["auto", "off"] = "auto"
    """`auto`: compile on a GPU where it pays; `off`: never."""
    require_fast_kernels: bool = False
    """Refuse a model whose fast kernels are missing here."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint brings along."""
    gpus_per_worker: int = Field(default=1, ge=1)
    """GPUs that share the model, from `device` on, for one that is too big for a single GPU."""
    cpu_threads: int | None = Field(default=None, ge=1)
    """Threads of torch on the CPU; None: torch's own choice."""
    ring_size: int = Field(default=4, ge=2)
    """Pinned buffers, each as large as the largest shard."""
    num_writers: int = Field(default=3, ge=1)
    """Threads that write shards."""
    fsync: bool = False
    """Force each shard to disk before it is published."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """First port to try for /metrics; 0: none."""
    metrics_bind: str = "127.0.0.1"
    """Address /metrics listens on."""
    max_failures: int = Field(default=5, ge=1)
    """So many failed batches in a row, and the worker stops claiming."""
    cache: Path = Path("~/.cache/hiddenq")
    """Compiled kernels are kept here between starts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _DEVICE.match(self.device):
            raise UsageError(f"--device {self.device}: expected cpu or cuda:N")
        if self.attention not in ATTENTIONS:
            raise UsageError(f"--attention {self.attention}: expected one of {', '.join(ATTENTIONS)}")
        if self.any_run and self.run is not None:
            raise UsageError(f"--any-run: has no effect with --run {self.run}; leave one of them out")
        if self.gpus_per_worker > 1 and self.device == "cpu":
            raise UsageError("--gpus-per-worker: has no effect on the CPU; leave it out or name a GPU")
        return self

    @property
    def on_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.device != "cpu"

    def set_environment(self) -> None:
        """Set what torch, Triton and their caches read from the environment at import. Call before importing torch."""
        cache = self.cache.expanduser()
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
