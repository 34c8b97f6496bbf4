"""Samples of a block: what encoding gives, and what everything after it takes.

Invariant: the rows of a block are its samples and its rejects, each once, both in the order of the rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hiddenq.contracts.manifest import Rejected

SampleArrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""One sample's ids int32 [S] and loss mask uint8 [S]."""


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """Samples of a block one after the other, and what became of its other rows."""

    num_rows: int
    sample_ids: npt.NDArray[np.int64]
    """int64 [N]"""
    lengths: npt.NDArray[np.int64]
    """int64 [N], in tokens; they add up to T."""
    input_ids: npt.NDArray[np.int32]
    """int32 [T]"""
    loss_mask: npt.NDArray[np.uint8]
    """uint8 [T]"""
    rejected: list[Rejected]
    """In the order of the rows."""
    repairs: Counter[str]
    """By the names of `REPAIRS`: rows or tokens mended or noticed in samples."""


def collect(
    num_rows: int, samples: list[tuple[int, SampleArrays]], rejected: list[Rejected], repairs: Counter[str]
) -> EncodedBlock:
    """A block of its samples, each with its row."""
    return EncodedBlock(
        num_rows=num_rows,
        sample_ids=np.array([row for row, _ in samples], np.int64),
        lengths=np.array([len(ids) for _, (ids, _) in samples], np.int64),
        input_ids=np.concatenate([np.empty(0, np.int32), *(ids for _, (ids, _) in samples)]),
        loss_mask=np.concatenate([np.empty(0, np.uint8), *(mask for _, (_, mask) in samples)]),
        rejected=rejected,
        repairs=repairs,
    )
