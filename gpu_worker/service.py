"""One GPU worker process from start to exit status.

Invariant: nothing is claimed before the model is loaded, proved and warmed up; whatever ends the process, what it holds
is handed back at once or, if that can't be done, by its leases.

    0 told to stop, everything handed over    2 the user's to mend (raised)    70 a stage past its deadline (Consumer)
    71 the device is gone (sticky CUDA error, off the bus): start a new process
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import redis
import torch
from prometheus_client import CollectorRegistry

from gpu_worker.engine import DeviceTime
from gpu_worker.failures import DeviceLost, FailureStreak
from gpu_worker.feed import Feed
from gpu_worker.gpu import GpuSampler, open_reader
from gpu_worker.pipeline import Pipeline
from gpu_worker.report import WorkerStatus
from gpu_worker.run_table import RunTable
from gpu_worker.runs import ServedRun, choose_run, open_location, serve_run
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import Ready, StartTimes, check_device, make_ready, process_age_seconds
from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import UserError
from hiddenq.contracts.messages import BatchJob
from hiddenq.contracts.metrics import GpuWorkerMetrics
from hiddenq.delivery import Consumer, RunRecord, connect, record_self_check, worker_name
from hiddenq.delivery.connection import OUTAGE_SECONDS
from hiddenq.storage import ObjectStore, Spool, SpoolPresence

DEVICE_LOST_STATUS = 71
LOOK_FOR_RUN_SECONDS = 1.0
LOOK_FOR_STOP_SECONDS = 0.2
SLOW_SECONDS = 5.0
"""After which a worker says that it waits for its store."""


def serve(settings: WorkerSettings, *, prepare: Callable[..., Ready] = make_ready) -> int:
    """Run one GPU worker until it is told to stop; returns the exit status.

    `prepare` makes the model ready (a benchmark measures in between).

    Raises:
        UserError: settings, model, run, Redis or store, for the user to mend.
    """
    times = StartTimes()
    device = check_device(settings)
    spool = Spool.open(settings.spool, high_bytes=settings.spool_high_bytes, low_bytes=settings.spool_low_bytes)
    client = connect(settings.redis_url)
    registry = CollectorRegistry()
    uuid, gpu_name = _identify_gpu(device)
    name = worker_name("gpu-worker")
    metrics = GpuWorkerMetrics(registry)
    status = WorkerStatus(metrics, spool, name=name, device=settings.device, gpu_uuid=uuid, gpu_name=gpu_name)
    port = telemetry.serve_metrics(registry, port=settings.metrics_port, address=settings.metrics_bind)
    status.metrics_address = telemetry.advertised_address(settings.metrics_bind, port) if port else None
    telemetry.bind(worker=name, device=settings.device)
    record = _wait_for_run(client, settings, status)
    telemetry.bind(run=record.run)
    status.run = record.run
    status.become("starting", "loading the model")
    queue = names.extract_queue(record.run)
    consumer = Consumer(
        client,
        queue,
        BatchJob,
        name=name,
        settings=record.delivery,
        report=status.report,
        presence=SpoolPresence(spool.folder, spool.spool_id),
        on_stall=lambda claim, _: _drop_reservation(spool, claim.execution),
    )
    status.redis_away = lambda: consumer.redis_away
    consumer.install_signals()
    try:
        consumer.start()
        store = _open_unless_stopped(record, consumer.stopping, status)
        if store is None:
            consumer.close()
            return 0
        ready = prepare(settings, record.config, device, gpu_name=gpu_name, times=times)
        served = serve_run(client, record, store, ready.extractor)
        _announce(status, ready, record)
        telemetry.logger().info(
            "ready", **times.rounded(), total_seconds=round(process_age_seconds(), 2), **ready.host.metadata()
        )
        _work(settings, client, consumer, spool, status, record, ready, served)
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


def _work(
    settings: WorkerSettings,
    client: redis.Redis,
    consumer: Consumer[BatchJob],
    spool: Spool,
    status: WorkerStatus,
    record: RunRecord,
    ready: Ready,
    served: ServedRun,
) -> None:
    """Take batches until told to stop."""
    table = RunTable(client, record, served, ready.extractor, consumer.listen)
    streak = FailureStreak(settings.max_failures)
    feed = Feed(
        consumer,
        spool,
        table.runs,
        ready.host,
        status,
        streak,
        pinned=ready.engine.device.type == "cuda",
        refresh=table.refresh if settings.any_run else lambda: None,
    )
    pipeline = Pipeline(
        consumer,
        spool,
        feed,
        ready.engine,
        ready.ring,
        status,
        streak,
        record_check=lambda run, check: record_self_check(client, run, check),
        num_writers=settings.num_writers,
        fsync=settings.fsync,
    )
    sampler = _watch_gpu(status, pipeline)
    try:
        pipeline.run()
    finally:
        if sampler is not None:
            sampler.close()
        _log_device_time(pipeline.device_time)


def _announce(status: WorkerStatus, ready: Ready, record: RunRecord) -> None:
    """Tell metrics and reports what this worker turned out to be."""
    status.attention, status.fast_kernels = ready.host.attention, ready.fast_kernels
    status.flops_per_token, status.ceiling_flops = ready.flops_per_token, ready.ceiling_flops
    if ready.fast_kernels is not None:
        status.metrics.fast_kernels.set(ready.fast_kernels)
    report = status.report()
    status.metrics.info.labels(
        record.run,
        report.host,
        report.device,
        report.gpu_uuid,
        report.gpu_name,
        record.config.model.model.rstrip("/").rpartition("/")[2],
        report.attention,
        report.spool_id,
    ).set(1)


def _watch_gpu(status: WorkerStatus, pipeline: Pipeline) -> GpuSampler | None:
    uuid = status.report().gpu_uuid
    reader = open_reader(uuid) if uuid else None
    if reader is None:
        return None
    sampler = GpuSampler(
        reader,
        on_reading=status.gpu_reading,
        on_xid=lambda xid: status.metrics.xid_errors.labels(str(xid)).inc(),
        on_lost=lambda why: pipeline.fail(DeviceLost(why)),
    )
    sampler.start()
    return sampler


def _log_device_time(used: DeviceTime) -> None:
    if used.span_seconds:
        telemetry.logger().info(
            "device_time",
            busy_seconds=round(used.busy_seconds, 3),
            span_seconds=round(used.span_seconds, 3),
            busy_ratio=round(used.busy_seconds / used.span_seconds, 4),
        )


def _open_unless_stopped(record: RunRecord, stopping: threading.Event, status: WorkerStatus) -> ObjectStore | None:
    """The run's location, waited for while its store is away; None if the process is to stop first.

    A thread reads, because a request to a store that does not answer can't be interrupted.
    """
    opened: Future[ObjectStore] = Future()

    def read() -> None:
        try:
            opened.set_result(open_location(record, patience_seconds=OUTAGE_SECONDS))
        except BaseException as error:
            opened.set_exception(error)

    threading.Thread(target=read, name="opening", daemon=True).start()
    started = time.monotonic()
    while not wait([opened], timeout=LOOK_FOR_STOP_SECONDS).done:
        if stopping.is_set():
            return None
        if status.state == "starting" and time.monotonic() - started > SLOW_SECONDS:
            status.become("waiting", f"the store does not answer: {record.location}")
    if status.state == "waiting":
        status.become("starting", "loading the model")
    return opened.result()


def _drop_reservation(spool: Spool, execution: str) -> None:
    """Give a stalled execution's bytes back: the process ends without coming by there again."""
    spool.sweep(lambda other: other == execution)


def _identify_gpu(device: torch.device) -> tuple[str, str]:
    if device.type != "cuda":
        return "", ""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}", str(properties.name)


def _wait_for_run(client: redis.Redis, settings: WorkerSettings, status: WorkerStatus) -> RunRecord:
    """The run to serve, as soon as there is one. Nothing is held yet: a signal simply ends the process."""
    waiting = False
    while True:
        record = choose_run(client, settings.run, any_run=settings.any_run)
        if record is not None:
            return record
        status.become("idle", "no run yet")
        if not waiting:
            telemetry.logger().info("no_run_yet", next="waits for one, and for a signal to end")
        waiting = True
        time.sleep(LOOK_FOR_RUN_SECONDS)
