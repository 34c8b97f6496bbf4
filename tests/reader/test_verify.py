"""Verify finds every planted fault and nothing in a good run.

The invariant: a fault is planted so that nothing else is wrong, checksums, index and manifest renewed where the fault
would otherwise be found by those alone.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable

import pytest

from hiddenq.contracts import names
from hiddenq.reader import VerifyReport, verify
from hiddenq.reader.checks.report import MAX_KEPT
from tests.reader.conftest import kinds
from tests.support.command import exit_status
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
    assert "give the same `hiddenq run` command as before again" in finding.todo


@pytest.mark.parametrize(
    "name", ["states/000000-0123abcd.safetensors", "states/999999-0123abcd.safetensors", "states/x.txt"]
)
def test_an_extra_object_is_found(make: Make, name: str) -> None:
    made = make()
    shutil.copy(made.folder / made.shard_keys[0], made.folder / name)
    report = verify(made.folder)
    assert kinds(report) == {"stray_object"}
    assert report.findings[0].where == name


@pytest.mark.parametrize(
    "name", ["states/sub/000000-0123abcd.safetensors", "tokens/part-00009.safetensors", "tokens/notes.txt"]
)
def test_an_extra_object_in_a_folder_of_the_run_is_found(make: Make, name: str) -> None:
    made = make()
    path = made.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    report = verify(made.folder)
    assert kinds(report) == {"stray_object"}
    assert report.findings[0].where == name


@pytest.mark.parametrize("names_there", [["notes.txt"], ["notes.txt", "run/run.json", "000000-0123abcd.safetensors"]])
@pytest.mark.parametrize("num_committed", [None, 2])
def test_a_file_beside_the_run_is_a_warning_and_no_finding(
    make: Make, names_there: list[str], num_committed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(num_committed=num_committed)
    for name in names_there:
        (made.folder / name).parent.mkdir(exist_ok=True)
        (made.folder / name).write_text("a person's")
    report = verify(made.folder)
    assert kinds(report) == (set() if num_committed is None else {"unfinished"})
    assert report.foreign_objects == tuple(sorted(names_there))
    for name in names_there:
        assert f"warning: {name}: no object of this run; it is left alone" in report.lines()
    assert exit_status(["verify", "--out", str(made.folder)]) == (0 if report.ok else 1)
    assert f"warning: {names_there[0]}:" in capsys.readouterr().out


def test_many_files_beside_the_run_are_counted(make: Make) -> None:
    made = make()
    for number in range(MAX_KEPT + 5):
        (made.folder / f"mine-{number:02d}.txt").write_text("")
    report = verify(made.folder)
    assert report.ok
    assert (len(report.foreign_objects), report.num_foreign_objects) == (MAX_KEPT, MAX_KEPT + 5)
    assert "warning: and 5 more" in report.lines()


def test_an_object_of_no_bytes_is_found_wherever_it_lies(make: Make) -> None:
    made = make()
    for path in sorted(path for path in made.folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(b"")
        assert not verify(made.folder).ok, path
        path.write_bytes(whole)
    assert verify(made.folder).ok


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
