"""The small files of a run, read through an object store: `run.json`, the batch list, rejects, token rows.

Invariant: `run.json` is written after everything it describes and never changed, so whoever finds it may read the
batch list and any token row without asking whether they are whole; and a token row costs two ranged reads, because
the table that says where rows lie is read once a part and kept.

A token part is a safetensors file with `offsets` int64 [n+1], `sample_ids` int64 [n], `input_ids` int32 [T] and
`loss_mask` uint8 [T]; row r's tokens are `offsets[r]:offsets[r+1]`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError

from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, DamagedShard, RunMismatch, UnknownSchema
from hiddenq.contracts.manifest import BatchPlan, Manifest, Rejected
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import header_num_bytes, parse_header

if TYPE_CHECKING:
    from hiddenq.storage import ObjectStore

_DTYPES = {"offsets": "I64", "sample_ids": "I64", "input_ids": "I32", "loss_mask": "U8"}
_NUMPY: dict[str, npt.DTypeLike] = {"I64": "<i8", "I32": "<i4", "U8": "u1"}
_MAX_CACHED_PARTS = 16
_PIECE_BYTES = 8 << 20
_Line = TypeVar("_Line", BatchPlan, Rejected)


class TokenRow(NamedTuple):
    """One sample's tokens."""

    sample_id: int
    input_ids: npt.NDArray[np.int32]
    """int32 [S]"""
    loss_mask: npt.NDArray[np.uint8]
    """uint8 [S], 1 where the sample is supervised."""


def load_run_json(store: ObjectStore) -> RunConfig | None:
    """The run at a location, None where there is none.

    Raises:
        UnknownSchema: it was written by another version of hiddenq.
        RunMismatch: the object is not a `run.json`, or not one any more.
    """
    if store.stat(names.RUN_JSON) is None:
        return None
    where = f"{store.uri}/{names.RUN_JSON}"
    try:
        return RunConfig.parse(store.get_bytes(names.RUN_JSON))
    except UnknownSchema as error:
        raise UnknownSchema(f"{where}: {error}") from error
    except BadMessage as error:
        raise RunMismatch(
            f"{where}: not as its run wrote it ({error}); put back a copy of it (an older version, in a bucket that "
            "keeps them), or use another location"
        ) from error


def load_manifest(store: ObjectStore) -> Manifest | None:
    """The manifest at a location, None while its run goes on.

    Raises:
        UnknownSchema: it was written by another version of hiddenq.
        BadMessage: the object is not a manifest.
    """
    if store.stat(names.MANIFEST) is None:
        return None
    return Manifest.parse(store.get_bytes(names.MANIFEST))


def write_run_json(store: ObjectStore, config: RunConfig) -> None:
    """Make the run exist: call it last."""
    store.put_bytes(names.RUN_JSON, config.model_dump_json(indent=2).encode() + b"\n")


def encode_batches(batches: Iterable[BatchPlan]) -> bytes:
    """The batch list as its object holds it, one line of JSON a batch."""
    return b"".join(orjson.dumps(batch.model_dump()) + b"\n" for batch in batches)


def iterate_batches(store: ObjectStore) -> Iterator[BatchPlan]:
    """Every batch of the run, in plan order, however many there are: the list is read piece by piece.

    Raises:
        BadMessage: a line that is not a batch.
    """
    return _lines(BatchPlan, names.BATCHES, _object_lines(store, names.BATCHES))


def load_batches(store: ObjectStore) -> list[BatchPlan]:
    """Every batch of the run, in plan order.

    Raises:
        BadMessage: a line that is not a batch.
    """
    return list(iterate_batches(store))


def load_rejected(store: ObjectStore) -> list[Rejected]:
    """Every input row that was left out, in row order.

    Raises:
        BadMessage: a line that is not a reject.
    """
    return list(_lines(Rejected, names.REJECTED, store.get_bytes(names.REJECTED).splitlines()))


def read_token_rows(store: ObjectStore, part: int, first_row: int, num_samples: int) -> list[TokenRow]:
    """Rows `first_row` to `first_row + num_samples` of a token part, as writable arrays.

    Raises:
        DamagedShard: the part is not what the run wrote, or has no such rows.
    """
    table = _cache.get(store, part)
    last = first_row + num_samples
    if not 0 <= first_row < last <= len(table.sample_ids):
        raise DamagedShard(
            f"{names.token_part_key(part)}: rows {first_row} to {last - 1} asked for, it has {len(table.sample_ids)}"
        )
    begin, end = int(table.offsets[first_row]), int(table.offsets[last])
    ids = np.frombuffer(bytearray(_read(store, table, "input_ids", begin, end)), "<i4")
    mask = np.frombuffer(bytearray(_read(store, table, "loss_mask", begin, end)), "u1")
    cuts = table.offsets[first_row : last + 1] - begin
    return [
        TokenRow(
            int(table.sample_ids[first_row + row]), ids[cuts[row] : cuts[row + 1]], mask[cuts[row] : cuts[row + 1]]
        )
        for row in range(num_samples)
    ]


