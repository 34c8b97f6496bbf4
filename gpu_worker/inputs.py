"""From token rows to a padded batch, and where each sample's bytes will be.

Invariant: rows are padded on the right with id 0, so a causal model's real tokens never see a pad; positions are
clamped to each row's last real index, so no rotary scaling that looks at the longest position sees the padding either;
a row's bytes begin where the shard's layout says, so nothing is moved after the GPU wrote it.

Shape legend: B rows, S padded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.gather import Destination
from hiddenq.contracts.errors import BadMessage, DamagedShard
from hiddenq.contracts.messages import BatchJob
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage.runfiles import TokenRow


@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """The samples of one forward pass, on the host (pinned where a GPU will read them)."""

    sample_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    begins: tuple[int, ...]
    """Byte of the payload at which each row's sample begins."""
    num_bytes: int
    """Size of the payload."""
    input_ids_BS: Tensor
    """int32"""
    loss_mask_BS: Tensor
    """uint8"""
    positions_BS: Tensor
    """int32, clamped to each row's last real index."""
    lengths_B: Tensor
    """int32"""
    begins_B: Tensor
    """int64"""

    @property
    def num_rows(self) -> int:
        """Samples."""
        return len(self.lengths)

    @property
    def padded_length(self) -> int:
        """Tokens a row, padding included."""
        return int(self.input_ids_BS.shape[1])

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that go through the model."""
        return self.num_rows * self.padded_length


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A padded batch where the model reads it."""

    input_ids_BS: Tensor
    """int64"""
    positions_BS: Tensor
    """int64"""
    mask_BS: Tensor | None
    """int64, 1 for real tokens; None where the model needs no mask."""
    destination: Destination

    def rows(self, first: int, last: int) -> DeviceBatch:
        """Some of the rows."""
        return DeviceBatch(
            input_ids_BS=self.input_ids_BS[first:last],
            positions_BS=self.positions_BS[first:last],
            mask_BS=None if self.mask_BS is None else self.mask_BS[first:last],
            destination=self.destination.rows(first, last),
        )


def pad_rows(
    rows: Sequence[TokenRow], shard_format: ShardFormat, *, padded_length: int, vocab_size: int, pinned: bool = False
) -> PaddedBatch:
    """Pad token rows to one length and lay out their bytes.

    Raises:
        DamagedShard: a row is longer than the padded length or holds an id that the model does not have.
    """
    lengths = tuple(len(row.input_ids) for row in rows)
    shape = (len(rows), padded_length)
    ids_BS = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
    mask_BS = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
    positions_BS = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
    ids, mask, positions = ids_BS.numpy(), mask_BS.numpy(), positions_BS.numpy()
    ascending = np.arange(padded_length, dtype=np.int32)
    for place, row in enumerate(rows):
        length = lengths[place]
        if not 0 < length <= padded_length:
            raise DamagedShard(f"sample {row.sample_id}: {length} tokens, but its batch is padded to {padded_length}")
        low, high = int(row.input_ids.min()), int(row.input_ids.max())
        if low < 0 or high >= vocab_size:
            raise DamagedShard(
                f"sample {row.sample_id}: token id {low if low < 0 else high}; the model has ids 0 to {vocab_size - 1}"
            )
        ids[place, :length] = row.input_ids
        mask[place, :length] = row.loss_mask
        np.minimum(ascending, length - 1, out=positions[place])
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64) * shard_format.bytes_per_token])
    lengths_B = torch.tensor(lengths, dtype=torch.int32, pin_memory=pinned)
    begins_B = torch.tensor(begins[:-1].tolist(), dtype=torch.int64, pin_memory=pinned)
    return PaddedBatch(
        sample_ids=tuple(row.sample_id for row in rows),
        lengths=lengths,
        begins=tuple(int(begin) for begin in begins[:-1]),
        num_bytes=int(begins[-1]),
        input_ids_BS=ids_BS,
        loss_mask_BS=mask_BS,
        positions_BS=positions_BS,
        lengths_B=lengths_B,
        begins_B=begins_B,
    )


def check_planned(job: BatchJob, config: RunConfig) -> None:
    """Refuse a batch that the run's plan can't hold, before a byte is read or set aside for it.

    Raises:
        BadMessage: a batch id past the plan's last one, or more padded tokens than any batch holds.
    """
    if int(job.batch_id) >= config.num_batches:
        raise BadMessage(f"batch {job.batch_id}: run {config.run} has {config.num_batches} batches; not one of them")
    if job.num_samples * job.padded_length > config.token_budget:
        raise BadMessage(
            f"batch {job.batch_id}: {job.num_samples} samples of {job.padded_length} padded tokens, expected at most "
            f"{config.token_budget} (the token budget of run {config.run})"
        )


def check_rows(job: BatchJob, rows: Sequence[TokenRow]) -> None:
    """Hold token rows against what the batch's message says of them.

    Raises:
        DamagedShard: another number of samples or tokens.
    """
    found = (len(rows), sum(len(row.input_ids) for row in rows))
    if found != (job.num_samples, job.num_tokens):
        raise DamagedShard(
            f"batch {job.batch_id}: expected {job.num_samples} samples with {job.num_tokens} tokens, found "
            f"{found[0]} with {found[1]} in token part {job.token_part}"
        )
