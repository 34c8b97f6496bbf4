"""Blocks of rows: what is read in one process and decoded in another.

Invariant: a block decodes to one value a row, whatever its bytes; a row that can't be decoded does not take its block
with it, but becomes the reason why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.ipc

from producer.rejects import RowRejected


@dataclass(frozen=True)
class Suspect:
    """A row's value that may hold unpaired surrogates."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some successive rows, still encoded: lines of JSON, or an Arrow stream."""

    num_rows: int
    num_bytes_read: int
    """Bytes of input read to its end, since the first file's first."""
    places: Sequence[int]
    """Where in the file each row stands, from 1: its line, or in a columnar file its row."""
    first_row: int = 0
    file: str = ""
    """Its name, as a person knows it."""
    lines: list[bytes] | None = None
    arrow: bytes | None = None

    def decode(self) -> list[Any]:
        """Each row's value, a `Suspect`, or the `RowRejected` that says why it has none."""
        if self.lines is not None:
            return [_decode_line(line) for line in self.lines]
        assert self.arrow is not None
        return [row for batch in pa.ipc.open_stream(self.arrow) for row in _decode_batch(batch)]

    def head(self, num_rows: int) -> Block:
        """Its first rows alone."""
        if self.lines is not None:
            return replace(self, num_rows=num_rows, places=self.places[:num_rows], lines=self.lines[:num_rows])
        table = pa.ipc.open_stream(self.arrow).read_all().slice(0, num_rows)
        return replace(
            self, num_rows=num_rows, places=self.places[:num_rows], arrow=encode_arrow(table.combine_chunks())
        )


def _decode_line(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError as error:
        problem = str(error)
    # orjson refuses what Python's json takes: unpaired surrogates (mended or refused by policy later), NaN, huge ints.
    try:
        return Suspect(json.loads(line.decode("utf-8", "surrogatepass")))
    except UnicodeDecodeError as error:
        return RowRejected("bad_text", f"not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError):
        return RowRejected("not_json", problem)


def encode_arrow(table: pa.Table) -> bytes:
    """A table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _decode_batch(batch: pa.RecordBatch) -> list[Any]:
    readers = {field.name: _reader(field.type) or _without_nulls for field in batch.schema}
    try:
        return [{name: readers[name](value) for name, value in row.items()} for row in batch.to_pylist()]
    except (UnicodeDecodeError, ValueError, OverflowError):
        if batch.num_rows > 1:
            return [row for number in range(batch.num_rows) for row in _decode_batch(batch.slice(number, 1))]
        return [RowRejected("bad_text", "a text that is not UTF-8 or not the JSON it should be, or too large a number")]


def _reader(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What turns a value of an Arrow type with JSON in it into what that JSON says; None for a type without.

    `datasets` stores as JSON what differs in type from row to row.
    """
    if isinstance(kind, pa.JsonType):
        return lambda value: None if value is None else orjson.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if (item := _reader(kind.value_type)) is not None:
            return lambda value: None if value is None else [item(element) for element in value]
    elif pa.types.is_struct(kind):
        fields = {field.name: _reader(field.type) or _without_nulls for field in kind}
        if any(reader is not _without_nulls for reader in fields.values()):
            return lambda value: (
                value and {name: fields[name](field) for name, field in value.items() if field is not None}
            )
    return None


def _without_nulls(value: Any) -> Any:
    """Drop null fields: a columnar file gives every structure all the fields that any of them has."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), (dict, list)):
        return [_without_nulls(item) for item in value]
    return value
