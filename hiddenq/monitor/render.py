"""A run's status on a terminal.

Invariant: a pure function of `RunStatus`; the first line answers whether it goes well, the next when it ends, and what
is wrong stands above the tables with what to do.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hiddenq.contracts.wording import counted
from hiddenq.monitor.model import Problem, RunStatus, WorkerStatus
from hiddenq.monitor.texts import format_bytes, format_rate, format_seconds, format_share, format_time

_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
LOADING = "the GPU workers load the model"
_STATE_STYLES = {"busy": "green", "idle": "cyan", "sick": "bold red", "paused": "yellow", "waiting": "yellow"}


def render(status: RunStatus) -> RenderableType:
    """The whole status, for `rich`'s console or its `Live`."""
    parts: list[RenderableType] = [_headline(status), _progress(status), *(_problem(one) for one in status.problems)]
    living = () if status.state == "stopped" else (_gpu_workers(status), _uploads(status))
    for table in (*living, _dead_letters(status)):
        if table.row_count:
            parts += [Text(), table]
    if living:
        parts.append(_executions(status))
    return Group(*parts)


def summary_line(status: RunStatus) -> str:
    """One plain line, for logs and pipes: the verdict, what is done, the rate, the end."""
    rate, all_samples = status.rate, counted(status.total.num_samples, "sample")
    pieces = [
        f"{status.run}: {verdict(status)}",
        f"{status.committed.num_samples:,}/{all_samples} ({format_share(status.share)})",
    ]
    if rate and not status.complete and not _is_loading(status):
        pieces.append(f"{format_rate(rate.samples_per_second)} samples/s")
        pieces.append(f"{format_rate(rate.tokens_per_second)} tokens/s")
    if status.eta_seconds and not status.complete and not _is_loading(status):
        pieces.append(f"{format_seconds(status.eta_seconds)} left")
    if status.num_dead_letters:
        pieces.append(counted(status.num_dead_letters, "dead letter"))
    return ", ".join(pieces)


def verdict(status: RunStatus) -> str:
    """`complete`, `stopped`, `cancelled`, `goes well`, or what the worst problem makes of it."""
    if status.state == "stopped":
        return "stopped"
    if status.complete:
        return "complete"
    if status.state == "cancelled":
        return "cancelled"
    if _has_ended(status):
        return "ended incomplete"
    worst = status.problems[0].severity if status.problems else "info"
    if worst == "info" and _is_loading(status):
        return LOADING
    return {"critical": "needs help", "warning": "goes on, with problems", "info": "goes well"}[worst]


def _is_loading(status: RunStatus) -> bool:
    """Whether GPU workers live, and none of them is ready yet."""
    states = {worker.state for worker in status.workers if worker.role == "gpu_worker" and worker.alive}
    return status.state == "live" and states == {"starting"}


def _has_ended(status: RunStatus) -> bool:
    """Whether its manifest is written, and what it lacks are dead letters that nobody has queued again."""
    num_left = status.total.num_batches - status.committed.num_batches
    return status.state == "finished" and num_left <= status.num_dead_letters


def _headline(status: RunStatus) -> RenderableType:
    worst = status.problems[0].severity if status.problems else None
    style = "bold green" if worst in (None, "info") else _STYLES[str(worst)]
    if status.state in ("stopped", "cancelled") and not status.complete:
        style = _STYLES["warning"]
    return Text.from_markup(
        f"[bold]{escape(status.run)}[/bold]  [{style}]{verdict(status)}[/{style}]  "
        f"[dim]{escape(status.model)} → {escape(status.location)}[/dim]"
    )


def _progress(status: RunStatus) -> RenderableType:
    committed, total = status.committed, status.total
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(total=max(total.num_tokens, 1), completed=committed.num_tokens, width=40),
        f"[bold]{format_share(status.share)}[/bold]",
        f"{committed.num_samples:,} of {counted(total.num_samples, 'sample')}, "
        f"{committed.num_batches:,} of {counted(total.num_batches, 'batch')}, "
        f"{format_bytes(status.committed_bytes)} in the store",
    )
    pieces = []
    if status.rate and not status.complete and not _is_loading(status):
        source = "" if status.rate.source == "ledger" else " (by the workers)"
        pieces.append(
            f"now {format_rate(status.rate.samples_per_second)} samples/s, "
            f"{format_rate(status.rate.tokens_per_second)} tokens/s{source}"
        )
    if status.mean_rate:
        pieces.append(f"mean {format_rate(status.mean_rate.samples_per_second)} samples/s")
    if status.state == "cancelled" and not status.complete:
        pieces.append("the same `hiddenq run` or `hiddenq produce` enqueues what is left again")
    elif not (status.state == "stopped" or status.complete or _has_ended(status) or _is_loading(status)):
        left = f"{format_seconds(status.eta_seconds)} left, done at {format_time(status.eta_at)}"
        pieces.append(left if status.eta_seconds is not None else "no rate yet")
    pieces.append(f"padding {format_share(status.padding)}")
    return Group(grid, Text("; ".join(pieces)))


