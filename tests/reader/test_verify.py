"""Verify finds every planted fault and nothing in a good run.

The invariant: a fault is planted so that nothing else is wrong, checksums, index and manifest renewed where the fault
would otherwise be found by those alone.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from hiddenq.contracts import names
from hiddenq.contracts.errors import StoreRefused, UsageError
from hiddenq.contracts.manifest import Manifest
from hiddenq.contracts.shard import ShardFormat, layout_shard
from hiddenq.reader import VerifyReport, verify
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]
FORMATS = [
    {},
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"storage_dtype": "float8_e4m3fn", "target_layer_ids": (1, 3, 4)},
    {"target_layer_ids": ()},
    {"final_hidden_state": False},
    {"num_samples": 40, "samples_per_batch": 7, "batches_per_part": 3},
]


def kinds(report: VerifyReport) -> set[str]:
    return set(report.num_findings)


@pytest.mark.parametrize("fields", FORMATS, ids=str)
def test_a_good_run_is_clean_and_every_byte_is_read_once(make: Make, fields: dict[str, object]) -> None:
    made = make(**fields)
    report = verify(made.folder, deep=True)
    assert report.ok, report.lines()
    assert report.num_bytes == sum((made.folder / key).stat().st_size for key in made.shard_keys)
    assert (report.num_samples, report.num_tokens) == (made.config.num_samples, made.config.num_tokens)
    assert VerifyReport.parse(report.to_json()) == report


def test_a_flipped_bit_anywhere_in_a_payload_is_found(make: Make) -> None:
    made = make()
    for number, key in enumerate(made.shard_keys):
        path = made.folder / key
        good = path.read_bytes()
        offset = made.layouts[key].data_offset
        for position in (offset, (offset + len(good)) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[position] ^= 1 << number
            path.write_bytes(bad)
            report = verify(made.folder)
            assert "damaged_shard" in kinds(report), (key, position)
            assert all(key in finding.where for finding in report.findings)
        path.write_bytes(good)
    assert verify(made.folder).ok


def test_a_flipped_bit_in_any_object_that_holds_data_is_found(make: Make) -> None:
    made = make(num_samples=6)
    chosen = random.Random(0)
    for path in sorted(path for path in made.folder.rglob("*") if path.is_file()):
        if path.name in (names.RUN_JSON, names.REJECTED, names.MANIFEST):
            continue  # they hold words for people, too
        good = path.read_bytes()
        for _ in range(12):
            bad = bytearray(good)
            bad[chosen.randrange(len(bad))] ^= 1 << chosen.randrange(8)
            path.write_bytes(bad)
            assert not verify(made.folder).ok, path
        path.write_bytes(good)
    assert verify(made.folder).ok


@pytest.mark.parametrize("name", [names.RUN_JSON, names.REJECTED, names.MANIFEST, names.BATCHES])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b"null", b"[" * 50_000])
def test_a_small_object_that_is_garbage_is_a_finding_and_never_a_crash(make: Make, name: str, content: bytes) -> None:
    made = make()
    (made.folder / name).write_bytes(content)
    report = verify(made.folder)
    assert not report.ok
    assert all(len(line) < 500 for line in report.lines())


def test_a_flipped_bit_in_a_header_is_found(make: Make) -> None:
    made = make()
    path = made.folder / made.shard_keys[0]
    good = path.read_bytes()
    for position in range(0, made.layouts[made.shard_keys[0]].data_offset, 37):
        bad = bytearray(good)
        bad[position] ^= 4
        path.write_bytes(bad)
        assert not verify(made.folder).ok, position


def test_a_missing_shard_is_found_with_its_samples(make: Make) -> None:
    made = make()
    key = made.shard_keys[1]
    (made.folder / key).unlink()
    report = verify(made.folder)
    assert {"missing_shard", "manifest"} == kinds(report)
    finding = next(finding for finding in report.findings if finding.kind == "missing_shard")
    assert key in finding.text
    assert all(str(sample_id) in finding.text for sample_id in made.sample_ids[1])
    assert "run `hiddenq run` on this location again" in finding.todo


@pytest.mark.parametrize("name", ["states/000000-0123abcd.safetensors", "states/999999-0123abcd.safetensors", "x.txt"])
def test_an_extra_object_is_found(make: Make, name: str) -> None:
    made = make()
    shutil.copy(made.folder / made.shard_keys[0], made.folder / name)
    report = verify(made.folder)
    assert kinds(report) == {"stray_object"}
    assert report.findings[0].where == name


def test_swapped_samples_are_found_by_their_tokens(make: Make) -> None:
    made = make(min_length=9, max_length=9)
    first, second = made.sample_ids[0][:2]
    made.samples[first], made.samples[second] = made.samples[second], made.samples[first]
    made.write_shard(made.shard_keys[0])
    made.finish()
    report = verify(made.folder)
    assert "tokens" in kinds(report)
    assert {f"sample {first} in {made.shard_keys[0]}", f"sample {second} in {made.shard_keys[0]}"} <= {
        finding.where for finding in report.findings
    }


def test_samples_of_another_batch_are_found(make: Make) -> None:
    made = make()
    first, second = made.shard_keys[:2]
    content = [(made.folder / key).read_bytes() for key in (first, second)]
    (made.folder / first).write_bytes(content[1])
    (made.folder / second).write_bytes(content[0])
    report = verify(made.folder)
    assert "layout" in kinds(report)


def test_a_mask_shifted_by_one_is_found(make: Make) -> None:
    made = make()
    sample_id = made.sample_ids[2][0]
    made.samples[sample_id].loss_mask = made.samples[sample_id].loss_mask.roll(1)
    made.write_shard(made.shard_keys[2])
    made.finish()
    report = verify(made.folder)
    assert kinds(report) == {"tokens"}
    assert "loss_mask" in report.findings[0].text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fields", FORMATS[:4], ids=str)
def test_one_non_finite_value_is_found_with_sample_and_layer(
    make: Make, value: float, fields: dict[str, object]
) -> None:
    made = make(**fields)
    sample_id = made.sample_ids[0][1]
    made.samples[sample_id].hidden_states[2, 1, 5] = value
    made.write_shard(made.shard_keys[0])
    made.finish()
    report = verify(made.folder)
    assert kinds(report) == {"non_finite"}
    assert report.findings[0].where == f"sample {sample_id} in {made.shard_keys[0]}"
    assert "token 2" in report.findings[0].text


def test_a_non_finite_final_state_is_found(make: Make) -> None:
    made = make()
    made.samples[made.sample_ids[0][0]].final_hidden_state[0, 0] = float("nan")
    made.write_shard(made.shard_keys[0])
    made.finish()
    assert "final_hidden_state: NaN or Inf at token 0" in verify(made.folder).findings[0].text


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_truncated_shard_is_found(make: Make, cut: int) -> None:
    made = make()
    path = made.folder / made.shard_keys[0]
    path.write_bytes(path.read_bytes()[:cut])
    report = verify(made.folder)
    assert "damaged_shard" in kinds(report)


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


def test_a_shard_of_other_layers_is_found_by_its_metadata(make: Make) -> None:
    made = make()
    key = made.shard_keys[0]
    metadata = made.metadata[key] | {"target_layer_ids": [3, 1]}
    lengths = [(sample_id, len(made.samples[sample_id].input_ids)) for sample_id in made.sample_ids[0]]
    made.layouts[key] = layout_shard(ShardFormat.of_run(made.config), lengths, metadata)
    made.write_shard(key)
    made.finish()
    report = verify(made.folder)
    assert kinds(report) == {"layout"}
    assert "target_layer_ids" in report.findings[0].text


def test_layers_in_another_order_are_suspected_by_their_norms(make: Make) -> None:
    made = make()
    sample_id = made.sample_ids[0][0]
    made.samples[sample_id].hidden_states = made.samples[sample_id].hidden_states.flip(1)
    made.write_shard(made.shard_keys[0])
    made.finish()
    assert verify(made.folder).ok
    report = verify(made.folder, deep=True)
    assert kinds(report) == {"layer_order"}
    assert f"sample {sample_id}" == report.findings[0].where


def test_a_last_layer_that_is_not_the_final_state_is_found(make: Make) -> None:
    made = make(target_layer_ids=(1, 5))
    for sample in made.samples.values():
        sample.final_hidden_state = sample.hidden_states[:, 1].clone()
    made.write_shards()
    made.finish()
    assert verify(made.folder).ok
    sample_id = made.sample_ids[0][0]
    made.samples[sample_id].hidden_states = made.samples[sample_id].hidden_states.flip(1)
    made.write_shard(made.shard_keys[0])
    made.finish()
    assert kinds(verify(made.folder)) == {"final_state"}


def test_states_that_were_never_written_are_found(make: Make) -> None:
    made = make()
    made.samples[made.sample_ids[0][0]].hidden_states[3:, 1] = 0
    made.write_shard(made.shard_keys[0])
    made.finish()
    assert kinds(verify(made.folder)) == {"zero_states"}


def test_states_under_two_ids_are_found_when_looking_deep(make: Make) -> None:
    made = make(min_length=9, max_length=9)
    first, second = made.sample_ids[0][0], made.sample_ids[1][0]
    made.samples[second].hidden_states = made.samples[first].hidden_states
    made.samples[second].final_hidden_state = made.samples[first].final_hidden_state
    made.write_shard(made.shard_keys[1])
    made.finish()
    assert verify(made.folder).ok
    assert kinds(verify(made.folder, deep=True)) == {"repeated_states"}


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


def test_a_thousand_findings_stay_readable(make: Make) -> None:
    made = make(num_samples=120, max_length=4)
    for sample in made.samples.values():
        sample.loss_mask = 1 - sample.loss_mask
    made.write_shards()
    made.finish()
    report = verify(made.folder)
    assert report.num_findings["tokens"] == 120
    assert len(report.lines()) < 50
    assert any("and 100 more" in line for line in report.lines())


def test_run_json_of_a_newer_hiddenq_is_a_finding(make: Make) -> None:
    made = make()
    path = made.folder / names.RUN_JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    report = verify(made.folder)
    assert kinds(report) == {"run_json"}
    assert "schema version 9" in report.findings[0].text


def test_no_run_and_no_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run there \(run.json is missing\)"):
        verify(tmp_path)
    with pytest.raises(StoreRefused, match="no such folder"):
        verify(tmp_path / "nowhere")


def test_progress_reaches_the_bytes_of_the_run(make: Make) -> None:
    made = make()
    seen: list[tuple[int, int]] = []
    report = verify(made.folder, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.num_bytes, report.num_bytes)
