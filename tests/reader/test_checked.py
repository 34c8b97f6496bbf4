"""Damage in a shard's data: what refuses it, and that nothing is made of it.

The invariant: an export that says `complete` was made of shards that are, each of them, as recorded.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard
from hiddenq.reader import HiddenStatesDataset, HiddenStatesStream, collate, open_run
from hiddenq.reader.decode import Sample
from hiddenq.reader.exports import FORMATS, STATEMENT, ExportSettings, ExportStatement, Format, export
from hiddenq.storage import LocalStore
from tests.support.command import exit_status
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]
REMEDY = "delete the object and give the same `hiddenq run` command as before again: only its batch is made anew"


@pytest.fixture
def made(model_run: MadeRun, tmp_path: Path) -> MadeRun:
    """A run with its target head, to be damaged."""
    shutil.copytree(model_run.folder, tmp_path / "run")
    return replace(model_run, folder=tmp_path / "run")


def damage(path: Path, position: int) -> bytes:
    """Flip one bit of a file; returns what it was before."""
    whole = path.read_bytes()
    bad = bytearray(whole)
    bad[position] ^= 1
    path.write_bytes(bad)
    return whole


def hidden_states(sample: Sample) -> torch.Tensor:
    assert sample.hidden_states is not None
    return sample.hidden_states


def is_complete(dest: Path) -> bool:
    return ExportStatement.parse((dest / STATEMENT).read_bytes()).complete


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_is_exported_of_a_damaged_shard(made: MadeRun, tmp_path: Path, to: Format) -> None:
    key = made.shard_keys[1]
    damage(made.folder / key, made.layouts[key].data_offset + 1)
    with pytest.raises(DamagedShard, match=f"^{key}: damaged .checksum: expected crc64nvme:.*{re.escape(REMEDY)}$"):
        export(made.folder, ExportSettings(format=to), tmp_path / "out")
    assert not is_complete(tmp_path / "out")
    damaged = set(made.sample_ids[1])
    for path in (tmp_path / "out").rglob("*_*.*"):
        if path.suffix in (".ckpt", ".safetensors") and to != "automodel-dspark":
            row = int(path.stem.rpartition("_")[2])
            assert sorted(made.samples)[row] not in damaged, path
    assert to != "modelopt" or not damaged & {int(path.stem) for path in (tmp_path / "out").rglob("*.pt")}
    assert to != "automodel-dspark" or not list((tmp_path / "out").glob("shard-*")), (
        "each of its shards holds all samples"
    )


def test_the_command_says_so_in_one_line_and_goes_on_once_the_shard_is_mended(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest, path = tmp_path / "out", made.folder / made.shard_keys[0]
    whole = damage(path, path.stat().st_size // 2)
    command = ["export", "--out", str(made.folder), "--to", "speculators", "--dest", str(dest), "--seed", "3"]
    assert exit_status(command) == 1
    said = capsys.readouterr().err
    assert f"{made.shard_keys[0]}: damaged" in said
    assert REMEDY in said
    assert len(said.strip().splitlines()) == 1
    assert not is_complete(dest)

    path.write_bytes(whole)
    assert exit_status(command) == 0
    assert is_complete(dest)
    export(made.folder, ExportSettings(format="speculators", seed=3), tmp_path / "clean")
    for file in (tmp_path / "clean" / "hidden_states").iterdir():
        assert (dest / "hidden_states" / file.name).read_bytes() == file.read_bytes()


def test_nothing_is_exported_with_a_damaged_target_head(made: MadeRun, tmp_path: Path) -> None:
    damage(made.folder / names.TARGET_HEAD, -1)
    with pytest.raises(
        DamagedShard, match=r"target_head.safetensors: checksum: .*; delete target_head.safetensors and"
    ):
        export(made.folder, ExportSettings(format="eagle"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(made.folder, ExportSettings(format="speculators"), tmp_path / "without-it")
    assert is_complete(tmp_path / "without-it")


def test_a_sample_read_by_its_range_is_believed_unless_the_run_is_checked(made: MadeRun) -> None:
    sound, key = made.sample_ids[0][0], made.shard_keys[1]
    damaged = made.sample_ids[1][0]
    damage(made.folder / key, made.layouts[key].data_offset + 1)
    run = open_run(made.folder)
    stored = made.samples[damaged].hidden_states.bfloat16()
    assert not torch.equal(hidden_states(run[damaged]), stored), "as docs/trainers.md says: run `verify` first"
    checked = run.checked()
    assert torch.equal(hidden_states(checked[sound]), made.samples[sound].hidden_states.bfloat16())
    for read in (checked.read, checked.read_tokens, checked.checked().read, pickle.loads(pickle.dumps(checked)).read):
        with pytest.raises(DamagedShard, match=f"^{key}: damaged"):
            read(damaged)


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
def test_a_stream_and_a_dataset_of_a_checked_run_end_at_a_damaged_shard(made: MadeRun, local_files: str) -> None:
    key = made.shard_keys[1]
    damage(made.folder / key, made.layouts[key].data_offset + 1)
    run = open_run(made.folder, local_files=local_files).checked()  # type: ignore[arg-type]
    stream = HiddenStatesStream(run)
    got: list[int] = []
    with pytest.raises(DamagedShard, match=f"^{key}: damaged"):
        got.extend(sample.sample_id for sample in stream)
    order = stream.order().tolist()
    assert got == order[: len(got)]
    assert order[len(got)] in made.sample_ids[1], "all before it came"
    with pytest.raises(DamagedShard, match=f"^{key}: damaged"):
        HiddenStatesDataset(run).__getitems__(range(len(run)))


def test_a_forked_worker_of_a_loader_finds_a_damaged_shard(made: MadeRun) -> None:
    key = made.shard_keys[1]
    damage(made.folder / key, made.layouts[key].data_offset + 1)
    dataset = HiddenStatesDataset(open_run(made.folder).checked())
    loader = DataLoader(dataset, collate_fn=collate, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(DamagedShard, match=f"{key}: damaged"):
        list(loader)


def test_a_shard_is_read_whole_once_for_all_its_samples_and_threads(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    whole = LocalStore.checksum

    def counted(self: LocalStore, key: str) -> str:
        asked.append(key)
        return whole(self, key)

    monkeypatch.setattr(LocalStore, "checksum", counted)
    run = open_run(made.folder).checked()
    with ThreadPoolExecutor(8) as pool:
        for sample_id, sample in zip(run, pool.map(run.read, run), strict=True):
            assert torch.equal(sample.input_ids, made.samples[sample_id].input_ids)
    assert sorted(asked) == sorted(made.shard_keys)


def test_of_a_run_that_goes_on_what_the_store_says_counts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    going = make(num_committed=2)
    key = going.shard_keys[0]
    recorded = LocalStore(going.folder).checksum(key)
    stat = LocalStore.stat

    def with_checksum(self: LocalStore, asked: str) -> object:
        info = stat(self, asked)
        return replace(info, checksum=recorded) if info and asked == key else info

    monkeypatch.setattr(LocalStore, "stat", with_checksum)
    assert len(open_run(going.folder).checked()[going.sample_ids[0][0]])
    assert len(open_run(going.folder).checked()[going.sample_ids[1][0]]), "nothing is recorded of this one"
    damage(going.folder / key, going.layouts[key].data_offset + 1)
    with pytest.raises(DamagedShard, match=f"^{key}: damaged"):
        open_run(going.folder).checked().read(going.sample_ids[0][0])
