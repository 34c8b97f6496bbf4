"""Taking parts of a fleet away, the rest goes on: `drain`, `forget`, `cancel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import redis
import typer

from hiddenq import state
from hiddenq.cli import app
from hiddenq.cli.groups import QueueOptions
from hiddenq.cli.options import grouped
from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.wording import counted

PANEL = "The fleet"
Host = Annotated[str, typer.Argument(metavar="HOST", help="Host name, as `status` shows it.")]


@contextlib.contextmanager
def _connected(queue: QueueOptions) -> Iterator[redis.Redis]:
    from hiddenq import delivery

    if not state.names_redis(queue.redis_url):
        raise UsageError(
            "no Redis address: give --redis-url or set HIDDENQ_REDIS_URL (redis://HOST:6379/0); for a `hiddenq run` "
            "that goes on, set HIDDENQ_REDIS_URL and HIDDENQ_REDIS_PASSWORD_FILE to what the same `hiddenq run` says "
            "when it is typed a second time"
        )
    with contextlib.closing(delivery.connect(queue.redis_url)) as client:
        yield client


@app.command(rich_help_panel=PANEL)
@grouped
def drain(host: Host, queue: QueueOptions) -> int:
    """Let a host finish what it has, and claim nothing more."""
    from hiddenq import delivery

    with _connected(queue) as client:
        typer.echo(f"{host}: {counted(delivery.drain(client, host), 'worker')} told to claim nothing more")
    return 0


@app.command(rich_help_panel=PANEL)
@grouped
def forget(host: Host, queue: QueueOptions) -> int:
    """Expect a host no longer: its workers are off the lists, and it may join again."""
    from hiddenq import delivery

    with _connected(queue) as client:
        typer.echo(f"{counted(delivery.forget(client, host), 'worker')} of {host} forgotten")
    return 0


@app.command(rich_help_panel=PANEL)
@grouped
def cancel(run: Annotated[str, typer.Argument(metavar="RUN", help="Run id.")], queue: QueueOptions) -> int:
    """Take a run's waiting batches out of the queue; what is committed stays, and `produce` enqueues the rest again."""
    from hiddenq import delivery

    with _connected(queue) as client:
        typer.echo(f"{counted(delivery.cancel(client, run), 'batch')} taken out of the queue")
    return 0
