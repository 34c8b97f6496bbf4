"""Taking parts of a fleet away, the rest goes on: `drain`, `forget`, `cancel`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from hiddenq.cli import app
from hiddenq.cli.groups import QueueOptions
from hiddenq.cli.options import grouped
from hiddenq.contracts.wording import counted

PANEL = "The fleet"
Host = Annotated[str, typer.Argument(metavar="HOST", help="Host name, as `status` shows it.")]


@app.command(rich_help_panel=PANEL)
@grouped
def drain(host: Host, queue: QueueOptions) -> int:
    """Let a host finish what it has, and claim nothing more."""
    from hiddenq import delivery

    with contextlib.closing(delivery.connect(queue.redis_url)) as client:
        typer.echo(f"{host}: {counted(delivery.drain(client, host), 'worker')} told to claim nothing more")
    return 0


@app.command(rich_help_panel=PANEL)
@grouped
def forget(host: Host, queue: QueueOptions) -> int:
    """Expect a host no longer: its workers are off the lists, and it may join again."""
    from hiddenq import delivery

    with contextlib.closing(delivery.connect(queue.redis_url)) as client:
        typer.echo(f"{counted(delivery.forget(client, host), 'worker')} of {host} forgotten")
    return 0


@app.command(rich_help_panel=PANEL)
@grouped
def cancel(run: Annotated[str, typer.Argument(metavar="RUN", help="Run id.")], queue: QueueOptions) -> int:
    """Take a run's waiting batches out of the queue; what is committed stays, and `produce` enqueues the rest again."""
    from hiddenq import delivery

    with contextlib.closing(delivery.connect(queue.redis_url)) as client:
        typer.echo(f"{counted(delivery.cancel(client, run), 'batch')} taken out of the queue")
    return 0
