"""Files of rows in the formats that datasets come in, read as blocks; what a file is, its first bytes say.

Invariant: a row's number is its place among all rows of all files, in the order given, counted while reading. Memory
holds a block and what its format needs to unpack it, never a file: compressed bytes are unpacked a piece at a time,
however well they pack, and pages of a mapped file are given back as reading goes on. Blank lines are not rows.
"""

from __future__ import annotations

import gzip
import itertools
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from hiddenq.contracts.errors import DatasetError
from producer.blocks import Block, encode_arrow
from producer.sources import InputFile

_BLOCK_BYTES = 256 << 10
_BLOCK_ROWS = 512
_READ_BYTES = 1 << 20
_BLOCKS_MAPPED = 64
"""After so many blocks of a mapped file, its pages are given back."""
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


def read_blocks(files: Sequence[InputFile], limit: int | None = None) -> Iterator[Block]:
    """The rows of all files in blocks of up to 512 rows and some 256 KiB; a longer row is a block of its own.

    Raises:
        DatasetError: a file that can't be read to its end.
    """
    row = num_bytes_before = 0
    for file in files:
        try:
            for block in _file_blocks(file.path):
                left = block.num_rows if limit is None else limit - row
                if left <= 0:
                    return
                if left < block.num_rows:
                    block = block.head(left)
                num_bytes_read = num_bytes_before + block.num_bytes_read
                yield replace(block, first_row=row, file=file.name, num_bytes_read=num_bytes_read)
                row += block.num_rows
            num_bytes_before += file.path.stat().st_size
        except (OSError, EOFError, pa.ArrowException, zlib.error, KeyError) as error:  # the last: columns of one name
            raise DatasetError(f"--data {file.name}: can't be read after row {row}: {error}") from error


def _file_blocks(file: Path) -> Iterator[Block]:
    with file.open("rb", buffering=0) as stream:
        magic = stream.read(8)
        stream.seek(0)
        if magic.startswith(b"PAR1"):
            yield from _parquet_blocks(file)
        elif magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            yield from _arrow_blocks(stream, is_stream=not magic.startswith(b"ARROW1"))
        elif magic.startswith(b"\x1f\x8b"):
            yield from _line_blocks(_chunks(gzip.GzipFile(fileobj=stream)), stream, file)
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            unpacked = pa.CompressedInputStream(pa.PythonFile(stream), "zstd")  # when it goes, it closes the file
            yield from _line_blocks(_chunks(unpacked), stream, file)
        else:
            yield from _line_blocks(_chunks(stream), stream, file)


def _parquet_blocks(file: Path) -> Iterator[Block]:
    parquet = pa.parquet.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False)
    num_bytes, num_rows = file.stat().st_size, 0
    for batch in parquet.iter_batches(batch_size=_BLOCK_ROWS, columns=_wanted(parquet.schema_arrow.names)):
        first, num_rows = num_rows + 1, num_rows + batch.num_rows
        yield from _batch_blocks(batch, first, num_bytes * num_rows // parquet.metadata.num_rows)


def _arrow_blocks(stream: Any, *, is_stream: bool) -> Iterator[Block]:
    pages = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)  # unmapped when nothing looks at it any more
    source = pa.BufferReader(pa.py_buffer(pages))
    reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    num_blocks, first = 0, 1
    for batch in batches:
        for block in _batch_blocks(batch.select(_wanted(batch.schema.names)), first, source.tell()):
            yield block
            first += block.num_rows
            num_blocks += 1
            if num_blocks % _BLOCKS_MAPPED == 0:
                pages.madvise(mmap.MADV_DONTNEED)


def _batch_blocks(batch: pa.RecordBatch, first: int, num_bytes_read: int) -> Iterator[Block]:
    rows = max(1, min(_BLOCK_ROWS, batch.num_rows * _BLOCK_BYTES // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, rows):
        piece = batch.slice(start, rows)
        arrow = encode_arrow(pa.Table.from_batches([piece]))
        places = range(first + start, first + start + piece.num_rows)
        yield Block(num_rows=piece.num_rows, num_bytes_read=num_bytes_read, places=places, arrow=arrow)


def _line_blocks(chunks: Iterator[bytes], raw: Any, file: Path) -> Iterator[Block]:
    """Lines in `chunks`; `raw` is the file beneath, whose position tells how far reading has come."""
    lines: list[bytes] = []
    places: list[int] = []
    size = 0
    source = _lines(chunks)
    opening = list(itertools.islice(source, 2))
    _refuse_array([line for _, line in opening], file)
    for place, line in itertools.chain(opening, source):
        lines.append(line)
        places.append(place)
        size += len(line)
        if size >= _BLOCK_BYTES or len(lines) >= _BLOCK_ROWS:
            yield Block(num_rows=len(lines), num_bytes_read=raw.tell(), places=places, lines=lines)
            lines, places, size = [], [], 0
    if lines:
        yield Block(num_rows=len(lines), num_bytes_read=raw.tell(), places=places, lines=lines)


def _chunks(stream: Any) -> Iterator[bytes]:
    while chunk := stream.read(_READ_BYTES):
        yield chunk


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1 with the blank ones, without their ends.

    They may be of any length: each byte is copied a bounded number of times.
    """
    pieces: list[bytes] = []
    number, is_first = 1, True
    for chunk in chunks:
        if is_first and chunk:
            chunk, is_first = chunk.removeprefix(_BOM), False
        head, *rest = chunk.split(b"\n")
        pieces.append(head)
        for line in rest:
            whole = b"".join(pieces)
            pieces = [line]
            if not whole.isspace() and whole:
                yield number, whole
            number += 1
    whole = b"".join(pieces)
    if whole and not whole.isspace():
        yield number, whole


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


def _wanted(names: list[str]) -> list[str]:
    return [name for name in names if name in _COLUMNS] or names
