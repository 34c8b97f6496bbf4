"""Files that lie: whatever stands in a header or an index, it is refused before it is used.

The invariant: no claim of a file makes the reader open another path, read outside a shard, or parse without a bound.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenq.contracts import names
from hiddenq.contracts.errors import (
    DamagedShard,
    HiddenqError,
)
from hiddenq.reader import open_run
from hiddenq.reader.index import read_index
from tests.support.made_run import MadeRun, make_run, write_index

Make = Callable[..., MadeRun]


def rows_of(made: MadeRun) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(made.folder / names.INDEX).to_pylist()
    return rows


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("shard_key", "../../../etc/passwd", "is no shard's key"),
        ("shard_key", "/etc/passwd", "is no shard's key"),
        ("shard_key", "states/../run.json", "is no shard's key"),
        ("shard_key", "000000-0123abcd.safetensors", "is no shard's key"),
        ("shard_key", "states/000000-0123abcd.safetensors\n", "is no shard's key"),
        ("num_tokens", 2_000_000_000, "a length is not in"),
        ("num_tokens", 0, "a length is not in"),
        ("num_bytes", 1 << 40, "a size does not follow"),
        ("byte_offset", -8, "inside the header"),
        ("sample_id", -1, "a sample id is negative or twice there"),
        ("sample_id", 3, "a sample id is negative or twice there"),
    ],
)
def test_an_index_that_contradicts_the_run_is_refused(make: Make, field: str, value: object, text: str) -> None:
    made = make()
    rows = rows_of(made)
    rows[0][field] = value
    write_index(made.folder / names.INDEX, rows)
    with pytest.raises(DamagedShard, match=text):
        open_run(made.folder)


def test_an_index_that_is_no_index_is_refused(make: Make) -> None:
    made = make()
    with pytest.raises(DamagedShard, match=r"index.parquet: not a readable index"):
        read_index(b"PAR1 but not really", made.config)
    pq.write_table(pq.read_table(made.folder / names.INDEX).drop_columns(["checksum"]), made.folder / names.INDEX)
    with pytest.raises(DamagedShard, match=r"index.parquet: column checksum is missing"):
        open_run(made.folder)


def test_an_index_of_more_rows_than_the_run_has_is_not_read(make: Make) -> None:
    made = make()
    rows = rows_of(made)
    write_index(made.folder / names.INDEX, rows + [rows[0] | {"sample_id": 10_000 + row} for row in range(5)])
    with pytest.raises(DamagedShard, match=r"index.parquet: 17 rows, the run has 12 samples"):
        open_run(made.folder)


def test_an_offset_beyond_the_shard_reads_nothing(make: Make) -> None:
    made = make()
    rows = rows_of(made)
    rows[0]["byte_offset"] = 1 << 50
    write_index(made.folder / names.INDEX, rows)
    with pytest.raises(DamagedShard, match="found 0"):
        open_run(made.folder)[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(data=st.data())
def test_no_header_makes_a_going_run_do_more_than_refuse(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "run"
    made = make_run(folder, num_samples=3, num_committed=1) if not folder.exists() else None
    path = next((folder / "states").iterdir())
    good = folder / "good"
    if made is not None:
        good.write_bytes(path.read_bytes())
    raw = good.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    fields = json.loads(raw[8 : 8 + size])
    name = data.draw(st.sampled_from(sorted(fields)))
    if data.draw(st.booleans()):
        fields[name] = data.draw(JSON)
    else:
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "hiddenq"]))
        fields[name][key] = data.draw(JSON | st.lists(st.integers() | st.floats(), max_size=4))
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    with contextlib.suppress(HiddenqError):
        run = open_run(folder, threads=1)
        for sample_id in run:
            assert len(run[sample_id]) > 0


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, '{"__metadata__": ' + "[" * 100_000, '{"a": 1e999}', "9" * 5000,
        '{"__metadata__": {"hiddenq": "[]"}}',
    ],
)  # fmt: skip
def test_a_header_made_to_break_parsers_is_refused(make: Make, text: str) -> None:
    made = make(num_committed=1)
    path = made.folder / made.shard_keys[0]
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    with pytest.raises(DamagedShard, match="header is not safetensors"):
        open_run(made.folder)


def test_a_header_larger_than_its_samples_can_have_is_never_parsed(make: Make) -> None:
    made = make(num_committed=1)
    path = made.folder / made.shard_keys[0]
    text = json.dumps({f"{number}.input_ids": {"dtype": "I64"} for number in range(50_000)}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(DamagedShard, match=r"one of 3 samples has \d+ at most"):
        open_run(made.folder)


Change = Callable[[dict[str, dict[str, Any]]], str]


def moved(by: int) -> Change:
    """Every tensor's offsets moved."""

    def change(fields: dict[str, dict[str, Any]]) -> str:
        for field in fields.values():
            if "data_offsets" in field:
                field["data_offsets"] = [offset + by for offset in field["data_offsets"]]
        return json.dumps(fields)

    return change


