"""Looking at a run: `status`, `failed`, `verify`, `doctor`."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import orjson
import redis
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from hiddenq import state
from hiddenq.cli import app
from hiddenq.cli.groups import QueueOptions, StoreOptions
from hiddenq.cli.options import grouped
from hiddenq.cli.run import Json
from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.wording import counted

if TYPE_CHECKING:
    from hiddenq.monitor import RunStatus
    from hiddenq.storage import ObjectStore

PANEL = "Looking at a run"
WATCH_SECONDS = 1.0
LIST_LIMIT = 100

failed = typer.Typer(help="Batches set aside after their last attempt.", no_args_is_help=True)
app.add_typer(failed, name="failed", rich_help_panel=PANEL)

OutOption = Annotated[str | None, typer.Option(help="Output location of the run.")]
Batches = Annotated[list[str] | None, typer.Argument(metavar="BATCH", help="Batch ids; all by default.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which run is meant: by `--out` (a local run's Redis is found by it alone) or by `--run`."""

    out: OutOption = None
    run: Annotated[str | None, typer.Option(help="Run id, where a Redis holds several.")] = None


@contextlib.contextmanager
def _open_run(meant: RunOptions, queue: QueueOptions, store: StoreOptions) -> Iterator[_Opened]:
    """The Redis and the id of the run that is meant."""
    from hiddenq.delivery import connect, known_run, load_run
    from hiddenq.storage import open_store
    from hiddenq.storage.runfiles import load_run_json

    if meant.out is None:
        with contextlib.closing(connect(queue.redis_url)) as client:
            yield _Opened(client, load_run(client, meant.run).run)
        return
    location = open_store(meant.out, store.settings)
    location.check_readable()
    config = load_run_json(location)
    if config is None:
        raise UsageError(f"--out {meant.out}: no run.json there; start with `hiddenq run`")
    with state.redis_of(location, queue.redis_url) as client:
        run = known_run(client, config.run).run
        yield _Opened(client, run, location if state.is_own_redis(location, queue.redis_url) else None)


class _Opened(NamedTuple):
    client: redis.Redis
    run: str
    own: ObjectStore | None = None
    """The location whose own Redis it is; None for one that was named."""

    def status(self) -> RunStatus:
        from hiddenq.delivery import LocationLock
        from hiddenq.monitor import Embedded, run_status

        if self.own is None:
            return run_status(self.client, self.run)
        is_running = LocationLock.is_held(self.client, self.own.uri)
        logs = str(state.state_folder(self.own) / "logs")
        return run_status(self.client, self.run, embedded=Embedded(is_running=is_running, logs=logs))


@app.command(rich_help_panel=PANEL)
@grouped
def status(
    meant: RunOptions,
    queue: QueueOptions,
    store: StoreOptions,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, once a second.")] = False,
    json: Json = False,
) -> int:
    """Total, rate, ETA, spool, each worker, queues, failures, and what is wrong with what to do about it."""
    from hiddenq.monitor import render

    with _open_run(meant, queue, store) as opened:
        if json:
            typer.echo(opened.status().model_dump_json(indent=2))
        elif watch:
            with Live(auto_refresh=False) as live:
                while True:
                    live.update(render(opened.status()), refresh=True)
                    time.sleep(WATCH_SECONDS)
        else:
            Console().print(render(opened.status()))
    return 0


@failed.command("list")
@grouped
def failed_list(
    meant: RunOptions,
    queue: QueueOptions,
    store: StoreOptions,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", envvar="HIDDENQ_FAILED_LIMIT", help="Show the first N; 0: all.")
    ] = LIST_LIMIT,
    json: Annotated[bool, typer.Option("--json", help="Print all, each as one line of JSON in an array.")] = False,
) -> int:
    """List dead letters, oldest first."""
    from hiddenq.delivery import each_dead_letter, num_dead, num_foreign

    with _open_run(meant, queue, store) as opened:
        letters = each_dead_letter(opened.client, opened.run)
        if json:
            lines = (orjson.dumps(letter.model_dump(mode="json")).decode() for letter in letters)
            typer.echo("[" + next(lines, ""), nl=False)
            for line in lines:
                typer.echo(",\n" + line, nl=False)
            typer.echo("]")
            return 0
        foreign = num_foreign(opened.client, opened.run)
        total = num_dead(opened.client, opened.run) + foreign
        table = Table("batch", "samples", "attempts", "reason", box=None, pad_edge=False)
        for letter in itertools.islice(letters, limit or None):
            reason = letter.reason.strip().splitlines()[-1] if letter.reason.strip() else "unknown"
            table.add_row(
                letter.batch.batch_id, f"{letter.batch.num_samples:,}", f"{len(letter.attempts)}", escape(reason)
            )
    Console().print(table if total else "no dead letters")
    if (left := total - table.row_count) > 0:
        typer.echo(f"and {left:,} more: --limit 0 shows all")
    if foreign:
        typer.echo(
            f"{foreign:,} of them are no batches of the run's plan and count for nothing: `hiddenq failed drop` them"
        )
    return 0


