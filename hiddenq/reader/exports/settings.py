"""What an export is asked for."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import UsageError
from hiddenq.reader.run import Run

Format = Literal["speculators", "specforge", "modelopt", "eagle", "automodel-dspark"]
FORMATS: tuple[Format, ...] = get_args(Format)
Method = Literal["eagle3", "dflash", "dspark"]
ExportDtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]


class ExportSettings(Frozen):
    """Settings of an export; a field that has no effect on the format is refused."""

    format: Format
    dtype: ExportDtype | None = None
    """Of the states; None for the stored one (the model's for fp8). fp8 for speculators alone."""
    seed: int | None = Field(default=None, ge=0)
    """Of the rows' order; None for ascending sample ids. Never the order of lengths."""
    method: Method = "eagle3"
    """SpecForge only: the drafter that the files are for."""
    prenorm: bool = False
    """Model-Optimizer only: final states before the final norm, said so in each file; needs no `target_head`."""
    link: bool = False
    """Speculators only: states stay in the run and are read from there, nothing is copied."""
    seq_length: int | None = Field(default=None, ge=1)
    """Automodel only: every sample is padded or cut to so many tokens; None for the longest."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Size of the drafter's vocabulary: the most frequent supervised tokens."""


def check_settings(settings: ExportSettings, run: Run) -> None:
    """Raise `UsageError` for what this format or this run can't give."""
    owners = {"method": "specforge", "prenorm": "modelopt", "link": "speculators", "seq_length": "automodel-dspark"}
    for field in sorted(settings.model_dump(exclude_defaults=True)):
        if owners.get(field, settings.format) != settings.format:
            raise UsageError(f"--{field.replace('_', '-')}: has no effect on --to {settings.format}; leave it out")
    if settings.dtype == "float8_e4m3fn" and settings.format != "speculators":
        raise UsageError(f"--dtype float8_e4m3fn: {settings.format} can't load it; use bfloat16")
    if settings.link and settings.dtype == "float8_e4m3fn":
        raise UsageError("--link: states stay as they are stored; leave --dtype float8_e4m3fn out")
    vocab_size = run.config.model.vocab_size
    if settings.draft_vocab_size is not None and settings.draft_vocab_size > vocab_size:
        raise UsageError(f"--draft-vocab-size {settings.draft_vocab_size}: the target's vocabulary has {vocab_size}")
    num_layers = len(run.target_layer_ids)
    if settings.format == "specforge" and settings.method == "eagle3" and num_layers != 3:
        raise UsageError(
            f"--to specforge: its EAGLE-3 takes three target layers, this run has {num_layers}; "
            "use --method dflash, or extract with --target-layers eagle3"
        )
    if num_layers == 0 and settings.format not in ("speculators", "eagle"):
        raise UsageError(f"--to {settings.format}: it needs target layers, this run has none")
    last_is_stored = run.config.final_hidden_state or run.config.model.num_layers - 1 in run.target_layer_ids
    if needs_final(settings) and not last_is_stored:
        raise UsageError(
            f"--to {settings.format}: it needs the final hidden state, or layer {run.config.model.num_layers - 1}; "
            "this run has neither: extract with --final-state"
        )
    if needs_norm(settings):
        _ = run.target_head


def needs_final(settings: ExportSettings) -> bool:
    """Whether the format holds the last layer's output, before or after the final norm."""
    return not (settings.format == "specforge" and settings.method == "dflash")


def needs_norm(settings: ExportSettings) -> bool:
    """Whether the format wants the final state after the final norm."""
    return needs_final(settings) and settings.format != "speculators" and not settings.prenorm