def forget_token_parts(store: ObjectStore) -> None:
    """Drop what this process remembers of a location's parts: for the producer, which may write them anew."""
    _cache.forget(store.uri)


@dataclass(frozen=True, kw_only=True)
class _PartTable:
    """Where the rows of one part lie."""

    key: str
    begins: dict[str, int]
    """First byte of each tensor in the object."""
    offsets: npt.NDArray[np.int64]
    sample_ids: npt.NDArray[np.int64]

    @classmethod
    def read(cls, store: ObjectStore, part: int) -> _PartTable:
        key = names.token_part_key(part)
        info = store.stat(key)
        if info is None:
            raise DamagedShard(f"{key}: missing at {store.uri}, though run.json is there; copy the run whole")
        head = store.get_bytes(key, 0, min(4096, info.num_bytes))
        size = header_num_bytes(head[:8], name=key)
        if size > len(head):
            head = store.get_bytes(key, 0, size)
        specs, _ = parse_header(head[:size], name=key, num_bytes=info.num_bytes)
        found = {name: spec.dtype for name, spec in specs.items()}
        if found != _DTYPES:
            raise DamagedShard(f"{key}: expected tensors {_DTYPES}, found {found}")

        def load(name: str) -> npt.NDArray[Any]:
            spec = specs[name]
            return np.frombuffer(store.get_bytes(key, size + spec.begin, size + spec.end), _NUMPY[spec.dtype])

        offsets, sample_ids = load("offsets"), load("sample_ids")
        num_tokens = specs["input_ids"].shape[0]
        if (
            len(offsets) != len(sample_ids) + 1
            or offsets[0] != 0
            or offsets[-1] != num_tokens
            or specs["loss_mask"].shape != (num_tokens,)
            or bool((np.diff(offsets) <= 0).any())
        ):
            raise DamagedShard(f"{key}: its offsets do not fit its {num_tokens} tokens")
        begins = {name: size + spec.begin for name, spec in specs.items()}
        return cls(key=key, begins=begins, offsets=offsets, sample_ids=sample_ids)


class _PartCache:
    """Tables of the parts read lately. A part never changes once its run exists, so an entry never grows stale."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, int], _PartTable] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, store: ObjectStore, part: int) -> _PartTable:
        with self._lock:
            table = self._tables.get((store.uri, part))
            if table is not None:
                self._tables.move_to_end((store.uri, part))
                return table
        table = _PartTable.read(store, part)
        with self._lock:
            self._tables[store.uri, part] = table
            while len(self._tables) > _MAX_CACHED_PARTS:
                self._tables.popitem(last=False)
        return table

    def forget(self, uri: str) -> None:
        with self._lock:
            for key in [key for key in self._tables if key[0] == uri]:
                del self._tables[key]


_cache = _PartCache()


def _read(store: ObjectStore, table: _PartTable, name: str, begin: int, end: int) -> bytes:
    size, first = (4 if name == "input_ids" else 1), table.begins[name]
    data = store.get_bytes(table.key, first + begin * size, first + end * size)
    if len(data) != (end - begin) * size:
        raise DamagedShard(f"{table.key}: {name}: expected {(end - begin) * size} bytes, read {len(data)}")
    return data


def _object_lines(store: ObjectStore, key: str) -> Iterator[bytes]:
    info = store.stat(key)
    num_bytes = info.num_bytes if info is not None else 1  # reading says that it is missing
    left = b""
    for begin in range(0, num_bytes, _PIECE_BYTES):
        *lines, left = (left + store.get_bytes(key, begin, min(begin + _PIECE_BYTES, num_bytes))).split(b"\n")
        yield from lines
    if left:
        yield left


def _lines(cls: type[_Line], key: str, lines: Iterable[bytes]) -> Iterator[_Line]:
    for number, line in enumerate(lines, start=1):
        try:
            yield cls.model_validate_json(line)
        except ValidationError as error:
            raise BadMessage(f"{key} line {number}: not a {cls.__name__}: {error.errors()[0]['msg']}") from error
