"""Out of the store and into training: `export`, `sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hiddenq.cli import app
from hiddenq.cli.groups import StoreOptions
from hiddenq.cli.options import grouped
from hiddenq.contracts.errors import UsageError
from hiddenq.contracts.wording import counted

if TYPE_CHECKING:
    from hiddenq.reader import ExportReport

PANEL = "Out of the store"

RunOut = Annotated[str, typer.Option(help="Output location of the run.")]


@app.command(rich_help_panel=PANEL)
@grouped
def export(
    store: StoreOptions,
    out: RunOut,
    to: Annotated[str, typer.Option(help="speculators, specforge, modelopt, eagle or automodel-dspark.")],
    dest: Annotated[str, typer.Option(help="Folder or s3://bucket/prefix to write to.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            envvar="HIDDENQ_EXPORT_DTYPE",
            help="Dtype of the states: bfloat16, float16, float32; float8_e4m3fn for speculators.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Shuffle the rows by this seed; else in sample order.")] = None,
    method: Annotated[str, typer.Option(help="SpecForge: eagle3, dflash or dspark.")] = "eagle3",
    prenorm: Annotated[bool, typer.Option("--prenorm", help="Model-Optimizer: states before the final norm.")] = False,
    link: Annotated[bool, typer.Option("--link", help="Speculators: read the states from the run, copy none.")] = False,
    seq_length: Annotated[int | None, typer.Option(help="Automodel: pad or cut every sample to this.")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Also write the drafter's vocabulary: the most frequent supervised tokens.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Objects written at a time.")] = 8,
) -> int:
    """Write what a trainer loads; layer ids and norms in its own convention. Goes on where it was interrupted."""
    from hiddenq.progress import TerminalProgress
    from hiddenq.reader import ExportSettings
    from hiddenq.reader import export as export_run
    from hiddenq.reader.exports import STATEMENT
    from hiddenq.reader.exports.settings import FORMATS

    asked: dict[str, object] = {
        "format": to,
        "dtype": dtype,
        "seed": seed,
        "method": method,
        "prenorm": prenorm,
        "link": link,
        "seq_length": seq_length,
        "draft_vocab_size": draft_vocab_size,
    }
    if to not in FORMATS:
        raise UsageError(f"--to {to}: expected one of {', '.join(FORMATS)}")
    settings = ExportSettings.model_validate({name: value for name, value in asked.items() if value is not None})
    with TerminalProgress() as bars:
        report: ExportReport = export_run(
            out,
            settings,
            dest,
            source_settings=store.settings,
            dest_settings=store.settings if dest.startswith("s3://") else None,
            threads=threads,
            progress=lambda done, total: bars("exporting", done, total),
        )
    statement = report.statement
    typer.echo(
        f"{report.dest}: {counted(report.num_written, 'object')} written ({report.num_bytes / 1e6:,.1f} MB), "
        f"{report.num_kept:,} were there already"
    )
    typer.echo(f"layers {statement.consumer_layer_ids} ({statement.consumer_layer_convention})")
    if skipped := len(statement.skipped_sample_ids):
        typer.echo(f"of no use to this trainer: {counted(skipped, 'sample')}, named in {STATEMENT}")
    if report.num_not_there:
        typer.echo(
            f"not complete: the store lacks {counted(report.num_not_there, 'sample')} of the run so far; end the run "
            "with `hiddenq run`, then export it to another --dest"
        )
    return int(report.num_not_there > 0)


@app.command(rich_help_panel=PANEL)
@grouped
def sample(
    sample_id: Annotated[int, typer.Argument(metavar="ID", help="Row number in the dataset.")],
    store: StoreOptions,
    out: RunOut,
    model: Annotated[
        str | None, typer.Option(help="Where the tokenizer lies here, if not where run.json says.")
    ] = None,
) -> int:
    """Show one sample as a person would want to see it: text, loss mask in colour, norms by layer."""
    from hiddenq.reader import open_run, show_sample

    run = open_run(out, store.settings)
    if sample_id not in run:
        missing = f" ({run.num_not_there:,} of its samples are not there yet)" if run.num_not_there else ""
        raise UsageError(
            f"{sample_id}: no such sample; this run has {len(run):,}{missing}, and rejected.jsonl says what it left out"
        )
    Console().print(show_sample(run, sample_id, model=model))
    return 0