@failed.command("show")
@grouped
def failed_show(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Batch id.")],
    meant: RunOptions,
    queue: QueueOptions,
    store: StoreOptions,
) -> int:
    """Show one dead letter: every attempt with host, device, time and traceback."""
    from hiddenq.delivery import each_dead_letter

    with _open_run(meant, queue, store) as opened:
        letter = next(each_dead_letter(opened.client, opened.run, [batch]), None)
    if letter is None:
        raise UsageError(f"{batch}: its dead letter can't be read; `hiddenq failed drop {batch}`, then `hiddenq run`")
    console = Console()
    console.print(
        f"batch {batch}: {counted(letter.batch.num_samples, 'sample')}, {counted(letter.batch.num_tokens, 'token')}",
        style="bold",
    )
    for attempt in letter.attempts:
        where = " ".join(part for part in (attempt.worker, attempt.host, attempt.device) if part)
        console.print(f"\nattempt {attempt.number}, {attempt.ended_at}, {where}", style="bold", highlight=False)
        console.print(attempt.traceback or attempt.error, markup=False, highlight=False)
    return 0


@failed.command("retry")
@grouped
def failed_retry(meant: RunOptions, queue: QueueOptions, store: StoreOptions, batches: Batches = None) -> int:
    """Give dead letters all their attempts again; a `run` or the fleet's workers then take them."""
    from hiddenq.delivery import retry_dead

    with _open_run(meant, queue, store) as opened:
        typer.echo(f"{counted(retry_dead(opened.client, opened.run, batches or None), 'batch')} queued again")
    return 0


@failed.command("drop")
@grouped
def failed_drop(meant: RunOptions, queue: QueueOptions, store: StoreOptions, batches: Batches = None) -> int:
    """Forget dead letters; their batches count as not done until a later `run`."""
    from hiddenq.delivery import drop_dead

    with _open_run(meant, queue, store) as opened:
        typer.echo(f"{counted(drop_dead(opened.client, opened.run, batches or None), 'dead letter')} dropped")
    return 0


@app.command(rich_help_panel=PANEL)
@grouped
def verify(
    store: StoreOptions,
    out: Annotated[str, typer.Option(help="Output location of the run.")],
    recompute: Annotated[
        int, typer.Option(metavar="N", min=0, help="Recompute N random samples from the model and compare.")
    ] = 0,
    model: Annotated[str | None, typer.Option(help="Where the model lies here, if not where run.json says.")] = None,
    device: Annotated[str, typer.Option(help="Torch device of the recomputation.")] = "cpu",
    deep: Annotated[bool, typer.Option("--deep", help="Also look for order and repetition in the values.")] = False,
    json: Json = False,
) -> int:
    """Check a run against its plan: every sample once, checksums, shapes, finite; exit 1 if anything is wrong."""
    from hiddenq.progress import TerminalProgress
    from hiddenq.reader import verify as verify_run

    with TerminalProgress() as bars:
        report = verify_run(
            out,
            store.settings,
            recompute=recompute,
            model=model,
            deep=deep,
            device=device,
            progress=lambda done, total: bars("verifying", done, total),
        )
    typer.echo(report.model_dump_json(indent=2) if json else "\n".join(report.lines()))
    return 0 if report.ok else 1


@app.command(rich_help_panel=PANEL)
@grouped
def doctor(
    queue: QueueOptions,
    store: StoreOptions,
    out: OutOption = None,
    model: Annotated[str | None, typer.Option(help="Folder (or hub id) of the target model.")] = None,
    spool: Annotated[Path | None, typer.Option(help="Spool folder.")] = None,
    devices: Annotated[str, typer.Option(help="As for `run`; with cpu a missing GPU is no fault.")] = "auto",
    gpus_per_worker: Annotated[int, typer.Option(metavar="N", help="GPUs that share one copy of the model.")] = 1,
) -> int:
    """Say what is wrong with this machine, why it matters, and the command that mends it; exit 2 if anything is."""
    from hiddenq.doctor.diagnose import DoctorSettings, diagnose
    from hiddenq.doctor.findings import exit_status, render

    findings = diagnose(
        DoctorSettings(
            devices=devices,
            redis_url=queue.redis_url,
            spool=spool,
            location=out,
            store=store.settings,
            model=model,
            gpus_per_worker=gpus_per_worker,
        )
    )
    typer.echo(render(findings))
    return exit_status(findings)
