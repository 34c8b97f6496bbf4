"""The small files of a run: read back as written, and refused where they are not what a run wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, DamagedShard, RunMismatch, UnknownSchema
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.storage import ObjectStore, open_store
from hiddenq.storage.runfiles import (
    encode_batches,
    forget_token_parts,
    load_batches,
    load_rejected,
    load_run_json,
    read_token_rows,
)

KEY = "tokens/part-00000.safetensors"


def part(**changes: Any) -> bytes:
    """Three samples: ids 10, 20 and 30 with one, two and three tokens."""
    tensors: dict[str, np.ndarray] = {
        "offsets": np.array([0, 1, 3, 6], np.int64),
        "sample_ids": np.array([10, 20, 30], np.int64),
        "input_ids": np.arange(6, dtype=np.int32),
        "loss_mask": np.array([1, 0, 1, 0, 0, 1], np.uint8),
    }
    return save({name: tensor for name, tensor in (tensors | changes).items() if tensor is not None})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(tmp_path / "run")
    store.put_bytes(KEY, part())
    return store


def test_rows_come_back_as_written_and_can_be_written_to(store: ObjectStore) -> None:
    rows = read_token_rows(store, 0, 1, 2)
    assert [row.sample_id for row in rows] == [20, 30]
    assert [row.input_ids.tolist() for row in rows] == [[1, 2], [3, 4, 5]]
    assert [row.loss_mask.tolist() for row in rows] == [[0, 1], [0, 0, 1]]
    assert (rows[0].input_ids.dtype, rows[0].loss_mask.dtype) == (np.dtype("int32"), np.dtype("uint8"))
    rows[0].input_ids[0] = 7


@pytest.mark.parametrize(("first", "number"), [(3, 1), (2, 2), (-1, 1), (0, 0)])
def test_rows_that_are_not_there_are_refused(store: ObjectStore, first: int, number: int) -> None:
    with pytest.raises(DamagedShard, match="asked for, it has 3"):
        read_token_rows(store, 0, first, number)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "expected a safetensors header, found 0 bytes"),
        (part()[:-1], "bytes by its header"),
        (part(loss_mask=None), "expected tensors"),
        (part(input_ids=np.arange(6, dtype=np.int64)), "expected tensors"),
        (part(offsets=np.array([0, 1, 3, 7], np.int64)), "its offsets do not fit"),
        (part(offsets=np.array([0, 3, 1, 6], np.int64)), "its offsets do not fit"),
        (part(sample_ids=np.array([1], np.int64)), "its offsets do not fit"),
    ],
)
def test_a_part_that_no_run_wrote_is_refused(store: ObjectStore, data: bytes, text: str) -> None:
    store.put_bytes(KEY, data)
    forget_token_parts(store)
    with pytest.raises(DamagedShard, match=text):
        read_token_rows(store, 0, 0, 1)


def test_a_missing_part_is_told_apart_from_a_missing_run(store: ObjectStore) -> None:
    with pytest.raises(DamagedShard, match=r"part-00009\.safetensors: missing at .*though run\.json is there"):
        read_token_rows(store, 9, 0, 1)
    assert load_run_json(store) is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b'{"run": "x"', "not JSON"),
        (b"{}", "schema_version: expected a whole number, found 'None'"),
        (b'{"schema_version": 1, "run": "x"}', "RunConfig: hiddenq_version: Field required"),
    ],
)
def test_a_run_json_that_was_edited_says_where_it_lies_and_what_to_do(
    store: ObjectStore, content: bytes, why: str
) -> None:
    store.put_bytes(names.RUN_JSON, content)
    with pytest.raises(RunMismatch) as caught:
        load_run_json(store)
    assert re.match(
        re.escape(f"{store.uri}/run.json: not as its run wrote it (") + ".*" + re.escape(why), str(caught.value)
    )
    assert "; put back a copy of it" in str(caught.value)


def test_a_run_json_of_a_newer_hiddenq_says_where_it_lies(store: ObjectStore) -> None:
    store.put_bytes(names.RUN_JSON, b'{"schema_version": 99}')
    with pytest.raises(UnknownSchema, match=rf"{store.uri}/run\.json: RunConfig: schema version 99 found"):
        load_run_json(store)


def test_batches_come_back_as_written_and_bad_lines_are_named(store: ObjectStore) -> None:
    batches = [
        BatchPlan(
            batch_id=f"{number:06d}", token_part=0, first_row=number, num_samples=1, num_tokens=2, padded_length=2
        )
        for number in range(3)
    ]
    store.put_bytes("tokens/batches.jsonl", encode_batches(batches))
    assert load_batches(store) == batches
    store.put_bytes("tokens/batches.jsonl", encode_batches(batches) + b"{}\n")
    with pytest.raises(BadMessage, match=r"tokens/batches\.jsonl line 4: not a BatchPlan"):
        load_batches(store)
    store.put_bytes("rejected.jsonl", b'{"row": 1, "reason": "because", "detail": ""}\n')
    with pytest.raises(BadMessage, match=r"rejected\.jsonl line 1: not a Rejected"):
        load_rejected(store)
