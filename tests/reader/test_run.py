"""Opening a run and reading single samples: what comes out is what was put in, whatever lies in the files."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hiddenq
from hiddenq.contracts import names
from hiddenq.contracts.errors import (
    DamagedShard,
    ObjectMissing,
    RunMismatch,
    StoreRefused,
    UnknownSchema,
    UsageError,
)
from hiddenq.reader import files, open_run
from hiddenq.reader.files import LocalFiles
from tests.support.made_run import MadeRun, write_index

Make = Callable[..., MadeRun]


def stored(states: torch.Tensor, made: MadeRun) -> torch.Tensor:
    return states.to(
        {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(made.config.storage_dtype, torch.float32)
    )


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
@pytest.mark.parametrize("going", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_sample_comes_out_as_it_was_put_in(make: Make, dtype: str, going: bool, local_files: LocalFiles) -> None:
    made = make(dtype=dtype, num_committed=4 if going else None)
    run = hiddenq.open_run(made.folder, local_files=local_files)
    assert (run.manifest is None) is going
    assert run.sample_ids.tolist() == sorted(made.samples)
    assert run.lengths.tolist() == [len(made.samples[sample_id].input_ids) for sample_id in run]
    assert run.num_supervised().tolist() == [int(made.samples[sample_id].loss_mask.sum()) for sample_id in run]
    for sample_id in run:
        sample, wanted = run[sample_id], made.samples[sample_id]
        assert sample.sample_id == sample_id
        assert len(sample) == len(wanted.input_ids)
        assert torch.equal(sample.input_ids, wanted.input_ids)
        assert torch.equal(sample.loss_mask, wanted.loss_mask)
        assert sample.hidden_states is not None
        assert sample.final_hidden_state is not None
        assert torch.equal(sample.hidden_states, stored(wanted.hidden_states, made))
        assert torch.equal(sample.final_hidden_state, stored(wanted.final_hidden_state, made))


def test_a_run_that_is_going_shows_the_samples_that_are_there(make: Make) -> None:
    made = make(num_committed=2)
    run = open_run(made.folder)
    there = sorted(made.sample_ids[0] + made.sample_ids[1])
    assert list(run) == there
    assert there[0] in run
    assert len(run) == len(there)
    missing = next(sample_id for sample_id in made.samples if sample_id not in there)
    assert missing not in run
    with pytest.raises(KeyError, match=f"sample {missing} is not in run made"):
        run[missing]


def test_a_twin_of_a_going_run_is_read_once(make: Make) -> None:
    made = make(num_committed=2)
    key = made.shard_keys[0]
    twin = made.folder / "states/000000-ffffffff.safetensors"
    twin.write_bytes((made.folder / key).read_bytes())
    assert len(open_run(made.folder)) == len(made.sample_ids[0] + made.sample_ids[1])


@pytest.mark.parametrize("layers", [(1,), (1, 3), (0, 2, 4)])
def test_fp8_comes_out_in_the_dtype_asked_for_within_a_sixteenth_of_each_row(
    make: Make, layers: tuple[int, ...]
) -> None:
    made = make(storage_dtype="float8_e4m3fn", target_layer_ids=layers)
    run = open_run(made.folder, local_files="map" if len(layers) == 1 else "auto")
    for sample_id in run:
        wanted = made.samples[sample_id].hidden_states
        by_default = run[sample_id].hidden_states
        assert by_default is not None
        assert by_default.dtype == torch.bfloat16
        sample = run.read(sample_id, torch.float32)
        assert sample.hidden_states is not None
        assert sample.hidden_states.dtype == torch.float32
        bound = wanted.abs().amax(-1, keepdim=True) / 16
        assert ((sample.hidden_states - wanted).abs() <= bound).all()
        assert torch.equal(sample.input_ids, made.samples[sample_id].input_ids)


@pytest.mark.parametrize("fields", [{"target_layer_ids": ()}, {"final_hidden_state": False}], ids=str)
def test_what_is_not_stored_is_none(make: Make, fields: dict[str, object]) -> None:
    made = make(**fields)
    sample = open_run(made.folder)[0]
    assert (sample.hidden_states is None) == ("target_layer_ids" in fields)
    assert (sample.final_hidden_state is None) == ("final_hidden_state" in fields)


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
def test_a_sample_may_be_changed_and_the_run_stays_as_it_is(make: Make, local_files: LocalFiles) -> None:
    made = make()
    before = {key: (made.folder / key).read_bytes() for key in made.shard_keys}
    run = open_run(made.folder, local_files=local_files)
    sample = run[0]
    assert sample.hidden_states is not None
    sample.hidden_states.zero_()
    sample.input_ids.zero_()
    assert torch.equal(open_run(made.folder)[0].input_ids, made.samples[0].input_ids)
    assert {key: (made.folder / key).read_bytes() for key in made.shard_keys} == before


def test_a_run_can_be_pickled_and_read_elsewhere(make: Make) -> None:
    made = make()
    run = open_run(made.folder)
    first = run[0]
    again = pickle.loads(pickle.dumps(run))
    assert torch.equal(again[0].input_ids, first.input_ids)
    assert "open_run" in hiddenq.__all__
    assert repr(run).startswith("<Run made at ")


@pytest.mark.parametrize("local_files", ["auto", "read"])
def test_reading_many_shards_keeps_few_files_open_and_mapped(
    make: Make, local_files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 40)
    made = make(num_samples=60, samples_per_batch=1, max_length=3)
    run = open_run(made.folder, local_files=local_files)
    descriptors, maps = len(os.listdir("/proc/self/fd")), mapped(made.folder)
    for sample_id in run:
        run[sample_id], run[sample_id]
    assert len(os.listdir("/proc/self/fd")) - descriptors <= 40
    assert mapped(made.folder) - maps <= 40


def mapped(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_network_disk_is_read_and_never_mapped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    monkeypatch.setattr("hiddenq.reader.files.file_system", lambda _path: "nfs4")
    run = open_run(made.folder)
    for sample_id in [*run, *run]:
        run[sample_id]
    assert mapped(made.folder) == 0


def test_where_maps_are_refused_files_are_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()

    def refused(*_arguments: object, **_fields: object) -> torch.Tensor:
        raise RuntimeError("unable to mmap: No such device (19)")

    monkeypatch.setattr(torch, "from_file", refused)
    run = open_run(made.folder)
    for _ in range(3):
        assert torch.equal(run[0].input_ids, made.samples[0].input_ids)
    with pytest.raises(StoreRefused, match="can't be mapped; open the run with local_files='read'"):
        open_run(made.folder, local_files="map")[0]


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_truncated_shard_is_refused_by_a_finished_and_by_a_going_run(make: Make, cut: int) -> None:
    made, going = make(), make("going", num_committed=4)
    for each in (made, going):
        path = each.folder / each.shard_keys[0]
        path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedShard, match="hiddenq verify"):
        open_run(made.folder)[made.sample_ids[0][-1]]
    with pytest.raises(DamagedShard, match=going.shard_keys[0]):
        open_run(going.folder)


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run there"):
        open_run(tmp_path)


def test_a_manifest_of_another_run_is_refused(make: Make) -> None:
    made, other = make(), make("other", run="other")
    (made.folder / names.MANIFEST).write_bytes((other.folder / names.MANIFEST).read_bytes())
    with pytest.raises(RunMismatch, match=r"manifest.json is of run other, run.json of made"):
        open_run(made.folder)


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
def test_a_shard_shorter_than_the_index_says_is_an_error_and_not_garbage(make: Make, local_files: LocalFiles) -> None:
    made = make()
    key = made.shard_keys[0]
    path = made.folder / key
    path.write_bytes(path.read_bytes()[:-1])
    last = made.sample_ids[0][-1]
    with pytest.raises(DamagedShard, match=f"{key}: sample {last}: expected .* bytes at .*hiddenq verify"):
        open_run(made.folder, local_files=local_files)[last]
    path.unlink()
    with pytest.raises(ObjectMissing, match="no such object"):
        open_run(made.folder, local_files=local_files)[last]


def test_a_run_of_which_nothing_came_through_is_empty(make: Make) -> None:
    made = make()
    write_index(made.folder / names.INDEX, [])
    run = open_run(made.folder)
    assert len(run) == 0
    assert list(run) == []
    assert 0 not in run


def test_run_json_of_a_newer_hiddenq_names_both_versions(make: Make) -> None:
    made = make()
    path = made.folder / names.RUN_JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    with pytest.raises(UnknownSchema, match="schema version 9 found, this hiddenq knows"):
        open_run(made.folder)


def test_a_run_that_was_opened_keeps_its_samples_while_others_arrive_and_it_ends(make: Make) -> None:
    made, whole = make(num_committed=2), make("whole")
    run = open_run(made.folder)
    before = {sample_id: run[sample_id].input_ids for sample_id in run}
    for key in whole.shard_keys[2:]:
        (made.folder / key).write_bytes((whole.folder / key).read_bytes())
    for name in (names.INDEX, names.MANIFEST):
        (made.folder / name).write_bytes((whole.folder / name).read_bytes())
    assert list(run) == list(before)
    assert all(torch.equal(run[sample_id].input_ids, input_ids) for sample_id, input_ids in before.items())
    assert len(open_run(made.folder)) == len(whole.samples)


def test_a_twin_that_a_going_run_removed_says_to_open_it_again(make: Make) -> None:
    made = make(num_committed=2)
    run = open_run(made.folder)
    (made.folder / made.shard_keys[0]).unlink()
    with pytest.raises(ObjectMissing, match="the run was going on when it was opened: open it again"):
        run[made.sample_ids[0][0]]


def test_a_way_to_read_that_nobody_knows_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="local_files: 'mapped' is none of auto, read, map"):
        open_run(make().folder, local_files="mapped")  # type: ignore[arg-type]


def test_lengths_and_layout_are_known_without_touching_tensors(make: Make) -> None:
    made = make()
    for key in made.shard_keys:
        (made.folder / key).unlink()
    run = open_run(made.folder)
    assert run.lengths.dtype == np.int64
    assert run.target_layer_ids == (1, 3)
    assert int(run.index.num_bytes.sum()) == made.config.num_tokens * run.shard_format.bytes_per_token
