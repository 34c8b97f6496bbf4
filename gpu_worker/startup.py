"""From settings and a run's configuration to a worker that is ready for its first batch; no Redis, no queue.

Invariant: when this returns, the model is the run's, proved, compiled if that pays, warmed up, and every buffer exists;
so nothing that can be refused is refused after a batch was claimed. Each part is timed: idle GPUs cost money.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers

from gpu_worker import kernels, warmup
from gpu_worker.decoder import Decoder, find_decoder
from gpu_worker.engine import Engine, Ring
from gpu_worker.experts import implementations
from gpu_worker.extraction import Extractor
from gpu_worker.loading import load_decoder
from gpu_worker.memory import OutOfMemory
from gpu_worker.runs import Host
from gpu_worker.settings import WorkerSettings
from hiddenq import telemetry
from hiddenq.contracts.errors import ModelError, RunMismatch, UsageError
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.model_identity import identify_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class StartTimes:
    """Seconds from the start of the process, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {"imports": process_age_seconds()}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the start."""
        begun = time.monotonic()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - begun

    def rounded(self) -> dict[str, float]:
        """For the log."""
        return {f"{name}_seconds": round(seconds, 2) for name, seconds in self.parts.items()}


@dataclass(kw_only=True)
class Ready:
    """A model on its device with all that a batch needs."""

    decoder: Decoder
    extractor: Extractor
    """Hooks of the first run served."""
    engine: Engine
    ring: Ring
    host: Host
    fast_kernels: bool | None
    """None for a model that has no fast kernels of its own."""
    flops_per_token: float
    ceiling_flops: float
    """Measured matrix rate; 0 on the CPU."""


def make_ready(
    settings: WorkerSettings, config: RunConfig, device: torch.device, *, gpu_name: str, times: StartTimes
) -> Ready:
    """Load, prove, compile, warm up.

    Raises:
        ModelError: the model can't be loaded, is of a kind that is not supported, or lacks required fast kernels.
        RunMismatch: it is another model than the run's.
    """
    on_gpu = device.type == "cuda"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kernels.never_packed()
    shard_format, vocab_size = ShardFormat.of_run(config), config.model.vocab_size
    path = settings.model or config.model.model
    with times.part("weights"):
        _check_identity(path, config, trust_remote_code=settings.trust_remote_code)
        loaded = load_decoder(
            path,
            revision=config.model.revision,
            dtype=DTYPES[config.model.dtype],
            device=settings.device,
            attention=settings.attention,
            target_layer_ids=config.target_layer_ids,
            trust_remote_code=settings.trust_remote_code,
            dequantize=config.model.dequantized,
            num_gpus=settings.gpus_per_worker,
        )
    with times.part("probe"):
        decoder = find_decoder(loaded.model, vocab_size)
        functions = kernels.install_fast_kernels(decoder.model) if on_gpu else {}
        fast = _check_fast_kernels(functions, required=settings.require_fast_kernels)
        mode = warmup.choose_mode(
            decoder,
            shard_format,
            vocab_size=vocab_size,
            attention=loaded.attention,
            may_change_attention=settings.attention == "auto",
        )
        extractor = Extractor(decoder, shard_format, masked=mode.masked)
    compiled = "eager"
    if settings.compile == "auto" and on_gpu and settings.gpus_per_worker == 1:
        with times.part("compile"):
            compiled = warmup.compile_and_check(decoder, extractor, vocab_size=vocab_size)
    with times.part("warm_up"):
        payload_bytes = warmup.largest_payload(config, shard_format)
        try:
            engine = Engine(device, payload_bytes=payload_bytes)
        except OutOfMemory as error:
            raise ModelError(
                f"--model {path}: beside the model there is no room for two payloads of {payload_bytes} bytes; lower "
                "--max-shard-bytes, or spread the model with --gpus-per-worker"
            ) from error
        if on_gpu:
            warmup.warm_up(engine, extractor, config)
        ceiling = warmup.matrix_ceiling(device, DTYPES[config.model.dtype])
    with times.part("buffers"):
        ring = Ring(settings.ring_size, payload_bytes, pinned=on_gpu)
    host = Host(
        device=str(device),
        gpu_name=gpu_name,
        attention=mode.attention,
        masked=mode.masked,
        compiled=compiled,
        kernels=functions | implementations(decoder.model),
        quantization=loaded.quantization,
    )
    return Ready(
        decoder=decoder,
        extractor=extractor,
        engine=engine,
        ring=ring,
        host=host,
        fast_kernels=fast,
        flops_per_token=2.0 * loaded.num_parameters,
        ceiling_flops=ceiling,
    )


def check_device(settings: WorkerSettings) -> torch.device:
    """The device asked for, made the current one.

    Raises:
        UsageError: it is not there.
    """
    if settings.cpu_threads:
        torch.set_num_threads(settings.cpu_threads)
    if not settings.on_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"--device {settings.device}: torch {torch.__version__} sees no GPU; `hiddenq doctor` says why"
        )
    index = int(settings.device.partition(":")[2])
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {settings.device}: there are {torch.cuda.device_count()} GPUs, from cuda:0 on")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def process_age_seconds() -> float:
    """How long ago the kernel started this process."""
    with open("/proc/self/stat", "rb") as file:
        started_ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def _check_identity(path: str, config: RunConfig, *, trust_remote_code: bool) -> None:
    """The model as this host sees it is the run's."""
    model = config.model
    found = identify_model(
        path,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=trust_remote_code,
    ).identity
    for name in ("config_digest", "weights_digest", "quantization"):
        if getattr(found, name) != getattr(model, name):
            raise RunMismatch(
                f"--model {path}: {name} is {getattr(found, name)} here, run {config.run} was made with "
                f"{getattr(model, name)}; it is another model"
            )


def _check_fast_kernels(functions: dict[str, str], *, required: bool) -> bool | None:
    fast = kernels.are_fast(functions)
    if fast is False:
        slow = sorted(name for name, package in functions.items() if package == "torch")
        text = f"fast kernels are missing for {', '.join(slow)}: install flash-linear-attention (or mamba-ssm)"
        if required:
            raise ModelError(f"--require-fast-kernels: {text}")
        telemetry.logger().warning("slow_kernels", detail=text)
    return fast
