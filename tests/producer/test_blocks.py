"""Reading rows: every format gives the same rows, and none of them can spoil another."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from hiddenq.contracts.errors import DatasetError
from producer.blocks import Suspect
from producer.formats import read_blocks
from producer.rejects import RowRejected
from producer.sources import InputFile
from tests.producer.conftest import chat, encode_rows, make_encoder, write_lines

ROWS = [chat(f"question {number}", "answer " * (number % 7 + 1)) for number in range(1200)]


def read(*files: Path, limit: int | None = None) -> list[Any]:
    rows: list[Any] = []
    for block in read_blocks([InputFile.at(file) for file in files], limit):
        values = block.decode()
        assert (block.first_row, block.num_rows) == (len(rows), len(values))
        rows += values
    return rows


def write(path: Path, kind: str) -> Path:
    data = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    if kind == "jsonl":
        path.write_bytes(data)
    elif kind == "gzip":
        path.write_bytes(gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]))
    elif kind == "zstd":
        path.write_bytes(zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :]))
    else:
        table = pa.Table.from_pylist([row | {"unread": number} for number, row in enumerate(ROWS)])
        if kind == "parquet":
            pa.parquet.write_table(table, path, row_group_size=500)
        elif kind == "arrow file":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=500)
        else:
            with pa.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=500)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet", "arrow file", "arrow stream"])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "data", kind)
    assert read(file) == ROWS
    assert read(file, file) == ROWS * 2
    assert read(file, file, limit=1300) == (ROWS * 2)[:1300]
    assert read(file, limit=1) == ROWS[:1]


def test_progress_ends_at_the_size_of_all_files(tmp_path: Path) -> None:
    for kind in ("jsonl", "gzip", "zstd", "parquet"):
        file = write(tmp_path / "data", kind)
        seen = [block.num_bytes_read for block in read_blocks([InputFile.at(file)] * 2)]
        assert seen == sorted(seen)
        assert seen[-1] == 2 * file.stat().st_size


def test_a_dataset_saved_by_datasets_is_read_in_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from producer.sources import resolve_data

    saved = datasets.Dataset.from_list(ROWS).shuffle(seed=1)
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    files = resolve_data([str(tmp_path / "saved")], lambda: tmp_path)
    assert read(*(file.path for file in files)) == saved.to_list()


def test_line_ends_blank_lines_and_a_byte_order_mark_are_not_rows(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b'\xef\xbb\xbf\n{"text": 1}\r\n\n   \n\r\n{"text": 2}')
    assert read(file) == [{"text": 1}, {"text": 2}]
    file.write_bytes(b"")
    assert read(file) == []
    file.write_bytes(gzip.compress(b'{"text": 1}\n') + b"\0" * 9)  # as some tools fill up a block
    assert read(file) == [{"text": 1}]


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet", "arrow file", "arrow stream"])
def test_each_row_is_known_by_its_file_and_its_place_there(tmp_path: Path, kind: str) -> None:
    files = [InputFile.at(write(tmp_path / name, kind)) for name in ("one", "two")]
    places = [(block.file, place) for block in read_blocks(files, len(ROWS) + 10) for place in block.places]
    assert places == [(str(tmp_path / "one"), row + 1) for row in range(len(ROWS))] + [
        (str(tmp_path / "two"), row + 1) for row in range(10)
    ]


def test_a_place_counts_blank_lines_too(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b'\xef\xbb\xbf\n{"text": 1}\r\n\n   \n\r\n{"text": 2}')
    (block,) = read_blocks([InputFile.at(tmp_path / "data")])
    assert block.places == [2, 6]


def test_a_folder_may_mix_formats(tmp_path: Path) -> None:
    from producer.sources import resolve_data

    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, kind in (("a.jsonl", "jsonl"), ("b.jsonl.gz", "gzip"), ("c.parquet", "parquet"), ("d.jsonl.zst", "zstd")):
        write(folder / name, kind)
    (folder / "dataset_infos.json").write_text("{}")
    files = resolve_data([str(folder)], lambda: tmp_path)
    assert read(*(file.path for file in files)) == ROWS * 4


def test_one_bad_line_is_one_bad_row(tmp_path: Path) -> None:
    deep = b"[" * 100_000
    file = write_lines(
        tmp_path / "data", [b"{}", b"{not json", b'"\xff\xfe"', deep, b'{"a": NaN}', b'{"a": "\\ud800"}', b"[1]"]
    )
    rows = read(file)
    reasons = [row.reason if isinstance(row, RowRejected) else row for row in rows]
    assert reasons[:4] == [{}, "not_json", "bad_text", "not_json"]
    assert isinstance(rows[4], Suspect)
    assert rows[5] == Suspect({"a": "\ud800"})
    assert rows[6] == [1]


def test_a_huge_line_is_a_block_of_its_own_and_tokenised_no_further_than_needed(model: Path, tmp_path: Path) -> None:
    huge = chat("a", "lorem ipsum " * 2_000_000)
    file = write_lines(tmp_path / "data", [ROWS[0], huge, ROWS[1]])
    assert [block.num_rows for block in read_blocks([InputFile.at(file)])] == [2, 1]
    block = encode_rows(make_encoder(model, max_length=100), [ROWS[0], huge, ROWS[1]])
    assert block.lengths[1] == 100
    alone = encode_rows(make_encoder(model, max_length=100), [chat("a", "lorem ipsum " * 2_000)])
    assert block.input_ids[block.lengths[0] :][:100].tolist() == alone.input_ids.tolist()
    dropped = encode_rows(make_encoder(model, max_length=100, length_policy="drop"), [huge])
    assert [reject.reason for reject in dropped.rejected] == ["too_long"]


def test_a_conversation_of_very_many_turns_takes_the_time_of_its_kept_part(model: Path) -> None:
    texts = [f"words of turn {number}" for number in range(40_000)]
    begin = time.process_time()
    block = encode_rows(make_encoder(model, max_length=200), [chat(*texts), chat(*texts[:40])])
    assert time.process_time() - begin < 10  # a render of what precedes each turn would take hours
    whole, few = (block.input_ids[:200], block.loss_mask[:200]), (block.input_ids[200:], block.loss_mask[200:])
    assert [part.tolist() for part in whole] == [part.tolist() for part in few]
    assert 0 < whole[1].sum() < 200


def test_a_file_that_is_one_json_array_is_refused_with_the_cure(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    lines = ",\n".join(map(json.dumps, ROWS[:3]))
    for text in (json.dumps(ROWS[:2]), json.dumps(ROWS[:2], indent=1), f"[\n{lines}\n]", f"[{lines}]"):
        file.write_text(text)
        with pytest.raises(DatasetError, match=r"it is one JSON array; rows must stand one a line: jq -c '\.\[\]'"):
            read(file)


@pytest.mark.parametrize("kind", ["gzip", "zstd", "parquet"])
def test_a_cut_file_is_an_error_that_says_where(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "data", kind)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with pytest.raises(DatasetError, match=r"--data .*data: can't be read after row \d+"):
        read(file)


def test_null_fields_of_columnar_files_are_as_if_absent(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Oslo"}}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [{"role": "user", "content": "a", "name": "me"}, {"role": "assistant", "content": "b"}]},
    ]
    file = tmp_path / "data"
    pa.parquet.write_table(pa.Table.from_pylist(rows), file)
    assert read(file) == rows


def test_json_inside_columnar_files_is_read_as_what_it_says(tmp_path: Path) -> None:
    texts = ['"hi"', '[{"text": "a"}]', None, "{broken"]
    contents = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 4), contents], ["role", "content"])
    file = tmp_path / "data"
    pa.parquet.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1, 2, 3, 4], turns)}), file)
    *good, bad = read(file)
    assert [row["messages"][0] for row in good] == [
        {"role": "user", "content": "hi"}, {"role": "user", "content": [{"text": "a"}]}, {"role": "user"},
    ]  # fmt: skip
    assert isinstance(bad, RowRejected)
    assert bad.reason == "bad_text"


def peak_of_reading(file: Path) -> int:
    """Bytes by which a process of its own grows while it reads a file."""
    code = (
        "import resource, sys, pathlib; from producer.formats import read_blocks\n"
        "from producer.sources import InputFile\n"
        "blocks = read_blocks([InputFile.at(pathlib.Path(sys.argv[1]))])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for block in blocks: pass\n"
        "print((peak() - before) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.parametrize("kind", ["zstd", "gzip", "parquet", "arrow file", "arrow stream"])
def test_reading_takes_memory_for_a_piece_of_a_file_not_for_the_file(tmp_path: Path, kind: str) -> None:
    text = "some words that repeat themselves " * 30
    table = pa.table({"text": [text] * 150_000, "unread": [text] * 150_000})
    file, num_bytes = tmp_path / "data", table.nbytes // 2
    if kind == "parquet":
        pa.parquet.write_table(table, file, row_group_size=1 << 20, compression="none", use_dictionary=False)
    elif kind.startswith("arrow"):
        with (pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream)(file, table.schema) as writer:
            writer.write_table(table)
    else:
        lines = json.dumps({"text": text}).encode() + b"\n"
        data = lines * (num_bytes // len(lines))
        file.write_bytes(gzip.compress(data, 1) if kind == "gzip" else zstandard.compress(data))
    del table
    assert peak_of_reading(file) < 60 << 20 < num_bytes // 2


@pytest.mark.parametrize("first", [b"[{}]", b"[]", b"[1, 2]", b"[" * 9, b'[{"broken'])
def test_a_first_row_that_is_an_array_is_a_bad_row_not_a_bad_file(tmp_path: Path, first: bytes) -> None:
    assert read(write_lines(tmp_path / "data", [first, ROWS[0]]))[1] == ROWS[0]


def test_a_file_with_two_columns_of_one_name_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DatasetError, match=r"rows\.arrow: can't be read after row 0: .*exists 2 times"):
        list(read_blocks([InputFile.at(path)]))
