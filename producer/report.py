"""What a run would take: rows, lengths, batches, bytes and hours, found out without a GPU.

Invariant: the numbers are those of the run itself, because rows are read, tokenised, ordered and cut by the same code;
only nothing is kept, and nothing is written.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import ModelError, UsageError
from hiddenq.contracts.layers import resolve_target_layers
from hiddenq.contracts.manifest import Rejected
from hiddenq.contracts.shard import ShardFormat
from producer.batching import Lengths as LengthArray
from producer.batching import cut_batches, iterate_lengths, key_lengths, order_keys
from producer.job import Job, Progress, no_progress
from producer.settings import ProducerSettings
from producer.spill import Lengths

_NUM_BINS = 16
_TOKEN_BYTES = 5
_SHARDS_IN_SPOOL = 4
"""A spool that can't hold so many of the largest shards keeps a GPU waiting for uploads."""


class RejectSummary(Frozen):
    """Rows left out for one reason."""

    num_rows: int
    example_row: int
    example: str


class LengthBin(Frozen):
    """Samples of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    num_samples: int


class StorageChoice(Frozen):
    """What one choice of layers and dtype would take."""

    target_layers: str
    target_layer_ids: tuple[int, ...]
    storage_dtype: str
    final_hidden_state: bool
    num_bytes: int
    is_asked_for: bool


class RateEstimate(Frozen):
    """What a rate means for this run."""

    tokens_per_second: float
    samples_per_second: float
    hours: float
    bytes_per_second: float
    """What spool and output must take."""


class Room(Frozen):
    """Whether a folder has room."""

    name: str
    folder: str
    free_bytes: int
    needed_bytes: int
    seconds_to_full: float | None
    """How long the rate may go on if nothing leaves the folder; None without a rate."""

    @property
    def has_room(self) -> bool:
        """Whether what is needed fits into what is free."""
        return self.needed_bytes <= self.free_bytes


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
    tokens_per_second: float | None = None,
    output: str | None = None,
    spool: Path | None = None,
) -> PlanReport:
    """Say what a run with these settings would take; writes nothing.

    `tokens_per_second` is the rate of all GPUs together; `output` and `spool` are looked at for room, if they are
    folders.

    Raises:
        UserError: something of the user's to mend.
    """
    lengths, reasons, repairs = Lengths(), Counter[str](), Counter[str]()
    examples: dict[str, Rejected] = {}
    num_rows = 0
    with Job(settings, progress) as job:
        for block in job.encode():
            num_rows += block.num_rows
            repairs += block.repairs
            lengths.append(block)
            for reject in block.rejected:
                reasons[reject.reason] += 1
                examples.setdefault(reject.reason, reject)
    keys = lengths.keys()
    order_keys(keys, settings.shuffle_seed, job.limits.rotary)
    batches = list(cut_batches(iterate_lengths(keys), job.limits))
    num_bytes = lengths.num_tokens * job.shard.bytes_per_token
    largest = max((batch.num_tokens for batch in batches), default=0) * job.shard.bytes_per_token
    rate = estimate_rate(tokens_per_second, lengths.num_tokens, len(keys), num_bytes) if tokens_per_second else None
    sorted_lengths = np.sort(key_lengths(keys))
    model = job.target.identity
    return PlanReport(
        model=settings.model,
        architecture=model.architecture,
        data=settings.data,
        row_schema=job.row_schema,
        num_rows=num_rows,
        num_rejected=reasons.total(),
        rejected={
            reason: RejectSummary(num_rows=count, example_row=examples[reason].row, example=examples[reason].detail)
            for reason, count in reasons.most_common()
        },
        too_many_rejected=reasons.total() > settings.max_rejected * num_rows or not len(keys),
        repairs=dict(repairs),
        num_samples=len(keys),
        num_tokens=lengths.num_tokens,
        num_supervised=lengths.num_supervised,
        max_length=job.max_length,
        lengths=tuple(length_bins(sorted_lengths)),
        median_length=int(sorted_lengths[len(keys) // 2]) if len(keys) else 0,
        longest_length=int(sorted_lengths[-1]) if len(keys) else 0,
        num_batches=len(batches),
        num_padded_tokens=sum(batch.num_samples * batch.padded_length for batch in batches),
        token_budget=settings.token_budget,
        target_layer_ids=job.target_layer_ids,
        dtype=model.dtype,
        storage_dtype=job.shard.storage_dtype,
        final_hidden_state=settings.final_hidden_state,
        bytes_per_token=job.shard.bytes_per_token,
        num_bytes=num_bytes,
        num_token_bytes=lengths.num_tokens * _TOKEN_BYTES,
        largest_shard_bytes=largest,
        choices=tuple(storage_choices(job.shard, settings.target_layers, model.num_layers, lengths.num_tokens)),
        rate=rate,
        rooms=tuple(_rooms(output, spool, num_bytes + lengths.num_tokens * _TOKEN_BYTES, largest, rate)),
    )


def estimate_rate(tokens_per_second: float, num_tokens: int, num_samples: int, num_bytes: int) -> RateEstimate:
    """What a rate means for so much work."""
    seconds = num_tokens / tokens_per_second
    return RateEstimate(
        tokens_per_second=tokens_per_second,
        samples_per_second=num_samples / max(seconds, 1e-9),
        hours=seconds / 3600,
        bytes_per_second=num_bytes / max(seconds, 1e-9),
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


def length_bins(sorted_lengths: LengthArray) -> Iterable[LengthBin]:
    """A histogram of lengths in bins of equal width on a logarithmic scale, empty ends left out."""
    if not len(sorted_lengths):
        return
    low, high = int(sorted_lengths[0]), int(sorted_lengths[-1])
    edges = np.unique(np.rint(np.geomspace(low, high + 1, _NUM_BINS + 1)).astype(np.int64))
    places = np.searchsorted(sorted_lengths, edges)
    for number in range(len(edges) - 1):
        yield LengthBin(
            shortest=int(edges[number]),
            longest=int(edges[number + 1]) - 1,
            num_samples=int(places[number + 1] - places[number]),
        )


def _rooms(
    output: str | None, spool: Path | None, needed: int, largest_shard: int, rate: RateEstimate | None
) -> Iterable[Room]:
    folders: list[tuple[str, Path, int]] = []
    if output is not None and "://" not in output.removeprefix("file://"):
        folders.append(("output", Path(output.removeprefix("file://")), needed))
    if spool is not None:
        folders.append(("spool", spool, _SHARDS_IN_SPOOL * largest_shard))
    for name, folder, needed_bytes in folders:
        free = shutil.disk_usage(_existing(folder)).free
        seconds: Any = free / rate.bytes_per_second if rate and rate.bytes_per_second else None
        yield Room(name=name, folder=str(folder), free_bytes=free, needed_bytes=needed_bytes, seconds_to_full=seconds)


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
