"""Where an order of samples is cut into batches.

Invariant: batches partition the samples, none of them empty; each but a lone sample's keeps to the budget of padded
tokens and to the shard size; and no batch mixes samples whose rotary scaling would depend on each other. All of it is
a pure function of the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hiddenq.contracts.shard import ShardFormat
from hiddenq.model_identity import rope_parameters

MAX_LENGTH = (1 << 24) - 1
"""The longest sample that the order of samples can hold."""
MAX_SAMPLES = 65_535
"""A GPU's grid has no more rows (CUDA's limit of its second axis)."""
_HEADER_BYTES_PER_SAMPLE = 640
_HEADER_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class RotaryLimits:
    """Where a model's rotary factors depend on the longest sample of a batch."""

    longrope_original: int | None = None
    """Above so many tokens the long factors count, for the whole batch."""
    dynamic_original: int | None = None
    """Above so many tokens each length has factors of its own."""

    @classmethod
    def of(cls, text_config: Any) -> RotaryLimits:
        """The limits in a decoder's config."""
        longrope = dynamic = None
        for rope in rope_parameters(text_config):
            original = rope.get("original_max_position_embeddings") or text_config.max_position_embeddings
            if rope.get("rope_type") == "longrope":
                longrope = int(original)
            elif "dynamic" in str(rope.get("rope_type")):
                dynamic = int(text_config.max_position_embeddings)
        return cls(longrope_original=longrope, dynamic_original=dynamic)

    def group(self, num_tokens: int) -> int:
        """Samples of different groups must not share a batch."""
        if self.dynamic_original is not None and num_tokens > self.dynamic_original:
            return num_tokens
        return -1 if self.longrope_original is not None and num_tokens > self.longrope_original else 0

    def shortest_beside(self, num_tokens: int) -> int:
        """The shortest sample that may share a batch with one of `num_tokens`."""
        if self.dynamic_original is not None and num_tokens > self.dynamic_original:
            return num_tokens
        if self.longrope_original is not None and num_tokens > self.longrope_original:
            return self.longrope_original + 1
        return 1


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What a batch must keep to."""

    token_budget: int
    """Padded tokens."""
    max_shard_bytes: int
    bytes_per_token: int
    rotary: RotaryLimits

    @classmethod
    def of(cls, *, token_budget: int, max_shard_bytes: int, shard: ShardFormat, rotary: RotaryLimits) -> BatchLimits:
        """The limits of a run."""
        return cls(
            token_budget=token_budget,
            max_shard_bytes=max_shard_bytes,
            bytes_per_token=shard.bytes_per_token,
            rotary=rotary,
        )

    @property
    def max_sample_tokens(self) -> int:
        """The longest sample that fits a batch of its own."""
        room = self.max_shard_bytes - _HEADER_BYTES - _HEADER_BYTES_PER_SAMPLE
        return min(self.token_budget, room // self.bytes_per_token, MAX_LENGTH)

    def fits(self, num_samples: int, num_tokens: int, padded_length: int) -> bool:
        """Whether a batch may be so large."""
        header = _HEADER_BYTES + _HEADER_BYTES_PER_SAMPLE * num_samples
        return (
            num_samples <= MAX_SAMPLES
            and num_samples * padded_length <= self.token_budget
            and num_tokens * self.bytes_per_token + header <= self.max_shard_bytes
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Successive samples of the plan's order that are run together."""

    num_samples: int
    num_tokens: int
    padded_length: int
    """Tokens of its longest sample."""


def cut_batches(lengths: Iterable[int], limits: BatchLimits) -> Iterator[Batch]:
    """Cut an order of samples, given by their lengths, into batches as large as the limits allow."""
    num_samples = num_tokens = padded_length = 0
    group = 0
    for length in lengths:
        longest = max(padded_length, length)
        same = limits.rotary.group(length) == group
        if num_samples and not (same and limits.fits(num_samples + 1, num_tokens + length, longest)):
            yield Batch(num_samples=num_samples, num_tokens=num_tokens, padded_length=padded_length)
            num_samples = num_tokens = 0
            longest = length
        group = limits.rotary.group(length)
        num_samples, num_tokens, padded_length = num_samples + 1, num_tokens + length, longest
    if num_samples:
        yield Batch(num_samples=num_samples, num_tokens=num_tokens, padded_length=padded_length)
