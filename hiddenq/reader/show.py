"""One sample as a person wants to see it: its text, what is supervised, the size of its states by layer.

Invariant: control characters of a text never reach the terminal, so a hostile sample can't repaint it. What is
supervised can be seen with colours and without. The tokenizer is the run's if it can be loaded here; without it ids
stand for the text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hiddenq.model_files import place_of
from hiddenq.reader.decode import Sample
from hiddenq.reader.run import Run

SUPERVISED, CONTEXT = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"
"""Around what is supervised where there are no colours."""
MAX_TOKENS = 400
_BAR_WIDTH = 24

Decode = Callable[[Sequence[int]], str]
"""Token ids → their text."""


def show_sample(run: Run, sample_id: int, *, model: str | None = None, max_tokens: int = MAX_TOKENS) -> RenderableType:
    """A rich renderable of one sample.

    Args:
        model: where the tokenizer lies here, if not where `run.json` says.
        max_tokens: the text is cut after so many.

    Raises:
        KeyError: the run has no such sample.
    """
    sample = run.read(sample_id, torch.float32)
    return Group(
        _heading(run, sample),
        Text(),
        _Conversation(sample, load_decoder(model or run.config.model.model), max_tokens),
        Text(),
        _norms(run, sample),
    )


def load_decoder(model: str) -> Decode | None:
    """The model's tokenizer as a function; None if it, or Transformers, is not here or can't be used."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(place_of(model))
    except Exception:  # of whatever kind: this tokenizer can't be used, and ids stand for the text
        return None

    def decode(ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        except OverflowError:  # ids that no vocabulary has
            return _numbers(ids)

    return decode


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) + " "


def layer_norms(sample: Sample, target_layer_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """L2 norm of each token's state, float32 [S], by layer (`layer 3`, …, `final`)."""
    norms = {}
    if sample.hidden_states is not None:
        by_layer_SK = sample.hidden_states.float().norm(dim=-1)
        norms = {f"layer {layer}": by_layer_SK[:, slot] for slot, layer in enumerate(target_layer_ids)}
    if sample.final_hidden_state is not None:
        norms["final"] = sample.final_hidden_state.float().norm(dim=-1)
    return norms


def _heading(run: Run, sample: Sample) -> Text:
    at = run.index.position(sample.sample_id)
    num_supervised = int(sample.loss_mask.sum())
    return Text.assemble(
        (f"sample {sample.sample_id}", "bold"),
        f" of run {run.config.run}: {len(sample)} tokens, ",
        (f"{num_supervised} supervised", SUPERVISED),
        f"\n{run.index.shard_keys[run.index.shard[at]]}, {int(run.index.num_bytes[at]):,} bytes "
        f"from {int(run.index.byte_offset[at]):,}",
    )


@dataclass
class _Conversation:
    """The text, decoded run by run: a single token may be half a character."""

    sample: Sample
    decode: Decode | None
    max_tokens: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = (OPEN, CLOSE) if console.color_system is None or console.no_color else ("", "")
        tokens = zip(self.sample.input_ids.tolist(), self.sample.loss_mask.tolist(), strict=True)
        text = Text()
        for supervised, run in itertools.groupby(itertools.islice(tokens, self.max_tokens), key=lambda pair: pair[1]):
            ids = [token for token, _ in run]
            piece = _visible(self.decode(ids)) if self.decode else _numbers(ids)
            if supervised:
                text.append(f"{marks[0]}{piece}{marks[1]}", style=SUPERVISED)
            else:
                text.append(piece, style=CONTEXT)
        if len(self.sample) > self.max_tokens:
            text.append(f" … and {len(self.sample) - self.max_tokens} more tokens")
        yield text


def _visible(piece: str) -> str:
    return "".join(char if char == "\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in piece)


def _norms(run: Run, sample: Sample) -> Table:
    table = Table(title="norms of the states over the sample's tokens", title_justify="left", box=None)
    for name in ("layer", "median", "smallest", "largest", "at token"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    table.add_column("median, to scale")
    norms = layer_norms(sample, run.target_layer_ids)
    medians = {name: float(values.median()) for name, values in norms.items()}
    widest = max(filter(math.isfinite, medians.values()), default=0.0) or 1.0
    for name, values in norms.items():
        median = medians[name]
        bar = "█" * max(1, round(_BAR_WIDTH * median / widest)) if math.isfinite(median) else "not finite"
        row = (f"{median:.3g}", f"{float(values.min()):.3g}", f"{float(values.max()):.3g}", str(int(values.argmax())))
        table.add_row(name, *row, bar)
    return table
