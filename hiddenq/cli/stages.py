"""One stage as a service: `produce`, `worker`, `upload`, `monitor`, each against a Redis that others reach, too.

`worker` and `upload` are supervisors: each starts one process a device or uploader and keeps it alive. The hidden
commands `worker-process` and `upload-process` are those processes.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hiddenq import state
from hiddenq.cli import app
from hiddenq.cli.groups import (
    ComputeOptions,
    HostOptions,
    InputOptions,
    QueueOptions,
    StoreOptions,
    UploadOptions,
)
from hiddenq.cli.options import grouped
from hiddenq.cli.run import MoreData, Out, location_name
from hiddenq.supervisor import ProcessSpec, Supervisor, hiddenq_command
from hiddenq.telemetry import configure_logging, logger

PANEL = "One stage, as a service"
GRACE_SECONDS = 600.0
"""As long as a container's stop grace period may be; the stages themselves end when their batch is done."""
SAME_REQUEST_SECONDS = 1.0
"""A second signal within this is the same request: some reach a process by its group and by its parent."""

Run = Annotated[str | None, typer.Option(help="Serve this run; by default the only live one there is.")]
AnyRun = Annotated[bool, typer.Option("--any-run", help="Serve whichever run has work for the model held.")]
ModelHere = Annotated[
    str | None,
    typer.Option(envvar="HIDDENQ_WORKER_MODEL", help="Where the model lies here, if not where its run says."),
]


@app.command(rich_help_panel=PANEL)
@grouped
def produce(
    inputs: InputOptions, out: Out, store: StoreOptions, queue: QueueOptions, more_data: MoreData = None
) -> int:
    """Tokenise a dataset and enqueue its batches; safe to repeat.

    Returns when every batch is enqueued; a queue that is full is waited for.
    """
    import contextlib

    from hiddenq.model_identity import block_torch

    block_torch()
    from hiddenq.delivery import DeliverySettings, Reaper, connect
    from hiddenq.owner import owned
    from hiddenq.produce import produce as produce_run
    from hiddenq.progress import TerminalProgress
    from hiddenq.storage import open_store
    from hiddenq.storage.files import must_take_folder, no_empty_folders

    configure_logging(stage="producer")
    settings = inputs.settings(more_data or [], run_name=location_name(out))
    location = open_store(out, store.settings)
    delivery = DeliverySettings()
    must_take_folder(location.open_local(""))
    with (
        no_empty_folders(location.open_local("")),
        contextlib.closing(connect(queue.redis_url)) as client,
        owned(client, location, settings=delivery, command="hiddenq worker") as check_owner,
        Reaper(client, delivery),
        TerminalProgress() as progress,
    ):
        location.probe()
        report = produce_run(settings, location, store.settings, client, delivery=delivery, progress=progress)
        check_owner()
    logger().info("enqueued", **asdict(report))
    return 0


