"""The header of a shard: read, bounded, and held against what the run writes.

Invariant: what was accepted lies exactly where the format says, sample after sample; a header that is longer than one
of so many samples can be is never parsed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hiddenq.contracts.errors import DamagedShard
from hiddenq.contracts.shard import ShardFormat, TensorSpec, header_num_bytes, parse_header
from hiddenq.storage import ObjectInfo, ObjectStore

_FIRST_READ_BYTES = 64 << 10
MAX_TENSOR_HEADER_BYTES = 256
"""A tensor's entry in a header has about 100."""
MAX_METADATA_BYTES = 1 << 20
"""Of a shard: what its worker says about itself."""


@dataclass(frozen=True, kw_only=True)
class ShardHeader:
    """The checked header of one shard."""

    key: str
    num_bytes: int
    data_offset: int
    samples: tuple[tuple[int, int], ...]
    """(sample_id, num_tokens) in file order."""
    metadata: dict[str, object]
    raw: bytes


def read_header(store: ObjectStore, info: ObjectInfo, shard_format: ShardFormat, num_samples: int) -> ShardHeader:
    """Read and check the header of a shard of `num_samples` samples: one ranged read, two if it is long.

    Raises:
        DamagedShard: the object is not a whole shard of this format.
    """
    head = store.get_bytes(info.key, 0, min(_FIRST_READ_BYTES, info.num_bytes))
    size = header_size(head[:8], info, shard_format, num_samples)
    if size > len(head):
        head = store.get_bytes(info.key, 0, size)
    specs, metadata = parse_header(head[:size], name=info.key, num_bytes=info.num_bytes)
    return ShardHeader(
        key=info.key,
        num_bytes=info.num_bytes,
        data_offset=size,
        samples=samples_of(specs, shard_format, name=info.key),
        metadata=metadata,
        raw=head[:size],
    )


def header_size(prefix: bytes, info: ObjectInfo, shard_format: ShardFormat, num_samples: int) -> int:
    """Bytes of a shard's header, from its first 8; what a shard of so many samples can't have is never parsed.

    Raises:
        DamagedShard: it is longer than the object, or than such a header is.
    """
    size = header_num_bytes(prefix, name=info.key)
    if size > info.num_bytes:
        raise DamagedShard(f"{info.key}: header of {size} bytes in an object of {info.num_bytes}")
    limit = MAX_METADATA_BYTES + num_samples * len(shard_format.columns()) * MAX_TENSOR_HEADER_BYTES
    if size > limit:
        raise DamagedShard(f"{info.key}: header of {size} bytes; one of {num_samples} samples has {limit} at most")
    return size


def samples_of(specs: dict[str, TensorSpec], shard_format: ShardFormat, *, name: str) -> tuple[tuple[int, int], ...]:
    """(sample_id, num_tokens) in file order, from tensors that must be laid out as the format says.

    Raises:
        DamagedShard: a tensor is missing, too many, or has another dtype, shape or place.
    """
    lengths = {
        spec.begin: (spec.name.removesuffix(".input_ids"), spec.shape[0])
        for spec in specs.values()
        if spec.name.endswith(".input_ids") and len(spec.shape) == 1
    }
    samples: list[tuple[int, int]] = []
    begin = 0
    for _, (text, num_tokens) in sorted(lengths.items()):
        if not (text.isascii() and text.isdigit() and len(text) < 19) or text != str(int(text)):
            raise DamagedShard(f"{name}: tensor {text[:40]!r}.input_ids: expected a sample id before the dot")
        sample_id = int(text)
        for expected in shard_format.sample_tensors(sample_id, num_tokens, begin):
            found = specs.get(expected.name)
            if found != expected:
                raise DamagedShard(f"{name}: {expected.name}: expected {_place(expected)}, found {_place(found)}")
            begin = expected.end
        samples.append((sample_id, num_tokens))
    if len(specs) != len(samples) * len(shard_format.columns()):
        raise DamagedShard(
            f"{name}: expected {len(shard_format.columns())} tensors for each of {len(samples)} samples, "
            f"found {len(specs)} in all"
        )
    return tuple(samples)


def _place(spec: TensorSpec | None) -> str:
    return f"{spec.dtype} {list(spec.shape)} at {spec.begin} to {spec.end}" if spec else "no such tensor"
