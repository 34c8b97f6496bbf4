"""Verify finds what is wrong with what describes a run: index, manifest, plan, metadata.

The invariant: a fault is planted so that nothing else is wrong, as in the tests of what the shards hold.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load, save

from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.manifest import Manifest
from hiddenq.contracts.shard import ShardFormat, layout_shard
from hiddenq.reader import verify
from tests.reader.conftest import kinds
from tests.support.made_run import MadeRun, write_index

Make = Callable[..., MadeRun]


@pytest.mark.parametrize("name", [names.RUN_JSON, names.REJECTED, names.MANIFEST, names.BATCHES])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b"null", b"[" * 50_000])
def test_a_small_object_that_is_garbage_is_a_finding_and_never_a_crash(make: Make, name: str, content: bytes) -> None:
    made = make()
    (made.folder / name).write_bytes(content)
    report = verify(made.folder)
    assert not report.ok
    assert all(len(line) < 500 for line in report.lines())


def test_a_shard_of_another_run_under_the_right_name_is_found(make: Make) -> None:
    made, other = make(), make("other", run="other")
    key = made.shard_keys[0]
    shutil.copy(other.folder / other.shard_keys[0], made.folder / key)
    made.finish()
    report = verify(made.folder)
    assert kinds(report) == {"layout"}, report.lines()
    assert any("metadata run: expected 'made', found 'other'" in finding.text for finding in report.findings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "other"),
        ("batch_id", "000001"),
        ("execution", "ffffffff"),
        ("config_digest", "f" * 32),
        ("layer_convention", "another"),
        ("target_layer_ids", [3, 1]),
        ("target_layer_ids", [0, 2]),
        ("model_dtype", "float16"),
        ("storage_dtype", "float32"),
        ("run", None),
    ],
)
def test_a_shard_that_says_it_is_another_is_found_by_its_metadata(make: Make, field: str, value: object) -> None:
    made = make()
    key = made.shard_keys[0]
    metadata = made.metadata[key] | {field: value}
    lengths = [(sample_id, len(made.samples[sample_id].input_ids)) for sample_id in made.sample_ids[0]]
    made.layouts[key] = layout_shard(ShardFormat.of_run(made.config), lengths, metadata)
    made.write_shard(key)
    made.finish()
    report = verify(made.folder)
    assert kinds(report) == {"layout"}
    assert [finding.text.startswith(f"metadata {field}: expected") for finding in report.findings] == [True]


def test_states_of_another_dtype_are_found(make: Make) -> None:
    made = make()
    key = made.shard_keys[0]
    wide = ShardFormat.of_run(made.config.model_copy(update={"storage_dtype": "float32"}))
    lengths = [(sample_id, len(made.samples[sample_id].input_ids)) for sample_id in made.sample_ids[0]]
    layout = layout_shard(wide, lengths, made.metadata[key])
    (made.folder / key).write_bytes(layout.header + b"\0" * layout.tensors[-1].end)
    made.finish()
    report = verify(made.folder)
    assert "layout" in kinds(report)
    assert any("expected BF16" in finding.text and "found F32" in finding.text for finding in report.findings)


def test_a_sample_in_two_shards_is_found(make: Make) -> None:
    made = make()
    key = made.shard_keys[0]
    twice = made.sample_ids[1][0]
    lengths = [(sample_id, len(made.samples[sample_id].input_ids)) for sample_id in made.sample_ids[0]]
    ids = [*made.sample_ids[0], twice]
    lengths.append((twice, len(made.samples[twice].input_ids)))
    made.layouts[key] = layout_shard(ShardFormat.of_run(made.config), lengths, made.metadata[key])
    made.sample_ids[0] = ids
    made.write_shard(key)
    made.finish()
    report = verify(made.folder)
    assert {"layout", "index"} <= kinds(report)
    assert any(f"sample {twice}: expected no tokens by the plan" in finding.text for finding in report.findings)
    assert any("13 rows, the run has 12 samples" in finding.text for finding in report.findings)


def renew_index(made: MadeRun, rows: list[dict[str, object]]) -> None:
    """Another index, and a manifest that fits it."""
    write_index(made.folder / names.INDEX, rows)
    path = made.folder / names.MANIFEST
    manifest = Manifest.parse(path.read_bytes())
    changed = {"index_checksum": crc.of_file(made.folder / names.INDEX)}
    path.write_text(manifest.model_copy(update=changed).to_json())


def test_rows_of_the_index_that_are_swapped_are_found(make: Make) -> None:
    made = make(min_length=9, max_length=9)
    rows = pq.read_table(made.folder / names.INDEX).to_pylist()
    first, second = made.sample_ids[0][:2]
    by_id = {row["sample_id"]: row for row in rows}
    by_id[first]["byte_offset"], by_id[second]["byte_offset"] = (
        by_id[second]["byte_offset"],
        by_id[first]["byte_offset"],
    )
    renew_index(made, rows)
    report = verify(made.folder)
    assert kinds(report) == {"index"}
    assert {finding.where for finding in report.findings} == {f"sample {first}", f"sample {second}"}


@pytest.mark.parametrize("field", ["num_supervised", "data_offset", "checksum"])
def test_a_number_of_the_index_that_is_wrong_is_found(make: Make, field: str) -> None:
    made = make()
    rows = pq.read_table(made.folder / names.INDEX).to_pylist()
    for row in rows:
        if row["shard_key"] == made.shard_keys[0]:
            row[field] = "crc64nvme:AAAAAAAAAAA=" if field == "checksum" else row[field] - 1
    renew_index(made, rows)
    assert kinds(verify(made.folder)) <= {"index", "damaged_shard"}
    assert not verify(made.folder).ok


def test_a_manifest_that_says_complete_over_a_run_that_is_not_is_found(make: Make) -> None:
    made = make()
    gone = made.sample_ids[1]
    (made.folder / made.shard_keys[1]).unlink()
    rows = pq.read_table(made.folder / names.INDEX).to_pylist()
    renew_index(made, [row for row in rows if row["sample_id"] not in gone])
    report = verify(made.folder)
    assert {"missing_shard", "index", "manifest"} == kinds(report)
    path = made.folder / names.MANIFEST
    manifest = Manifest.parse(path.read_bytes())
    lost = {
        "num_samples_committed": len(rows) - len(gone),
        "num_batches_committed": manifest.num_batches - 1,
        "num_tokens_committed": sum(row["num_tokens"] for row in rows if row["sample_id"] not in gone),
        "num_bytes": sum((made.folder / key).stat().st_size for key in made.shard_keys if key != made.shard_keys[1]),
    }
    path.write_text(manifest.model_copy(update=lost).to_json())
    report = verify(made.folder)
    assert any("says complete with 9 of 12 samples" in finding.text for finding in report.findings)


def test_a_manifest_that_says_incomplete_over_a_whole_run_is_found(make: Make) -> None:
    made = make()
    path = made.folder / names.MANIFEST
    path.write_text(Manifest.parse(path.read_bytes()).model_copy(update={"complete": False}).to_json())
    report = verify(made.folder)
    assert kinds(report) == {"manifest"}
    assert "though every sample is there" in report.findings[0].text


def test_any_change_of_run_json_is_found(make: Make) -> None:
    made = make()
    path = made.folder / names.RUN_JSON
    whole = path.read_text()
    for old, new in (
        ("made/model", "other/model"),
        ("made.jsonl", "other.jsonl"),
        ('"max_length": 24', '"max_length": 25'),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        report = verify(made.folder)
        assert "run_json" in kinds(report), old
        assert "by the manifest" in report.findings[0].text
    path.write_text(whole)
    assert verify(made.folder).ok


def test_an_index_from_another_run_is_found(make: Make) -> None:
    made, other = make(), make("other", run="other", seed=1)
    shutil.copy(other.folder / names.INDEX, made.folder / names.INDEX)
    report = verify(made.folder)
    assert "index" in kinds(report)
    assert any("by the manifest" in finding.text for finding in report.findings)


def test_an_index_from_another_run_with_a_manifest_that_fits_it_is_found(make: Make) -> None:
    made, other = make(), make("other", run="other", seed=1)
    shutil.copy(other.folder / names.INDEX, made.folder / names.INDEX)
    manifest = Manifest.parse((made.folder / names.MANIFEST).read_bytes())
    theirs = Manifest.parse((other.folder / names.MANIFEST).read_bytes())
    forged = manifest.model_copy(update={"index_checksum": theirs.index_checksum})
    (made.folder / names.MANIFEST).write_text(forged.to_json())
    assert {"missing_shard", "stray_object"} <= kinds(verify(made.folder))


def test_a_manifest_of_another_run_is_found(make: Make) -> None:
    made, other = make(), make("other", run="other", seed=1)
    shutil.copy(other.folder / names.MANIFEST, made.folder / names.MANIFEST)
    report = verify(made.folder)
    assert any(f"run: expected {made.config.run}" in finding.text for finding in report.findings)


def test_a_row_that_is_nowhere_or_twice_is_found(make: Make) -> None:
    made = make(rejected_rows=(2, 5))
    path = made.folder / names.REJECTED
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0])
    report = verify(made.folder)
    assert {"plan", "rejected"} == kinds(report)
    assert any("row 5 is nowhere" in finding.text for finding in report.findings)
    path.write_text(lines[0] + lines[0])
    assert any("row 2 stands" in finding.text for finding in verify(made.folder).findings)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_rows", 10**15, f"row 13 is nowhere ({10**15 - 13} such rows)"),
        ("num_token_parts", 10**12, f"num_token_parts: expected {10**12} by run.json, found 2"),
    ],
)
def test_numbers_of_run_json_that_are_far_too_large_cost_no_memory_and_no_time(
    make: Make, field: str, value: int, text: str
) -> None:
    made = make()
    path = made.folder / names.RUN_JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert text in [finding.text for finding in verify(made.folder).findings if finding.kind == "plan"]


def test_a_mask_shifted_in_token_part_and_shard_alike_is_found(make: Make) -> None:
    made = make()
    path = made.folder / names.token_part_key(0)
    tensors = load(path.read_bytes())
    tensors["loss_mask"] = np.roll(tensors["loss_mask"], 1)
    path.write_bytes(save(tensors))
    masks = np.split(tensors["loss_mask"], tensors["offsets"][1:-1])
    for sample_id, mask in zip(tensors["sample_ids"].tolist(), masks, strict=True):
        made.samples[sample_id].loss_mask = torch.from_numpy(mask.astype(np.int64))
    made.write_shards()
    made.finish()
    report = verify(made.folder)
    assert kinds(report) == {"plan"}
    assert "digest of token parts and batch list" in report.findings[0].text


def test_a_batch_of_a_part_that_the_run_has_not_is_found(make: Make) -> None:
    made = make()
    path = made.folder / names.BATCHES
    path.write_text(path.read_text().replace('"token_part":1', '"token_part":7'))
    report = verify(made.folder)
    assert "plan" in kinds(report)
    assert any(finding.text == "token part 7 of 2" for finding in report.findings)


def test_a_token_part_far_larger_than_its_tokens_is_not_read(make: Make) -> None:
    made = make()
    with (made.folder / names.token_part_key(0)).open("ab") as file:
        file.truncate(1 << 30)  # a hole: it takes no room
    report = verify(made.folder)
    assert any("1073741824 bytes; one of this run has" in finding.text for finding in report.findings)


def test_a_token_part_that_is_gone_is_found(make: Make) -> None:
    made = make()
    (made.folder / names.token_part_key(1)).unlink()
    assert "plan" in kinds(verify(made.folder))


def test_a_dead_letter_is_a_finding_and_its_samples_are_no_other(make: Make) -> None:
    made = make()
    key = made.shard_keys[1]
    gone = made.sample_ids[1]
    (made.folder / key).unlink()
    del made.layouts[key], made.sample_ids[1]
    made.finish()
    path = made.folder / names.MANIFEST
    manifest = Manifest.parse(path.read_bytes())
    num_tokens = sum(len(made.samples[sample_id].input_ids) for sample_id in gone)
    changed = {
        "complete": False,
        "dead_letters": ("000001",),
        "num_samples_committed": manifest.num_samples - len(gone),
        "num_tokens_committed": manifest.num_tokens - num_tokens,
        "num_batches_committed": manifest.num_batches - 1,
    }
    path.write_text(manifest.model_copy(update=changed).to_json())
    report = verify(made.folder)
    assert kinds(report) == {"dead_letter"}, report.lines()
    assert "hiddenq failed" in report.findings[0].todo


def test_a_run_that_is_still_going_says_how_far_it_is(make: Make) -> None:
    made = make(num_committed=2)
    report = verify(made.folder)
    assert kinds(report) == {"unfinished"}
    assert "2 of 4 batches" in report.findings[0].text


def test_what_an_interrupted_end_left_is_no_damage_and_nothing_is_to_be_deleted(make: Make) -> None:
    made = make()
    (made.folder / names.MANIFEST).unlink()
    (made.folder / made.shard_keys[1]).unlink()
    report = verify(made.folder)
    assert kinds(report) == {"unfinished"}, report.lines()
    assert not any("delete" in finding.todo for finding in report.findings)


def test_an_incomplete_end_without_dead_letters_says_which_batches_to_make_and_nothing_is_to_be_deleted(
    make: Make,
) -> None:
    made = make()
    gone = made.sample_ids[1]
    (made.folder / made.shard_keys[1]).unlink()
    rows = pq.read_table(made.folder / names.INDEX).to_pylist()
    renew_index(made, [row for row in rows if row["sample_id"] not in gone])
    path = made.folder / names.MANIFEST
    path.write_text(Manifest.parse(path.read_bytes()).model_copy(update={"complete": False}).to_json())
    report = verify(made.folder)
    assert "missing_shard" in kinds(report), report.lines()
    assert "index" not in kinds(report), report.lines()
    assert not any("delete" in finding.todo for finding in report.findings)


def test_run_json_of_a_newer_hiddenq_is_a_finding(make: Make) -> None:
    made = make()
    path = made.folder / names.RUN_JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    report = verify(made.folder)
    assert kinds(report) == {"run_json"}
    assert "schema version 9" in report.findings[0].text


def test_a_target_head_of_which_any_byte_differs_is_found(model_run: MadeRun, tmp_path: Path) -> None:
    folder = shutil.copytree(model_run.folder, tmp_path / "run")
    assert verify(folder).ok
    path, chosen = folder / names.TARGET_HEAD, random.Random(0)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [chosen.randrange(header) for _ in range(40)] + [chosen.randrange(header, len(whole)) for _ in range(5)]
    for place in places:
        if whole[place : place + 1] == b" ":
            continue  # padding of the header means nothing
        changed = bytearray(whole)
        changed[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(changed)
        assert kinds(verify(folder)) == {"target_head"}, (place, changed[place - 9 : place + 9])
    path.write_bytes(whole[:-1])
    assert kinds(verify(folder)) == {"target_head"}
