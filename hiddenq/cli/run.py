"""`hiddenq run` and `hiddenq plan`: a whole dataset on this machine, and what it would take."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hiddenq.cli import app
from hiddenq.cli.groups import (
    MODEL_PANEL,
    ComputeOptions,
    HostOptions,
    InputOptions,
    QueueOptions,
    StoreOptions,
)
from hiddenq.cli.options import grouped

if TYPE_CHECKING:
    from hiddenq.contracts.run import ModelIdentity
    from producer.outlook import Rate

TEST_SAMPLES = 100
RATE_PANEL = "Rate"

Out = Annotated[str, typer.Option(help="Output location: a folder or s3://bucket/prefix.")]
MoreData = Annotated[list[str] | None, typer.Argument(metavar="FILE", help="More files for --data.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(rich_help_panel="Everything on this machine")
@grouped
def run(
    inputs: InputOptions,
    out: Out,
    store: StoreOptions,
    queue: QueueOptions,
    host: HostOptions,
    compute: ComputeOptions,
    more_data: MoreData = None,
    test: Annotated[
        bool,
        typer.Option("--test", help=f"Only the first {TEST_SAMPLES} rows, into OUT-test, before a long run."),
    ] = False,
    target_head: Annotated[
        bool,
        typer.Option(
            "--target-head",
            help="Also write the target's embedding, final norm and lm_head.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = False,
) -> int:
    """Extract the states of a whole dataset on this machine; type it again to resume.

    Starts an embedded Redis (unless --redis-url names one), a producer, one GPU worker a device and uploaders; ends
    when every batch is in the store, its checksum confirmed there.
    """
    from hiddenq import local
    from hiddenq.devices import resolve_devices
    from hiddenq.telemetry import configure_logging

    configure_logging(default_level="WARNING")
    if test:
        out = out.rstrip("/") + "-test"
    producer_settings = inputs.settings(more_data or [], run_name=location_name(out))
    if test:
        producer_settings = producer_settings.model_copy(
            update={"limit": min(inputs.limit or TEST_SAMPLES, TEST_SAMPLES)}
        )
    devices = tuple(resolve_devices(host.devices, gpus_per_worker=compute.gpus_per_worker))
    if host.devices == "auto" and devices == ("cpu",):
        typer.echo("no NVIDIA GPU is visible here: the CPU computes (`hiddenq doctor` says why)")
    return local.run(
        local.RunSettings(
            producer=producer_settings,
            out=out,
            store=store.settings,
            devices=devices,
            num_uploaders=host.uploaders,
            spool=host.spool,
            redis_url=queue.redis_url,
            worker_arguments=(*compute.arguments(), *["--trust-remote-code"] * inputs.trust_remote_code),
            host_arguments=host.arguments(),
            target_head=target_head,
        )
    )


@app.command(rich_help_panel="Everything on this machine")
@grouped
def plan(
    inputs: InputOptions,
    store: StoreOptions,
    out: Annotated[str | None, typer.Option(help="Output location: is there room?")] = None,
    spool: Annotated[
        Path | None,
        typer.Option(help="Spool folder: is there room? By default the one of --out."),
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Rate of all GPUs together, to say hours.", rich_help_panel=RATE_PANEL)
    ] = None,
    rate_from: Annotated[
        str | None,
        typer.Option(
            help="Location of a run of this model, finished or not, whose measured rate to take (`run --test` makes "
            "one); by default --out, if a run is there.",
            rich_help_panel=RATE_PANEL,
        ),
    ] = None,
    json: Json = False,
    more_data: MoreData = None,
) -> int:
    """Say what a run would take, without a GPU and without writing anything.

    Rows kept and rejected by reason, lengths, batches, padding, bytes by choice of layers, hours at a given or measured
    rate, room of spool and output.
    """
    from hiddenq.model_identity import block_torch

    block_torch()
    from hiddenq import state
    from hiddenq.contracts.errors import RetryableError, UsageError, UserError
    from hiddenq.progress import TerminalProgress
    from hiddenq.storage import open_store
    from hiddenq.telemetry import configure_logging
    from producer import plan as plan_run
    from producer.outlook import given_rate, measured_rate

    configure_logging(default_level="WARNING")
    if tokens_per_second is not None and rate_from is not None:
        raise UsageError("--tokens-per-second and --rate-from: one of them is enough")
    location = open_store(out, store.settings) if out is not None else None

    def find_rate(model: ModelIdentity) -> Rate | None:
        if tokens_per_second is not None:
            return given_rate(tokens_per_second)
        if rate_from is not None:
            return measured_rate(open_store(rate_from, store.settings), model)
        with contextlib.suppress(UserError, RetryableError):  # nobody asked for the rate of what may lie there
            return measured_rate(location, model) if location is not None else None
        return None

    with TerminalProgress() as progress:
        report = plan_run(
            inputs.settings(more_data or [], run_name="plan"),
            progress,
            find_rate=find_rate,
            output=out,
            spool=spool or (state.state_folder(location) / "spool" if location is not None else None),
        )
    if json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Console().print(report)
    return 0


def location_name(out: str) -> str:
    """The last part of an output location, which names its run."""
    return out.rstrip("/").rsplit("/", 1)[-1]
