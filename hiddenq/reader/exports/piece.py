"""What every format is made of: objects that are written whole, each from a few samples.

Shape legend: S tokens, K target layers, H hidden size.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hiddenq.reader.decode import TORCH_DTYPES, Sample
from hiddenq.reader.exports.settings import ExportSettings
from hiddenq.reader.run import Run


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One object of an export."""

    key: str
    build: Callable[[], bytes | None]
    """Its bytes; None if the trainer could not load these samples, which are then left out."""
    sample_ids: tuple[int, ...] = ()
    """Samples whose states it holds."""
    num_bytes: int = 0
    """About what building it takes of memory."""


@dataclass(frozen=True, kw_only=True)
class States:
    """A sample's tensors as the formats name them, each with memory of its own."""

    input_ids: torch.Tensor
    """int64 [S]"""
    loss_mask: torch.Tensor
    """int64 [S], not shifted"""
    aux: torch.Tensor
    """[S, K, H]; K may be 0"""
    final: torch.Tensor | None
    """[S, H], after the final norm where the format wants it so"""


def sample_memory(run: Run, sample_id: int) -> int:
    """Bytes that writing one sample takes: as stored, as float32 at most, and as the file's bytes."""
    return 5 * int(run.index.num_bytes[run.index.position(sample_id)])


def read_states(run: Run, sample_id: int, settings: ExportSettings, *, norm: bool, final: bool) -> States:
    """Read one sample for an export."""
    wanted = TORCH_DTYPES[settings.dtype] if settings.dtype and settings.dtype != "float8_e4m3fn" else None
    sample = run.read(sample_id)
    hidden = sample.hidden_states
    last = _last_state(sample, run) if final else None
    if last is not None and norm:
        last = run.target_head.post_norm(last)
    if hidden is None:
        dtype = TORCH_DTYPES[run.config.model.dtype]
        hidden = torch.empty(len(sample), 0, run.config.model.hidden_size, dtype=dtype, device="cpu")
    return States(
        input_ids=sample.input_ids.clone(),
        loss_mask=sample.loss_mask.clone(),
        aux=hidden.to(wanted or hidden.dtype, copy=True),
        final=None if last is None else last.to(wanted or last.dtype, copy=True),
    )


def save(fields: Mapping[Any, Any]) -> bytes:
    """`torch.save`, loadable with `weights_only`; every tensor must own its memory, or its whole buffer is written."""
    file = io.BytesIO()
    torch.save(fields, file)
    return file.getvalue()


def _last_state(sample: Sample, run: Run) -> torch.Tensor:
    """The last decoder layer's output: the final hidden state, or the slot of layer N-1."""
    if sample.final_hidden_state is not None:
        return sample.final_hidden_state
    assert sample.hidden_states is not None
    return sample.hidden_states[:, run.target_layer_ids.index(run.config.model.num_layers - 1)]
