"""One sample of each length band recomputed alone and held against what its batch gave.

Invariant: the sample chosen is the shortest of its batch, the one with the most padding beside it: on the longest the
check could not fail. It runs through the same hooks and gather, and costs one short forward pass a band.

Shape legend: S tokens of the sample, H hidden size, C stored columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.extraction import Extractor
from gpu_worker.gather import Destination, load_states
from gpu_worker.inputs import DeviceBatch, PaddedBatch
from hiddenq import telemetry
from hiddenq.contracts.errors import RedisAway
from hiddenq.contracts.manifest import SelfCheck
from hiddenq.contracts.run import RunConfig

TOLERANCES = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
"""Relative difference above which a self-check is a warning, by the model's dtype: far above what other kernels and
batch sizes cause, far below what padding that leaks into a sample causes."""


def length_band(padded_length: int) -> int:
    """Lengths of a band share their power of two: 17 to 32 tokens are band 5."""
    return (padded_length - 1).bit_length()


def shortest_row(batch: PaddedBatch) -> int:
    """The row with the most padding."""
    return min(range(batch.num_rows), key=batch.lengths.__getitem__)


@dataclass(frozen=True, kw_only=True)
class PendingCheck:
    """A check whose figures the device has yet to compute."""

    sample_id: int
    num_tokens: int
    padded_length: int
    differences_C2: Tensor
    """float32: for each column the largest difference, and the layer's largest magnitude."""
    typical_C: Tensor
    """float32: for each column the median token's relative difference."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> PendingCheck:
        """The same check with its figures elsewhere."""
        return replace(self, differences_C2=move(self.differences_C2), typical_C=move(self.typical_C))

    def worst(self, columns: list[str]) -> tuple[float, str]:
        """The largest difference over all columns, relative to the column's largest magnitude, and where."""
        found = self.differences_C2.tolist()
        relative = [difference / magnitude if magnitude else difference for difference, magnitude in found]
        place = max(range(len(relative)), key=relative.__getitem__)
        return relative[place], columns[place]

    def found(self, columns: list[str], batch_id: str, worker: str) -> SelfCheck:
        """What is recorded of it, once the figures are on the host."""
        difference, layer = self.worst(columns)
        return SelfCheck(
            batch_id=batch_id,
            sample_id=self.sample_id,
            num_tokens=self.num_tokens,
            padded_length=self.padded_length,
            worker=worker,
            max_relative_difference=difference,
            worst_layer=layer,
        )

    def typical(self) -> float:
        """The largest median over all columns: blind to a router that sends single tokens elsewhere."""
        return float(self.typical_C.max())


def compare_alone(extractor: Extractor, batch: PaddedBatch, on_device: DeviceBatch, row: int) -> PendingCheck:
    """Run one row of a batch alone, without padding, and compare; nothing here waits for the device or a compiler."""
    length, whole = batch.lengths[row], on_device.destination
    payload = torch.empty(
        length * extractor.shard_format.bytes_per_token, dtype=torch.uint8, device=whole.payload.device
    )
    alone = DeviceBatch(
        input_ids_BS=_like_a_batch(on_device.input_ids_BS[row : row + 1, :length]),
        positions_BS=_like_a_batch(on_device.positions_BS[row : row + 1, :length]),
        mask_BS=None,
        destination=Destination(
            payload=payload,
            lengths_B=whole.lengths_B[row : row + 1],
            begins_B=torch.zeros_like(whole.begins_B[row : row + 1]),
            nonfinite_CB=torch.zeros_like(whole.nonfinite_CB[:, row : row + 1]),
            bytes_per_token=whole.bytes_per_token,
            host_lengths=(length,),
            host_begins=(0,),
        ),
    )
    extractor.run(alone)
    hidden = extractor.decoder.hidden_size
    differences, typical = [], []
    for column in extractor.columns:  # one after the other: in float32 all of a long sample would not fit
        [(_, mine)] = load_states((column,), whole.payload, batch.begins[row], length, hidden)
        [(_, reference)] = load_states((column,), payload, 0, length, hidden)
        differences.append(torch.stack([(mine - reference).abs().max(), reference.abs().max()]))
        typical.append(token_differences(mine, reference).median())
    return PendingCheck(
        sample_id=batch.sample_ids[row],
        num_tokens=length,
        padded_length=batch.padded_length,
        differences_C2=torch.stack(differences),
        typical_C=torch.stack(typical),
    )


def report_check(found: SelfCheck, typical: float, config: RunConfig, record: Callable[[str, SelfCheck], None]) -> None:
    """Say it where the typical difference is above the tolerance; record it, which a Redis that is away forgoes."""
    if typical > TOLERANCES[config.model.dtype]:
        telemetry.logger().error(
            "self_check_differs",
            batch=found.batch_id,
            sample=found.sample_id,
            layer=found.worst_layer,
            typical=typical,
            largest=found.max_relative_difference,
        )
    try:
        record(config.run, found)
    except RedisAway as away:
        telemetry.logger().warning("self_check_not_recorded", error=str(away))


def _like_a_batch(part_1S: Tensor) -> Tensor:
    """A copy with the strides of a whole batch: for those of a slice a compiled layer would be compiled anew."""
    return part_1S.clone(memory_format=torch.contiguous_format)


def token_differences(mine_SH: Tensor, reference_SH: Tensor) -> Tensor:
    """[S], of each token: |mine - reference| / |reference|."""
    difference_S = torch.linalg.vector_norm(mine_SH - reference_SH, dim=-1)
    relative_S: Tensor = difference_S / torch.linalg.vector_norm(reference_SH, dim=-1).clamp_min(1e-30)
    return relative_S