def _problem(problem: Problem) -> RenderableType:
    style = _STYLES[problem.severity]
    return Text.from_markup(
        f"[{style}]● {problem.severity}[/{style}] {escape(problem.what)}\n           → {escape(problem.do)}"
    )


def _gpu_workers(status: RunStatus) -> Table:
    table = _table("GPU", "state", "tokens/s", "MFU", "batch", "batches", "padding", "memory", "°C", "note")
    extract = next((queue for queue in status.queues if queue.queue == "extract"), None)
    if extract:
        table.title = (
            f"GPU workers: batches: {extract.num_waiting:,} wait, {extract.num_started:,} run, "
            f"{extract.num_delayed:,} for their next attempt"
        )
    for worker in status.workers:
        if worker.role == "gpu_worker":
            table.add_row(
                escape(f"{worker.host} {worker.device}"),
                _state(worker),
                format_rate(worker.tokens_per_second),
                format_share(worker.useful_mfu),
                _batch(worker),
                f"{worker.num_batches:,}",
                format_share(worker.padding),
                f"{format_bytes(worker.memory_used_bytes)} / {format_bytes(worker.memory_total_bytes)}",
                "–" if worker.temperature_celsius is None else f"{worker.temperature_celsius:.0f}",
                escape(_note(worker)),
            )
    return table


def _uploads(status: RunStatus) -> Table:
    table = _table("host", "uploaders", "waiting", "uploading", "oldest", "spool", "high mark", "disk left")
    table.title = "Uploads and spools"
    for spool in status.spools:
        queue = next((one for one in status.queues if one.queue == "upload" and one.spool_id == spool.spool_id), None)
        uploaders = [one for one in status.workers if one.role == "uploader" and one.host == spool.host and one.alive]
        table.add_row(
            escape(spool.host) if spool.alive else f"[red]{escape(spool.host)} (away)[/red]",
            f"{len(uploaders)}",
            f"{queue.num_waiting:,}" if queue else "0",
            f"{queue.num_started:,}" if queue else "0",
            format_seconds(queue.oldest_seconds) if queue and queue.num_waiting else "–",
            f"{format_bytes(spool.num_bytes)} in {counted(spool.num_files or 0, 'file')}",
            format_bytes(spool.high_bytes),
            format_bytes(spool.disk_free_bytes),
        )
    return table


def _dead_letters(status: RunStatus) -> Table:
    table = _table("batch", "samples", "attempts", "reason")
    table.title = f"Dead letters: {status.num_dead_letters:,}"
    for letter in status.dead_letters:
        table.add_row(letter.batch_id, f"{letter.num_samples:,}", f"{letter.num_attempts}", escape(letter.reason))
    return table


def _executions(status: RunStatus) -> RenderableType:
    """Workers' own counts stand apart from the ledger's: a batch that ran twice is two of theirs."""
    return Text(
        f"Since their start the registered workers have finished {counted(status.executed.num_batches, 'batch')} "
        "(executions: a batch that ran twice counts twice). Totals above are the ledger's.",
        style="dim",
    )


def _table(*columns: str) -> Table:
    table = Table(title_justify="left", box=None, pad_edge=False, header_style="dim", title_style="bold")
    for number, column in enumerate(columns):
        text = number == 0 or column in ("state", "note", "reason", "batch")
        table.add_column(column, justify="left" if text else "right", no_wrap=column not in ("note", "reason"))
    return table


def _state(worker: WorkerStatus) -> str:
    if worker.drained:
        return "[dim]drained[/dim]"
    if not worker.alive:
        return f"[bold red]gone {format_seconds(worker.heartbeat_seconds)}[/bold red]"
    style = _STATE_STYLES.get(worker.state, "dim")
    return f"[{style}]{worker.state}[/{style}]"


def _batch(worker: WorkerStatus) -> str:
    return f"{worker.batch_id} {format_seconds(worker.batch_seconds)}" if worker.batch_id else "–"


def _note(worker: WorkerStatus) -> str:
    pieces = [worker.detail]
    if worker.throttle:
        pieces.append(f"throttled: {worker.throttle}")
    if worker.num_oom_splits:
        pieces.append(f"{counted(worker.num_oom_splits, 'split')} for memory")
    if worker.num_failures:
        pieces.append(counted(worker.num_failures, "failure"))
    if worker.fast_kernels is False:
        pieces.append("slow kernels")
    return ", ".join(piece for piece in pieces if piece)
