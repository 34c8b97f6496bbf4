"""What `hiddenq run` shows: a live view on a terminal, one line every ten seconds elsewhere, a table at the end.

Invariant: what is shown of a run's progress is the ledger's; Redis being away leaves the last look standing.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Self

import redis
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from hiddenq.contracts.errors import RedisAway, UsageError
from hiddenq.contracts.manifest import Manifest
from hiddenq.contracts.wording import counted
from hiddenq.delivery import RunRecord, fleet
from hiddenq.monitor import Embedded, RunStatus, run_status
from hiddenq.monitor.model import Totals
from hiddenq.monitor.render import render, summary_line
from hiddenq.monitor.texts import format_bytes, format_seconds

LINE_SECONDS = 10.0
STARTING = "the GPU workers load the model"


class TerminalProgress:
    """A bar a stage on a terminal, one line every ten seconds elsewhere, on stderr; called with what is done."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(console=self._console, transient=True) if self._console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._next_line = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done."""
        if self._bars:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._tasks[stage], completed=done, total=total)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._console.print(f"{stage}: {done / max(total, 1):.0%}", highlight=False)


class RunProgress:
    """Shows one run while it goes on; `embedded`: it has its own Redis, so no commands for a fleet are advised."""

    def __init__(self, client: redis.Redis, record: RunRecord, embedded: Embedded | None = None) -> None:
        self._client = client
        self._embedded = embedded
        self._run = record.run
        self._console = Console()
        self._status: RunStatus = run_status(client, record.run, embedded=embedded)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._next_line = time.monotonic() + LINE_SECONDS
        self._has_worker = False

    def __enter__(self) -> Self:
        total, committed = self._status.total, self._status.committed
        left = total.num_batches - committed.num_batches
        self._console.print(
            f"{self._run}: {counted(total.num_samples, 'sample')} in {counted(total.num_batches, 'batch')}, "
            f"{left:,} to do",
            highlight=False,
        )
        if self._live and left:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._live.is_started:
            self._show()
            self._live.stop()

    @property
    def committed(self) -> Totals:
        """What the ledger has, as of the last look."""
        return self._status.committed

    @property
    def is_ended(self) -> bool:
        """Whether every batch is committed or a dead letter."""
        return self._status.committed.num_batches + self._status.num_dead_letters >= self._status.total.num_batches

    def refresh(self) -> None:
        """Look again, and show it; what can't be looked at (Redis is away, or has lost the run) stays as it was."""
        try:
            self._status = run_status(self._client, self._run, embedded=self._embedded)
        except (RedisAway, UsageError, redis.RedisError):
            return
        self._show()

    def say(self, text: str) -> None:
        """Print a line above what is shown."""
        self._console.print(f"{self._run}: {text}", highlight=False, soft_wrap=True)

    def _show(self) -> None:
        self._has_worker |= any(worker.alive and worker.role == "gpu_worker" for worker in self._status.workers)
        if self._live:
            view = render(self._status) if self._has_worker else Text(f"{self._run}: {STARTING}")
            self._live.update(view, refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            line = summary_line(self._status) if self._has_worker else f"{self._run}: {STARTING}"
            self._console.print(line, highlight=False, soft_wrap=True)


def print_summary(
    client: redis.Redis, record: RunRecord, manifest: Manifest, seconds: dict[str, float], before: Totals
) -> None:
    """Print the table at the end of a run; `before` is what was committed when it started."""
    config = record.config
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    rejected = f"; {counted(manifest.num_rejected, 'row')} rejected" if manifest.num_rejected else ""
    table.add_row("samples", f"{manifest.num_samples_committed:,} of {manifest.num_samples:,}{rejected}")
    table.add_row("tokens", f"{manifest.num_tokens_committed:,}")
    table.add_row("padding", f"{config.num_padded_tokens / config.num_tokens:.3f} x")
    table.add_row("stored", f"{format_bytes(manifest.num_bytes)} in {counted(manifest.num_batches_committed, 'shard')}")
    stages: Counter[str] = Counter()
    for worker in fleet(client).workers:
        if worker.report.run in (None, record.run):
            stages.update(worker.report.stage_seconds)
    num_tokens = manifest.num_tokens_committed - before.num_tokens
    num_samples = manifest.num_samples_committed - before.num_samples
    took = seconds["extract and upload"]
    if num_tokens > 0:
        table.add_row("rate", f"{num_tokens / took:,.0f} tokens/s, {num_samples / took:,.2f} samples/s")
    table.add_row("wall time", ", ".join(f"{name} {format_seconds(value)}" for name, value in seconds.items()))
    if stages and num_tokens > 0:
        named = {"compute" if name == "gpu" else name: value for name, value in stages.items()}  # on a CPU, perhaps
        table.add_row("by stage", ", ".join(f"{name} {value:.1f} s" for name, value in named.items()))
    table.add_row(
        "result",
        "complete" if manifest.complete else f"incomplete: {counted(len(manifest.dead_letters), 'dead letter')}",
    )
    table.add_row("location", Text(record.location))
    Console().print(table, highlight=False)
