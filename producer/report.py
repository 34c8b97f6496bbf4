"""What a run would take: rows, lengths, batches, bytes and hours, found out without a GPU.

Invariant: the numbers are those of the run itself, because rows are read, tokenised, ordered and cut by the same code;
only nothing is kept, and nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import ModelError, UsageError
from hiddenq.contracts.layers import resolve_target_layers
from hiddenq.contracts.manifest import Rejected
from hiddenq.contracts.run import ModelIdentity
from hiddenq.contracts.shard import ShardFormat
from hiddenq.contracts.wording import shown
from producer.batching import cut_batches
from producer.histogram import LengthBin, LengthCounts
from producer.job import Job, Progress, no_progress
from producer.order import SampleOrder, iterate_lengths
from producer.outlook import Rate, RateEstimate, Room, estimate_rate, find_rooms
from producer.settings import ProducerSettings

_TOKEN_BYTES = 5


class RejectSummary(Frozen):
    """Rows left out for one reason."""

    num_rows: int
    example_row: int
    example_file: str
    example_line: int
    example: str


class StorageChoice(Frozen):
    """What one choice of layers and dtype would take."""

    target_layers: str
    target_layer_ids: tuple[int, ...]
    storage_dtype: str
    final_hidden_state: bool
    num_bytes: int
    is_asked_for: bool


class PlanReport(Frozen):
    """The answer of `hiddenq plan`."""

    model: str
    architecture: str
    data: tuple[str, ...]
    row_schema: str
    num_rows: int
    num_rejected: int
    rejected: dict[str, RejectSummary]
    """By reason, the most frequent first."""
    too_many_rejected: bool
    """Whether a run would refuse this input."""
    repairs: dict[str, int]
    num_samples: int
    num_tokens: int
    num_supervised: int
    max_length: int
    lengths: tuple[LengthBin, ...]
    median_length: int
    longest_length: int
    num_batches: int
    num_padded_tokens: int
    token_budget: int
    target_layer_ids: tuple[int, ...]
    dtype: str
    storage_dtype: str
    final_hidden_state: bool
    bytes_per_token: int
    num_bytes: int
    """Of all shards, headers left out."""
    num_token_bytes: int
    """Of the token parts."""
    largest_shard_bytes: int
    choices: tuple[StorageChoice, ...]
    rate: RateEstimate | None
    rooms: tuple[Room, ...]

    @property
    def padding_ratio(self) -> float:
        """Tokens run through the model for each real one."""
        return self.num_padded_tokens / max(1, self.num_tokens)

    def __rich__(self) -> RenderableType:
        """The report for a terminal."""
        from producer.report_view import render

        return render(self)


def plan(
    settings: ProducerSettings,
    progress: Progress = no_progress,
    *,
    find_rate: Callable[[ModelIdentity], Rate | None] = lambda model: None,
    output: str | None = None,
    spool: Path | None = None,
) -> PlanReport:
    """Say what a run with these settings would take; writes nothing.

    `find_rate` is asked for a rate of the model before any row is read; `output` and `spool` are looked at for room,
    if they are folders.

    Raises:
        UserError: something of the user's to mend.
    """
    reasons, repairs = Counter[str](), Counter[str]()
    examples: dict[str, Rejected] = {}
    num_rows = 0
    with Job(settings, progress) as job:
        model = job.target.identity
        rate = find_rate(model)
        order, lengths = SampleOrder(job.scratch), LengthCounts(job.max_length)
        for block in job.encode():
            num_rows += block.num_rows
            repairs += block.repairs
            order.append(block)
            lengths.add(block.lengths)
            for reject in block.rejected:
                reasons[reject.reason] += 1
                examples.setdefault(reject.reason, reject)
        num_batches = num_padded = most_tokens = 0
        chunks = order.chunks(settings.shuffle_seed, job.limits.rotary)
        for batch in cut_batches(iterate_lengths(chunks), job.limits):
            num_batches += 1
            num_padded += batch.num_samples * batch.padded_length
            most_tokens = max(most_tokens, batch.num_tokens)
    num_bytes, num_token_bytes = order.num_tokens * job.shard.bytes_per_token, order.num_tokens * _TOKEN_BYTES
    largest = most_tokens * job.shard.bytes_per_token
    estimate = estimate_rate(rate, order.num_tokens, len(order), num_bytes) if rate else None
    return PlanReport(
        model=settings.model,
        architecture=model.architecture,
        data=tuple(map(shown, settings.data)),
        row_schema=job.row_schema,
        num_rows=num_rows,
        num_rejected=reasons.total(),
        rejected={
            reason: RejectSummary(
                num_rows=count,
                example_row=examples[reason].row,
                example_file=examples[reason].file,
                example_line=examples[reason].line,
                example=examples[reason].detail,
            )
            for reason, count in reasons.most_common()
        },
        too_many_rejected=reasons.total() > settings.max_rejected * num_rows or not len(order),
        repairs=dict(repairs),
        num_samples=len(order),
        num_tokens=order.num_tokens,
        num_supervised=order.num_supervised,
        max_length=job.max_length,
        lengths=tuple(lengths.bins()),
        median_length=lengths.median,
        longest_length=lengths.longest,
        num_batches=num_batches,
        num_padded_tokens=num_padded,
        token_budget=settings.token_budget,
        target_layer_ids=job.target_layer_ids,
        dtype=model.dtype,
        storage_dtype=job.shard.storage_dtype,
        final_hidden_state=settings.final_hidden_state,
        bytes_per_token=job.shard.bytes_per_token,
        num_bytes=num_bytes,
        num_token_bytes=num_token_bytes,
        largest_shard_bytes=largest,
        choices=tuple(storage_choices(job.shard, settings.target_layers, model.num_layers, order.num_tokens)),
        rate=estimate,
        rooms=tuple(find_rooms(output, spool, num_bytes + num_token_bytes, largest, estimate)),
    )


def storage_choices(shard: ShardFormat, asked: str, num_layers: int, num_tokens: int) -> Iterable[StorageChoice]:
    """Bytes of the choice asked for, beside the presets that the model has layers for, with and without fp8."""
    names = dict.fromkeys([asked.strip().lower(), "eagle3", "dflash", "none"])
    for name in names:
        try:
            ids = resolve_target_layers(name, num_layers)
        except ModelError:
            continue
        final = shard.final_hidden_state or not ids
        for dtype in dict.fromkeys(
            [shard.storage_dtype, shard.model_dtype, "float8_e4m3fn"] if ids else [shard.storage_dtype]
        ):
            try:
                other = replace(shard, target_layer_ids=ids, storage_dtype=dtype, final_hidden_state=final)
            except UsageError:
                continue
            yield StorageChoice(
                target_layers=name,
                target_layer_ids=ids,
                storage_dtype=dtype,
                final_hidden_state=final,
                num_bytes=num_tokens * other.bytes_per_token,
                is_asked_for=other == shard,
            )
