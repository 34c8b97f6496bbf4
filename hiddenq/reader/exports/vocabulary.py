"""A drafter's smaller vocabulary: how often each token is supervised, and the maps to and from the target's ids.

Invariant: the choice is a function of the counts alone: most frequent first, the smaller id first among equals, and if
too few tokens occur, the smallest ids that are left; as speculators and SpecForge choose. Positions ascend with ids.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import torch

from hiddenq.contracts.errors import DamagedShard
from hiddenq.reader.exports.piece import save
from hiddenq.reader.run import Run
from hiddenq.storage.runfiles import read_token_rows


def count_tokens(run: Run) -> npt.NDArray[np.int64]:
    """int64 [V]: how often each id is supervised in the samples of a run, read from its token parts."""
    counts = np.zeros(run.config.model.vocab_size, np.int64)
    there = set(run.sample_ids.tolist())
    for batch in run.batches():
        for row in read_token_rows(run.store, batch.token_part, batch.first_row, batch.num_samples):
            if row.sample_id in there:
                found = np.bincount(row.input_ids[row.loss_mask != 0], minlength=len(counts))
                if len(found) > len(counts):
                    raise DamagedShard(f"sample {row.sample_id}: id {len(found) - 1} in a vocabulary of {len(counts)}")
                counts += found
    return counts


def draft_maps(
    counts: npt.NDArray[np.int64], draft_vocab_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(d2t, t2d): target id minus draft id, int64 [draft]; whether a target id has a draft id, bool [V]."""
    by_frequency = np.lexsort((np.arange(len(counts)), -counts))
    chosen = np.sort(by_frequency[:draft_vocab_size])
    in_draft = np.zeros(len(counts), np.bool_)
    in_draft[chosen] = True
    return chosen - np.arange(len(chosen)), in_draft


def token_freq(counts: npt.NDArray[np.int64]) -> bytes:
    """`token_freq.pt`: {token id: count} of the tokens that occur."""
    return save({int(token): int(counts[token]) for token in np.flatnonzero(counts)})


def npy(array: npt.NDArray[np.generic]) -> bytes:
    """An array as the bytes of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def as_tensors(d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_]) -> dict[str, torch.Tensor]:
    """The maps as SpecForge's `vocab_mapping.pt` holds them."""
    return {"d2t": torch.from_numpy(d2t.copy()), "t2d": torch.from_numpy(t2d.copy())}
