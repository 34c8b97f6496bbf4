"""A run as a torch dataset: any sample by its position, and batches padded at the end.

Invariant: position i is the i-th of `sample_ids` in every process, epoch and order of calls; the dataset holds no open
connection, so DataLoader workers may be forked or spawned. A batch's samples are read at the same time.

Shape legend: B samples, S tokens (of the longest), K target layers, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hiddenq.contracts.errors import UsageError
from hiddenq.reader.decode import Sample
from hiddenq.reader.index import Integers
from hiddenq.reader.run import Run, open_run


class HiddenStatesDataset(Dataset[Sample]):
    """Map-style dataset over a run; use it with `collate_fn=hiddenq.reader.collate`."""

    def __init__(
        self,
        run: Run | str | Path,
        *,
        sample_ids: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        threads: int = 8,
    ) -> None:
        """Take a run, or its location. Samples are read by their ranges, which no checksum covers: run `hiddenq verify`
        before you train, or give it `run.checked()`.

        Args:
            sample_ids: which samples, in this order; None for all, ascending.
            dtype: of the states; None for the stored one (the model's for fp8).
            threads: samples of a batch that are read at a time.

        Raises:
            UsageError: a sample that the run has not, or no thread.
        """
        self.run = run if isinstance(run, Run) else open_run(run)
        ids = self.run.sample_ids if sample_ids is None else np.asarray(sample_ids, np.int64)
        missing = np.setdiff1d(ids, self.run.sample_ids)
        if len(missing):
            raise UsageError(f"sample_ids: {len(missing)} are not in run {self.run.config.run}, first {missing[0]}")
        self.sample_ids: Integers = ids
        if threads < 1:
            raise UsageError(f"threads {threads}: at least 1")
        self.dtype = dtype
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> Integers:
        """int64 [N]: tokens of each sample, for samplers that group by length."""
        lengths: Integers = self.run.lengths[np.searchsorted(self.run.sample_ids, self.sample_ids)]
        return lengths

    def __getitem__(self, position: int) -> Sample:
        return self.run.read(int(self.sample_ids[position]), self.dtype)

    def __getitems__(self, positions: Sequence[int]) -> list[Sample]:
        """Several samples at once: DataLoader calls this with the positions of a batch."""
        if self._pool is None or self._pid != os.getpid():
            self._pool, self._pid = ThreadPoolExecutor(self._threads, thread_name_prefix="read"), os.getpid()
        return list(self._pool.map(self.__getitem__, positions))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Samples as one batch, padded with zeros at the end.

    Returns:
        `sample_ids` and `lengths` int64 [B]; `input_ids`, `attention_mask` and `loss_mask` int64 [B, S];
        `hidden_states` [B, S, K, H] and `final_hidden_state` [B, S, H] where they are stored.
    """
    lengths = torch.tensor([len(sample) for sample in samples], device="cpu")
    longest = int(lengths.max())
    batch = {
        "sample_ids": torch.tensor([sample.sample_id for sample in samples], device="cpu"),
        "lengths": lengths,
        "attention_mask": (torch.arange(longest, device="cpu")[None] < lengths[:, None]).long(),
    }
    for name in ("input_ids", "loss_mask", "hidden_states", "final_hidden_state"):
        tensors = [getattr(sample, name) for sample in samples]
        if tensors[0] is None:
            continue
        padded = tensors[0].new_zeros((len(samples), longest, *tensors[0].shape[1:]))
        for row, tensor in zip(padded, tensors, strict=True):
            row[: len(tensor)] = tensor
        batch[name] = padded
    return batch
