"""Blocks of rows: what is read in one process and decoded in another.

Invariant: a row's number is its place among all rows of all files, in the order given, counted while reading; no row
can change another's number, and no row that can't be decoded takes its block with it. Blank lines are not rows.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from hiddenq.contracts.errors import DatasetError
from producer.conversation import RowRejected

_BLOCK_BYTES = 256 << 10
_BLOCK_ROWS = 512
_READ_BYTES = 1 << 20
_COLUMNS = (
    "messages",
    "conversations",
    "conversation",
    "system",
    "tools",
    "prompt",
    "completion",
    "text",
    "input_ids",
    "loss_mask",
)
"""Columns that some schema reads; a file's others are left on disk."""
_BOM = b"\xef\xbb\xbf"


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
    first_row: int = 0
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
            return replace(self, num_rows=num_rows, lines=self.lines[:num_rows])
        table = pa.ipc.open_stream(self.arrow).read_all().slice(0, num_rows)
        return replace(self, num_rows=num_rows, arrow=_encode_arrow(table.combine_chunks()))


def read_blocks(files: list[Path], limit: int | None = None) -> Iterator[Block]:
    """The rows of all files in blocks of up to 512 rows and some 256 KiB; a longer row is a block of its own.

    Raises:
        DatasetError: a file that can't be read to its end.
    """
    row = num_bytes_before = 0
    for file in files:
        try:
            for block in _file_blocks(file):
                left = block.num_rows if limit is None else limit - row
                if left <= 0:
                    return
                if left < block.num_rows:
                    block = block.head(left)
                yield replace(block, first_row=row, num_bytes_read=num_bytes_before + block.num_bytes_read)
                row += block.num_rows
            num_bytes_before += file.stat().st_size
        except (OSError, EOFError, pa.ArrowException, zstandard.ZstdError, zlib.error) as error:
            raise DatasetError(f"--data {file}: can't be read after row {row}: {error}") from error


def _file_blocks(file: Path) -> Iterator[Block]:
    with file.open("rb", buffering=0) as stream:
        magic = stream.read(8)
        stream.seek(0)
        if magic.startswith(b"PAR1"):
            yield from _parquet_blocks(file)
        elif magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            yield from _arrow_blocks(file, is_stream=not magic.startswith(b"ARROW1"))
        elif magic.startswith(b"\x1f\x8b"):
            yield from _line_blocks(_chunks(gzip.GzipFile(fileobj=stream)), stream, file)
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            yield from _line_blocks(_zstd_chunks(stream), stream, file)
        else:
            yield from _line_blocks(_chunks(stream), stream, file)


def _parquet_blocks(file: Path) -> Iterator[Block]:
    parquet = pa.parquet.ParquetFile(file)
    num_bytes, num_rows = file.stat().st_size, 0
    for batch in parquet.iter_batches(batch_size=_BLOCK_ROWS, columns=_wanted(parquet.schema_arrow.names)):
        num_rows += batch.num_rows
        yield from _batch_blocks(batch, num_bytes * num_rows // parquet.metadata.num_rows)


def _arrow_blocks(file: Path, *, is_stream: bool) -> Iterator[Block]:
    with pa.memory_map(str(file)) as source:
        if is_stream:
            batches = iter(pa.ipc.open_stream(source))
        else:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            yield from _batch_blocks(batch.select(_wanted(batch.schema.names)), source.tell())


def _batch_blocks(batch: pa.RecordBatch, num_bytes_read: int) -> Iterator[Block]:
    rows = max(1, min(_BLOCK_ROWS, batch.num_rows * _BLOCK_BYTES // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, rows):
        piece = batch.slice(start, rows)
        arrow = _encode_arrow(pa.Table.from_batches([piece]))
        yield Block(num_rows=piece.num_rows, num_bytes_read=num_bytes_read, arrow=arrow)


def _line_blocks(chunks: Iterator[bytes], raw: Any, file: Path) -> Iterator[Block]:
    """Lines in `chunks`; `raw` is the file beneath, whose position tells how far reading has come."""
    lines: list[bytes] = []
    size = 0
    source = _lines(chunks)
    opening = list(itertools.islice(source, 2))
    _refuse_array(opening, file)
    for line in itertools.chain(opening, source):
        lines.append(line)
        size += len(line)
        if size >= _BLOCK_BYTES or len(lines) >= _BLOCK_ROWS:
            yield Block(num_rows=len(lines), num_bytes_read=raw.tell(), lines=lines)
            lines, size = [], 0
    if lines:
        yield Block(num_rows=len(lines), num_bytes_read=raw.tell(), lines=lines)


def _chunks(stream: Any) -> Iterator[bytes]:
    while chunk := stream.read(_READ_BYTES):
        yield chunk


def _zstd_chunks(stream: Any) -> Iterator[bytes]:
    """What one frame after the other unpacks to; `zstandard`'s own reader takes a cut frame for the file's end."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    is_whole = True
    while packed := stream.read(_READ_BYTES >> 3):
        while packed:
            yield frame.decompress(packed)
            packed, is_whole = frame.unused_data, frame.eof
            if is_whole:
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not is_whole:
        raise EOFError("the file ends before its last zstd frame does")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines that are not blank, without their ends; of any length, each byte copied a bounded number of times."""
    pieces: list[bytes] = []
    is_first = True
    for chunk in chunks:
        if is_first and chunk:
            chunk, is_first = chunk.removeprefix(_BOM), False
        head, *rest = chunk.split(b"\n")
        pieces.append(head)
        for line in rest:
            whole = b"".join(pieces)
            pieces = [line]
            if not whole.isspace() and whole:
                yield whole
    whole = b"".join(pieces)
    if whole and not whole.isspace():
        yield whole


def _refuse_array(opening: list[bytes], file: Path) -> None:
    """A file that is one JSON array can't be streamed; a first row that is one, before others, is merely a bad row."""
    first = opening[0].lstrip() if opening else b""
    opens_array = first.startswith(b"[") and first[1:].lstrip()[:1] in (b"", b"{")
    if opens_array and not any(_is_json(line) for line in opening[1:]):
        raise DatasetError(
            f"--data {file}: it is one JSON array; rows must stand one a line: jq -c '.[]' {file.name} > rows.jsonl"
        )


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except ValueError:
        return False
    return True


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


def _encode_arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _wanted(names: list[str]) -> list[str]:
    return [name for name in names if name in _COLUMNS] or names


def _decode_batch(batch: pa.RecordBatch) -> list[Any]:
    try:
        return [{name: _without_nulls(value) for name, value in row.items()} for row in batch.to_pylist()]
    except (UnicodeDecodeError, ValueError, OverflowError):
        if batch.num_rows > 1:
            return [row for number in range(batch.num_rows) for row in _decode_batch(batch.slice(number, 1))]
        return [RowRejected("bad_text", "a text that is not UTF-8, or a value that Python can't hold")]


def _without_nulls(value: Any) -> Any:
    """Drop null fields: a columnar file gives every structure all the fields that any of them has."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), (dict, list)):
        return [_without_nulls(item) for item in value]
    return value
