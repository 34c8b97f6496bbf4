"""The shard format: where each tensor of each sample lies in a safetensors file.

Invariant: the layout is a pure function of the samples' lengths and the run's format, sample after sample, without
holes or padding; so the writer, the index and the reader agree without talking to each other, and one sample is one
byte range: `data_offset + num_tokens_before * bytes_per_token`.

Shape legend: S tokens of a sample, K target layers, H hidden size.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hiddenq.contracts.errors import DamagedShard, UsageError
from hiddenq.contracts.run import RunConfig

METADATA_KEY = "hiddenq"
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor in a shard; `begin` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """What is stored for each token."""

    target_layer_ids: tuple[int, ...]
    hidden_size: int
    model_dtype: str
    storage_dtype: str
    final_hidden_state: bool

    def __post_init__(self) -> None:
        if self.hidden_size * ITEM_BYTES[SAFETENSORS_DTYPES[self.storage_dtype]] % 8:
            raise UsageError(
                f"--storage-dtype {self.storage_dtype}: hidden size {self.hidden_size} does not fill whole 8-byte "
                "words, so tensors would lie unaligned; use a wider dtype"
            )

    @classmethod
    def of_run(cls, config: RunConfig) -> ShardFormat:
        """The format of a run's shards."""
        return cls(
            target_layer_ids=config.target_layer_ids,
            hidden_size=config.model.hidden_size,
            model_dtype=config.model.dtype,
            storage_dtype=config.storage_dtype,
            final_hidden_state=config.final_hidden_state,
        )

    @property
    def has_scales(self) -> bool:
        """Whether `hidden_states_scale` stands beside `hidden_states`."""
        return self.storage_dtype == "float8_e4m3fn" and bool(self.target_layer_ids)

    def columns(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, safetensors dtype and shape after [S] of each tensor of a sample, in file order.

        `hidden_states` is [S, K, H] and `final_hidden_state` [S, H], both in the storage dtype; only where that is fp8
        the final state stays in the model's.
        """
        layers, hidden = len(self.target_layer_ids), self.hidden_size
        storage = SAFETENSORS_DTYPES[self.storage_dtype]
        final = SAFETENSORS_DTYPES[self.model_dtype] if storage == "F8_E4M3" else storage
        columns: list[tuple[str, str, tuple[int, ...]]] = []
        if layers:
            columns.append(("hidden_states", storage, (layers, hidden)))
        if self.has_scales:
            columns.append(("hidden_states_scale", "F32", (layers, 1)))
        if self.final_hidden_state:
            columns.append(("final_hidden_state", final, (hidden,)))
        return [*columns, ("input_ids", "I64", ()), ("loss_mask", "I64", ())]

    @functools.cached_property
    def token_layout(self) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
        """Each of `columns()` with the bytes that it takes for a token."""
        return tuple((name, dtype, tail, _product(tail) * ITEM_BYTES[dtype]) for name, dtype, tail in self.columns())

    @functools.cached_property
    def bytes_per_token(self) -> int:
        """Bytes stored for one token, ids and mask included."""
        return sum(width for *_, width in self.token_layout)

    def sample_tensors(self, sample_id: int, num_tokens: int, begin: int) -> list[TensorSpec]:
        """The tensors of one sample that starts at `begin`."""
        specs = []
        for name, dtype, tail, width in self.token_layout:
            end = begin + num_tokens * width
            specs.append(
                TensorSpec(name=f"{sample_id}.{name}", dtype=dtype, shape=(num_tokens, *tail), begin=begin, end=end)
            )
            begin = end
        return specs


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """A whole shard: its header bytes and its tensors in file order."""

    header: bytes
    """The length field and the JSON header, as they stand at the start of the file."""
    tensors: tuple[TensorSpec, ...]

    @property
    def data_offset(self) -> int:
        """Bytes before the first sample."""
        return len(self.header)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + (self.tensors[-1].end if self.tensors else 0)


def layout_shard(
    shard_format: ShardFormat, samples: Sequence[tuple[int, int]], metadata: dict[str, Any]
) -> ShardLayout:
    """Lay out a shard for (sample_id, num_tokens) pairs; `metadata` becomes the one metadata key `hiddenq`.

    The header is padded with spaces to a multiple of 8 bytes, as safetensors does.
    """
    tensors: list[TensorSpec] = []
    begin = 0
    for sample_id, num_tokens in samples:
        tensors += shard_format.sample_tensors(sample_id, num_tokens, begin)
        begin += num_tokens * shard_format.bytes_per_token
    fields: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(metadata, sort_keys=True)}}
    for spec in tensors:
        fields[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [spec.begin, spec.end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return ShardLayout(header=struct.pack("<Q", len(text)) + text, tensors=tuple(tensors))


def header_num_bytes(prefix: bytes, *, name: str) -> int:
    """Length of a file's header, its 8-byte length field included, from the file's first 8 bytes.

    Raises:
        DamagedShard: fewer than 8 bytes, or a length that no safetensors file has.
    """
    if len(prefix) < 8:
        raise DamagedShard(f"{name}: expected a safetensors header, found {len(prefix)} bytes")
    (size,) = struct.unpack("<Q", prefix[:8])
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise DamagedShard(f"{name}: header of {size} bytes; expected 2 to {MAX_HEADER_BYTES}")
    return 8 + int(size)


def parse_header(header: bytes, *, name: str, num_bytes: int) -> tuple[dict[str, TensorSpec], dict[str, Any]]:
    """Tensors by name and hiddenq's metadata, from a file's header (length field included).

    Nothing in a header is trusted: offsets must tile the `num_bytes` of the file exactly and agree with the shapes.

    Raises:
        DamagedShard: the header is not that of a whole safetensors file of `num_bytes` bytes.
    """
    expected = header_num_bytes(header[:8], name=name)
    if len(header) != expected:
        raise DamagedShard(f"{name}: header cut: expected {expected} bytes, found {len(header)}")
    try:
        fields = json.loads(header[8:], object_pairs_hook=_once)
        metadata = json.loads(fields.pop("__metadata__", {}).get(METADATA_KEY, "{}"))
        if not isinstance(metadata, dict):
            raise ValueError(f"its metadata is {type(metadata).__name__}, expected an object")
        specs = {
            tensor: TensorSpec(
                name=tensor,
                dtype=str(field["dtype"]),
                shape=tuple(int(size) for size in field["shape"]),
                begin=int(field["data_offsets"][0]),
                end=int(field["data_offsets"][1]),
            )
            for tensor, field in fields.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise DamagedShard(f"{name}: header is not safetensors: {error!r}") from error
    position = 0
    for spec in sorted(specs.values(), key=lambda spec: (spec.begin, spec.end)):
        item = ITEM_BYTES.get(spec.dtype)
        size = _product(spec.shape) * item if item and all(axis >= 0 for axis in spec.shape) else -1
        if spec.begin != position or spec.end - spec.begin != size:
            raise DamagedShard(f"{name}: {spec.name}: offsets {spec.begin} to {spec.end} do not fit its shape")
        position = spec.end
    if expected + position != num_bytes:
        raise DamagedShard(f"{name}: expected {expected + position} bytes by its header, found {num_bytes}")
    return specs, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that stands there twice would mean one thing to us and another to other readers."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands there twice")
    return fields


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
