"""A plan report for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from producer.rejects import REPAIRS
from producer.report import PlanReport

_BAR_WIDTH = 40


def render(report: PlanReport) -> RenderableType:
    """The whole report, from rows to hours."""
    parts: list[RenderableType] = [_facts(report), _histogram(report)]
    if report.rejected:
        parts.insert(1, _rejects(report))
    parts.append(_choices(report))
    parts.append(_outlook(report))
    if report.too_many_rejected:
        parts.append(Text("A run would refuse this input: more rows are rejected than --max-rejected allows.", "red"))
    return Group(*(part for pair in parts for part in (pair, "")))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table


def _facts(report: PlanReport) -> Table:
    table = _grid()
    final = " and the final state" if report.final_hidden_state else ""
    layers = f"layers {', '.join(map(str, report.target_layer_ids))}" if report.target_layer_ids else "no layers"
    table.add_row("model", Text(f"{report.model} ({report.architecture}, {report.dtype})"))
    table.add_row("rows", f"{report.num_rows:,} ({report.row_schema}): {report.num_samples:,} kept, "
                          f"{report.num_rejected:,} rejected")  # fmt: skip
    for name, count in report.repairs.items():
        table.add_row("", f"{count:,}: {REPAIRS[name]}")
    table.add_row("tokens", f"{report.num_tokens:,}, {report.num_supervised:,} of them supervised; "
                            f"median {report.median_length:,}, longest {report.longest_length:,} "
                            f"(limit {report.max_length:,})")  # fmt: skip
    table.add_row("batches", f"{report.num_batches:,} of up to {report.token_budget:,} padded tokens; "
                             f"padding ratio {report.padding_ratio:.4f}")  # fmt: skip
    per_token, largest = decimal(report.bytes_per_token), decimal(report.largest_shard_bytes)
    table.add_row("stored", f"{layers}{final} in {report.storage_dtype}: {decimal(report.num_bytes)} ({per_token} a "
                            f"token, shards of up to {largest}), tokens {decimal(report.num_token_bytes)}")  # fmt: skip
    return table


def _rejects(report: PlanReport) -> Table:
    table = _table("rejected rows", ("reason", "left"), ("rows", "right"), ("for example", "left"))
    for reason, summary in report.rejected.items():
        where = f"row {summary.example_row} ({Path(summary.example_file).name} line {summary.example_line})"
        table.add_row(reason, f"{summary.num_rows:,}", Text(f"{where}: {summary.example}"))
    return table


def _histogram(report: PlanReport) -> Table:
    table = _table("lengths in tokens", ("tokens", "right"), ("samples", "right"), ("", "left"))
    most = max((length.num_samples for length in report.lengths), default=1)
    for length in report.lengths:
        bar = Bar(most, 0, length.num_samples, width=_BAR_WIDTH)
        table.add_row(f"{length.shortest:,}–{length.longest:,}", f"{length.num_samples:,}", bar)
    return table


def _choices(report: PlanReport) -> Table:
    table = _table(
        "bytes by choice", ("layers", "left"), ("final state", "left"), ("dtype", "left"), ("bytes", "right")
    )
    for choice in report.choices:
        ids = ", ".join(map(str, choice.target_layer_ids))
        name = choice.target_layers if not ids or choice.target_layers == ids else f"{choice.target_layers} ({ids})"
        table.add_row(
            name,
            "yes" if choice.final_hidden_state else "no",
            choice.storage_dtype,
            decimal(choice.num_bytes),
            style="bold" if choice.is_asked_for else None,
        )
    return table


def _duration(hours: float) -> str:
    """Hours; of what takes less than one, minutes or seconds."""
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.1f} seconds"


def _outlook(report: PlanReport) -> Table:
    table = _grid()
    if report.rate:
        table.add_row(
            "rate",
            f"{report.rate.tokens_per_second:,.0f} tokens/s ({report.rate.samples_per_second:,.1f} samples/s): "
            f"{_duration(report.rate.hours)}; spool and output must each take "
            f"{decimal(int(report.rate.bytes_per_second))}/s",
        )
        table.add_row("", Text(report.rate.source))
    else:
        table.add_row("rate", "not known: give --tokens-per-second, or --rate-from a run of this model (run --test)")
    if not report.rooms:
        table.add_row("room", "not looked at: name --out and --spool")
    for room in report.rooms:
        full = (
            f"; full after {room.seconds_to_full / 60:,.0f} minutes if nothing leaves" if room.seconds_to_full else ""
        )
        enough = "room enough" if room.has_room else "NOT ENOUGH ROOM"
        table.add_row(
            room.name,
            Text(
                f"{room.folder}: {decimal(room.free_bytes)} free, {decimal(room.needed_bytes)} needed: {enough}{full}",
                style="" if room.has_room else "red",
            ),
        )
    return table