def overlapping(fields: dict[str, dict[str, Any]]) -> str:
    names_ = [name for name in fields if name.endswith("_mask")]
    fields[names_[1]]["data_offsets"] = fields[names_[0]]["data_offsets"]
    return json.dumps(fields)


def negative(fields: dict[str, dict[str, Any]]) -> str:
    name = next(name for name in fields if name.endswith("input_ids"))
    fields[name]["shape"] = [-1]
    return json.dumps(fields)


def renamed(name: str) -> Change:
    def change(fields: dict[str, dict[str, Any]]) -> str:
        old = next(each.removesuffix(".input_ids") for each in fields if each.endswith(".input_ids"))
        return json.dumps({each.replace(f"{old}.", f"{name}.", 1): field for each, field in fields.items()})

    return change


def doubled(fields: dict[str, dict[str, Any]]) -> str:
    name = next(name for name in fields if name.endswith("input_ids"))
    return json.dumps(fields)[:-1] + f', "{name}": {json.dumps(fields[name])}}}'


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (moved(-8), "do not fit its shape"),
        (moved(8), "do not fit its shape"),
        (moved(1 << 62), "do not fit its shape"),
        (overlapping, "do not fit its shape"),
        (negative, "do not fit its shape"),
        (renamed("../../../etc/passwd"), "expected a sample id before the dot"),
        (renamed("007"), "expected a sample id before the dot"),
        (renamed("99999999999999999999"), "expected a sample id before the dot"),
        (doubled, "a name stands there twice"),
    ],
    ids=itertools.count(),
)
def test_a_header_that_lies_is_refused(make: Make, change: Change, text: str) -> None:
    made = make(num_committed=1)
    path = made.folder / made.shard_keys[0]
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = change(json.loads(raw[8 : 8 + size])).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
    with pytest.raises(DamagedShard, match=text):
        open_run(made.folder)


def test_a_length_field_of_2_to_the_63_is_refused(make: Make) -> None:
    made = make(num_committed=1)
    path = made.folder / made.shard_keys[0]
    path.write_bytes(struct.pack("<Q", 1 << 63) + path.read_bytes()[8:])
    with pytest.raises(DamagedShard, match="header of 9223372036854775808 bytes; expected 2 to"):
        open_run(made.folder)


def test_an_index_larger_than_the_run_can_have_is_not_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    monkeypatch.setattr("hiddenq.reader.index.MAX_INDEX_FRAME_BYTES", 100_000)
    rows = rows_of(made)
    rows[0]["checksum"] = "x" * 1_000_000  # it packs well: few bytes that unpack to many
    write_index(made.folder / names.INDEX, rows)
    with pytest.raises(DamagedShard, match=r"index.parquet: unpacked it is larger than that of 12 samples"):
        open_run(made.folder)
    with (made.folder / names.INDEX).open("ab") as file:
        file.truncate(1 << 20)
    with pytest.raises(DamagedShard, match=r"index.parquet: 1048576 bytes are too many for 12 samples"):
        open_run(made.folder)


def test_a_header_longer_than_its_object_is_not_even_asked_for(make: Make) -> None:
    made = make(num_committed=1)
    path = made.folder / made.shard_keys[0]
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    with pytest.raises(DamagedShard, match="header of 99000008 bytes in an object of 10"):
        open_run(made.folder)