@app.command(rich_help_panel=PANEL)
@grouped
def worker(
    queue: QueueOptions,
    host: HostOptions,
    compute: ComputeOptions,
    run: Run = None,
    any_run: AnyRun = False,
    model: ModelHere = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> int:
    """Extract: one GPU worker a device, restarted when it dies. Model, layers and location are learnt from the run."""
    from hiddenq.devices import resolve_devices

    configure_logging(stage="gpu_worker")
    arguments = [*compute.arguments(), *host.arguments(), "--spool", str(host.spool or state.default_spool())]
    arguments += ["--run", run] if run else []
    arguments += ["--model", model] if model else []
    arguments += ["--any-run"] * any_run + ["--trust-remote-code"] * trust_remote_code
    return _supervise(
        queue,
        [
            ProcessSpec(
                name=f"worker {device}", command=hiddenq_command("worker-process", "--device", device, *arguments)
            )
            for device in resolve_devices(host.devices, gpus_per_worker=compute.gpus_per_worker)
        ],
    )


@app.command(rich_help_panel=PANEL)
@grouped
def upload(queue: QueueOptions, host: HostOptions, uploads: UploadOptions) -> int:
    """Upload a spool's shards: N uploader processes, restarted when they die."""
    configure_logging(stage="uploader")
    arguments = [*uploads.arguments(), *host.arguments(), "--spool", str(host.spool or state.default_spool())]
    return _supervise(
        queue,
        [
            ProcessSpec(
                name=f"uploader {index}", command=hiddenq_command("upload-process", "--index", str(index), *arguments)
            )
            for index in range(host.uploaders)
        ],
    )


@app.command(rich_help_panel=PANEL)
@grouped
def monitor(
    queue: QueueOptions,
    port: Annotated[
        int, typer.Option(envvar="HIDDENQ_MONITOR_PORT", help="Port of page, metrics and discovery.")
    ] = 9400,
    bind: Annotated[str, typer.Option(envvar="HIDDENQ_MONITOR_BIND", help="Address to listen on.")] = "127.0.0.1",
) -> int:
    """Export the fleet's metrics, serve discovery for Prometheus and a status page; one a fleet."""
    from hiddenq.monitor import MonitorSettings, serve

    configure_logging(stage="monitor")
    return serve(MonitorSettings(redis_url=queue.redis_url, port=port, bind=bind))


@app.command("worker-process", hidden=True)
@grouped
def worker_process(
    compute: ComputeOptions,
    spool: Annotated[Path, typer.Option()],
    device: Annotated[str, typer.Option()] = "cpu",
    run: Run = None,
    any_run: AnyRun = False,
    model: ModelHere = None,
    spool_bytes: Annotated[int | None, typer.Option()] = None,
    metrics_port: Annotated[int, typer.Option()] = 0,
    metrics_bind: Annotated[str, typer.Option()] = "127.0.0.1",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> int:
    """One GPU worker: one device, one process."""
    from gpu_worker import WorkerSettings, serve

    configure_logging(stage="gpu_worker", device=device)
    return serve(
        WorkerSettings(
            run=run,
            any_run=any_run,
            model=model,
            device=device,
            spool=spool,
            spool_high_bytes=spool_bytes,
            metrics_port=metrics_port and metrics_port + int(device.partition(":")[2] or 0),
            metrics_bind=metrics_bind,
            trust_remote_code=trust_remote_code,
            **vars(compute),
        )
    )


@app.command("upload-process", hidden=True)
@grouped
def upload_process(
    uploads: UploadOptions,
    spool: Annotated[Path, typer.Option()],
    index: Annotated[int, typer.Option()] = 0,
    spool_bytes: Annotated[int | None, typer.Option()] = None,
    metrics_port: Annotated[int, typer.Option()] = 0,
    metrics_bind: Annotated[str, typer.Option()] = "127.0.0.1",
) -> int:
    """One uploader of a spool."""
    from uploader import UploaderSettings, serve

    configure_logging(stage="uploader", uploader=index)
    return serve(
        UploaderSettings(
            spool=spool,
            index=index,
            spool_high_bytes=spool_bytes,
            metrics_port=metrics_port and metrics_port + index,
            metrics_bind=metrics_bind,
            **vars(uploads),
        )
    )


class _Stop(BaseException):
    """SIGTERM or SIGINT."""


def _supervise(queue: QueueOptions, specs: list[ProcessSpec]) -> int:
    """Keep a host's processes alive until a signal, or until none is left; then its exit status."""
    from hiddenq.delivery import connect

    if queue.redis_url:
        os.environ[state.REDIS_VARIABLE] = queue.redis_url
    connect().close()  # refused here, in one line, rather than by each child

    asked: float | None = None

    def stop(_number: int, _frame: Any) -> None:
        nonlocal asked
        now = time.monotonic()
        if asked is None or now - asked >= SAME_REQUEST_SECONDS:
            asked = asked or now
            raise _Stop

    supervisor = Supervisor(specs)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        supervisor.start()
        while supervisor.any_left:
            time.sleep(0.5)
            supervisor.poll()
    except _Stop:
        try:
            supervisor.stop(GRACE_SECONDS)
        except _Stop:
            supervisor.stop(10.0)  # a second signal: they hand back and leave at once
        return 0
    if not supervisor.withdrawn:
        return 0
    return 2 if supervisor.only_misconfigured else 1
