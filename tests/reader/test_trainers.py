"""Exports and drop-in datasets in the trainers' own loaders, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch

from hiddenq.reader import open_run
from hiddenq.reader.exports import ExportSettings, export
from hiddenq.reader.trainers import SpeculatorsTransfer
from tests.reader.trainers_page import ROOT, TrainersPage, type_command
from tests.support.made_run import MadeRun

LOADERS = Path(__file__).parent / "loaders"


def run_loader(trainers: Path, name: str, folder: Path, code: str, *arguments: str) -> None:
    """Run a loader's script in `folder`, then the trainers page's code for it, in one process of its own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(trainers), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    program = f"import runpy\nrunpy.run_path({str(LOADERS / name)!r}, run_name='__main__')\n{code}\nprint('all of it')"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-3:-1] == ["loaded", "all of it"]


@pytest.mark.slow
def test_speculators_own_loader_reads_the_export_and_takes_our_datasets(
    trainers: Path, model_run: MadeRun, tmp_path: Path
) -> None:
    page = TrainersPage.read(model_run.folder)
    for command in page.commands:
        if "--to speculators" in command:
            type_command(command, tmp_path)
    for name, settings in {
        "plain": ExportSettings(format="speculators", draft_vocab_size=48, seed=2),
        "linked": ExportSettings(format="speculators", link=True, seed=2),
        "fp8": ExportSettings(format="speculators", dtype="float8_e4m3fn", seed=2),
    }.items():
        export(model_run.folder, settings, tmp_path / name)
    folders = ("plain", "linked", "fp8", str(model_run.folder))
    run_loader(trainers, "speculators_loader.py", tmp_path, page.code["speculators"], *folders)


@pytest.mark.slow
def test_model_optimizers_own_dataset_reads_the_export_and_its_collator_takes_ours(
    trainers: Path, model_run: MadeRun, tmp_path: Path
) -> None:
    page = TrainersPage.read(model_run.folder)
    export(model_run.folder, ExportSettings(format="modelopt", draft_vocab_size=48), tmp_path / "modelopt-data")
    export(model_run.folder, ExportSettings(format="modelopt", prenorm=True), tmp_path / "prenorm")
    folders = ("modelopt-data", "prenorm", str(model_run.folder))
    run_loader(trainers, "modelopt_loader.py", tmp_path, page.code["modelopt"], *folders)


@pytest.mark.slow
def test_specforges_own_reader_normalizers_and_loader_take_the_export_of_each_method(
    trainers: Path, model_run: MadeRun, tmp_path: Path
) -> None:
    page = TrainersPage.read(model_run.folder)
    export(model_run.folder, ExportSettings(format="specforge", draft_vocab_size=48), tmp_path / "specforge-data")
    for method in ("dflash", "dspark"):
        export(model_run.folder, ExportSettings(format="specforge", method=method, seed=1), tmp_path / method)
    folders = ("specforge-data", "dflash", "dspark", str(model_run.folder))
    run_loader(trainers, "specforge_loader.py", tmp_path, page.code["specforge"], *folders)


@pytest.mark.slow
def test_automodels_own_cache_reader_takes_the_export(trainers: Path, model_run: MadeRun, tmp_path: Path) -> None:
    page = TrainersPage.read(model_run.folder)
    export(model_run.folder, ExportSettings(format="automodel-dspark", seed=3), tmp_path / "plain")
    settings = ExportSettings(format="automodel-dspark", seq_length=2048)
    export(model_run.folder, settings, tmp_path / "dspark-cache")
    run_loader(trainers, "automodel_loader.py", tmp_path, page.code["automodel"], "plain", str(model_run.folder))


@pytest.mark.slow
def test_eagles_own_dataset_and_collator_take_the_export(trainers: Path, model_run: MadeRun, tmp_path: Path) -> None:
    settings = ExportSettings(format="eagle", dtype="float32", seed=1, draft_vocab_size=48)
    export(model_run.folder, settings, tmp_path / "eagle-data")
    run_loader(trainers, "eagle_loader.py", tmp_path, "", "eagle-data", str(model_run.folder))


def test_the_dataset_folder_opens_with_datasets_and_gives_tensors(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="speculators", link=True), tmp_path)
    rows = datasets.load_from_disk(str(tmp_path))
    assert rows.column_names == ["input_ids", "loss_mask", "seq_len", "sample_id"]
    for row, sample_id in zip(rows, sorted(model_run.samples), strict=True):
        assert int(row["sample_id"]) == sample_id
        assert torch.equal(row["input_ids"], model_run.samples[sample_id].input_ids)
        assert torch.equal(row["loss_mask"], model_run.samples[sample_id].loss_mask)


@pytest.mark.parametrize("row", [-1, 16])
def test_a_row_outside_the_dataset_is_not_read(model_run: MadeRun, row: int) -> None:
    run = open_run(model_run.folder)
    assert SpeculatorsTransfer(run, list(run)).get_cached(row) is None
