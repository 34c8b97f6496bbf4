"""One GPU worker process from start to exit status.

Invariant: nothing is claimed before the model is loaded, proved and warmed up; whatever ends the process, what it holds
is handed back at once or, if that can't be done, by its leases. Start-up is timed by part, since idle GPUs cost money.

    0 told to stop, everything handed over    2 the user's to mend (raised)    70 a stage past its deadline (Consumer)
    71 the device is gone (sticky CUDA error, off the bus): start a new process
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
import torch
from prometheus_client import CollectorRegistry

from gpu_worker import kernels, warmup
from gpu_worker.decoder import Decoder, find_decoder
from gpu_worker.engine import Engine, Ring
from gpu_worker.failures import DeviceLost, FailureStreak
from gpu_worker.feed import Feed
from gpu_worker.gpu import GpuSampler, open_reader
from gpu_worker.loading import LoadedModel, load_decoder
from gpu_worker.pipeline import Pipeline
from gpu_worker.report import WorkerStatus
from gpu_worker.runs import Host, ServedRun, choose_run, open_location, same_model, serve_run
from gpu_worker.settings import WorkerSettings
from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import ModelError, RunMismatch, UsageError, UserError
from hiddenq.contracts.messages import BatchJob
from hiddenq.contracts.metrics import GpuWorkerMetrics
from hiddenq.delivery import Consumer, RunRecord, connect, record_self_check, worker_name
from hiddenq.model_identity import identify_model
from hiddenq.storage import Spool

DEVICE_LOST_STATUS = 71
LOOK_FOR_RUN_SECONDS = 1.0
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


def process_age_seconds() -> float:
    """How long ago the kernel started this process."""
    with open("/proc/self/stat", "rb") as file:
        started_ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def serve(settings: WorkerSettings) -> int:
    """Run one GPU worker until it is told to stop; returns the exit status.

    Raises:
        UserError: settings, model, run, Redis or store, for the user to mend.
    """
    times = StartTimes()
    device = _check_device(settings)
    spool = Spool.open(settings.spool, high_bytes=settings.spool_high_bytes, low_bytes=settings.spool_low_bytes)
    client = connect(settings.redis_url)
    registry = CollectorRegistry()
    uuid, gpu_name = _identify_gpu(device)
    name = worker_name("gpu-worker")
    status = WorkerStatus(
        GpuWorkerMetrics(registry), spool, name=name, device=settings.device, gpu_uuid=uuid, gpu_name=gpu_name
    )
    status.become("starting")
    port = telemetry.serve_metrics(registry, port=settings.metrics_port, address=settings.metrics_bind)
    if port:
        status.metrics_address = f"{settings.metrics_bind}:{port}"
    telemetry.bind(worker=name, device=settings.device)
    record = _wait_for_run(client, settings, status)
    consumer = Consumer(
        client,
        names.extract_queue(record.run),
        BatchJob,
        name=name,
        settings=record.delivery,
        report=status.report,
    )
    status.redis_away = lambda: consumer.redis_away
    status.become("starting", "loading the model")
    consumer.install_signals()
    try:
        consumer.start()
        worker = Worker(settings, client, consumer, spool, status, record, device, times)
        worker.run()
    except DeviceLost as lost:
        telemetry.logger().critical("device_lost", error=str(lost), next=f"exit {DEVICE_LOST_STATUS}")
        consumer.close()
        sys.stderr.flush()
        os._exit(DEVICE_LOST_STATUS)  # a context that is gone can hang the interpreter's own way out
    except UserError:
        consumer.close(withdraw=True)
        raise
    except BaseException:
        consumer.close()
        raise
    consumer.close()
    return 0


class Worker:
    """The model on its device, and the pipeline around it."""

    def __init__(
        self,
        settings: WorkerSettings,
        client: redis.Redis,
        consumer: Consumer[BatchJob],
        spool: Spool,
        status: WorkerStatus,
        record: RunRecord,
        device: torch.device,
        times: StartTimes,
    ) -> None:
        self._settings, self._client, self._consumer, self._spool = settings, client, consumer, spool
        self._status, self._record, self._device, self._times = status, record, device, times
        self._runs: dict[str, ServedRun] = {}
        status.run = record.run
        telemetry.bind(run=record.run)

    def run(self) -> None:
        """Load, prove, warm up, and work until told to stop."""
        config = self._record.config
        store = open_location(self._record)
        with self._times.part("weights"):
            loaded, decoder = self._load(self._record)
        with self._times.part("probe"):
            functions = kernels.install_fast_kernels(decoder.model) if self._device.type == "cuda" else {}
            self._status.fast_kernels = self._check_fast_kernels(functions)
            first = serve_run(self._client, self._record, store, decoder, masked=False)
            mode = warmup.choose_mode(
                decoder,
                first.shard_format,
                vocab_size=config.model.vocab_size,
                attention=loaded.attention,
                may_change_attention=self._settings.attention == "auto",
            )
            first.extractor.masked = mode.masked
        compiled = "eager"
        if self._settings.compile == "auto" and self._device.type == "cuda" and self._settings.gpus_per_worker == 1:
            with self._times.part("compile"):
                compiled = warmup.compile_and_check(decoder, first.extractor, vocab_size=config.model.vocab_size)
        with self._times.part("warm_up"):
            payload_bytes = warmup.largest_payload(config, first.shard_format)
            engine = Engine(decoder.device, payload_bytes=payload_bytes)
            if self._device.type == "cuda":
                warmup.warm_up(engine, first.extractor, config)
            self._status.ceiling_flops = warmup.matrix_ceiling(decoder.device, DTYPES[config.model.dtype])
        with self._times.part("buffers"):
            ring = Ring(self._settings.ring_size, payload_bytes, pinned=self._device.type == "cuda")
        self._status.flops_per_token = 2.0 * loaded.num_parameters
        self._status.attention = mode.attention
        host = Host(
            device=str(self._device),
            gpu_name=self._status.report().gpu_name,
            attention=mode.attention,
            masked=mode.masked,
            compiled=compiled,
            kernels=functions,
            quantization=loaded.quantization,
        )
        self._announce(config.model.model, mode.attention)
        self._listen([first])
        telemetry.logger().info(
            "ready", **self._times.rounded(), total_seconds=round(process_age_seconds(), 2), **host.metadata()
        )
        self._work(engine, ring, host, decoder)

    def _load(self, record: RunRecord) -> tuple[LoadedModel, Decoder]:
        model, settings = record.config.model, self._settings
        kernels.never_packed()
        path = settings.model or model.model
        self._check_model(path, record)
        loaded = load_decoder(
            path,
            revision=model.revision,
            dtype=DTYPES[model.dtype],
            device=settings.device,
            attention=settings.attention,
            target_layer_ids=record.config.target_layer_ids,
            trust_remote_code=settings.trust_remote_code,
            dequantize=settings.dequantize,
            num_gpus=settings.gpus_per_worker,
        )
        return loaded, find_decoder(loaded.model, model.vocab_size)

    def _check_model(self, path: str, record: RunRecord) -> None:
        """The model as this host sees it is the run's."""
        model = record.config.model
        found = identify_model(
            path, revision=model.revision, dtype=model.dtype, trust_remote_code=self._settings.trust_remote_code
        ).identity
        for name in ("config_digest", "weights_digest", "quantization"):
            if getattr(found, name) != getattr(model, name):
                raise RunMismatch(
                    f"--model {path}: {name} is {getattr(found, name)} here, run {record.run} was made with "
                    f"{getattr(model, name)}; it is another model"
                )

    def _check_fast_kernels(self, functions: dict[str, str]) -> bool | None:
        fast = kernels.are_fast(functions)
        if fast is not None:
            self._status.metrics.fast_kernels.set(fast)
        if fast is False:
            slow = sorted(name for name, package in functions.items() if package == "torch")
            text = f"fast kernels are missing for {', '.join(slow)}: install flash-linear-attention (or mamba-ssm)"
            if self._settings.require_fast_kernels:
                raise ModelError(f"--require-fast-kernels: {text}")
            telemetry.logger().warning("slow_kernels", detail=text)
        return fast

    def _announce(self, model: str, attention: str) -> None:
        report = self._status.report()
        self._status.metrics.info.labels(
            report.run, report.host, report.device, report.gpu_uuid, report.gpu_name, model, attention, report.spool_id
        ).set(1)

    def _listen(self, runs: list[ServedRun]) -> None:
        self._runs.update({run.config.run: run for run in runs})
        self._consumer.listen([names.extract_queue(run) for run in self._runs])

    def _work(self, engine: Engine, ring: Ring, host: Host, decoder: Decoder) -> None:
        streak = FailureStreak(self._settings.max_failures)

        def refresh() -> None:
            known = same_model(self._client, self._record) if self._settings.any_run else []
            new = [record for record in known if record.run not in self._runs]
            if new:
                self._listen(
                    [
                        serve_run(self._client, record, open_location(record), decoder, masked=host.masked)
                        for record in new
                    ]
                )

        feed = Feed(
            self._consumer,
            self._spool,
            self._runs,
            host,
            self._status,
            streak,
            pinned=self._device.type == "cuda",
            refresh=refresh,
        )
        pipeline = Pipeline(
            self._consumer,
            self._spool,
            feed,
            engine,
            ring,
            self._status,
            streak,
            record_check=lambda run, check: record_self_check(self._client, run, check),
            num_writers=self._settings.num_writers,
            fsync=self._settings.fsync,
        )
        reader = open_reader(self._status.report().gpu_uuid) if self._device.type == "cuda" else None
        sampler = None
        if reader is not None:
            sampler = GpuSampler(
                reader,
                on_reading=self._status.gpu_reading,
                on_xid=lambda xid: self._status.metrics.xid_errors.labels(str(xid)).inc(),
                on_lost=lambda why: pipeline.fail(DeviceLost(why)),
            )
            sampler.start()
        try:
            pipeline.run()
        finally:
            if sampler is not None:
                sampler.close()
            time_used = pipeline.device_time
            if time_used.span_seconds:
                telemetry.logger().info(
                    "device_time",
                    busy_seconds=round(time_used.busy_seconds, 3),
                    span_seconds=round(time_used.span_seconds, 3),
                    busy_ratio=round(time_used.busy_seconds / time_used.span_seconds, 4),
                )


def _check_device(settings: WorkerSettings) -> torch.device:
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
        raise UsageError(f"--device {settings.device}: there are {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _identify_gpu(device: torch.device) -> tuple[str, str]:
    if device.type != "cuda":
        return "", ""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}", str(properties.name)


def _wait_for_run(client: redis.Redis, settings: WorkerSettings, status: WorkerStatus) -> RunRecord:
    """The run to serve, as soon as there is one. Nothing is held yet: a signal simply ends the process."""
    while True:
        record = choose_run(client, settings.run, any_run=settings.any_run)
        if record is not None:
            return record
        status.become("idle", "no run yet")
        time.sleep(LOOK_FOR_RUN_SECONDS)
