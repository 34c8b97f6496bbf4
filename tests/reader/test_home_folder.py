"""A model named by `~`, as a shell leaves it in `--model=~/model`: the same folder to everyone who opens it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.loading import load_decoder
from gpu_worker.target_head import load_head
from hiddenq.model_identity import identify_model
from hiddenq.reader import verify
from hiddenq.reader.show import load_decoder as load_tokenizer
from tests.support.made_run import MadeRun


def test_a_model_below_the_home_folder_is_found_by_all(
    model_folder: Path, model_run: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(model_folder.parent))
    name = f"~/{model_folder.name}"
    assert identify_model(name).identity.model == name
    assert load_decoder(name, dtype=torch.bfloat16).model is not None
    assert load_head(name, None) is not None
    assert load_tokenizer(name) is not None
    report = verify(model_run.folder, recompute=1, model=name, seed=0)
    assert report.ok, report.lines()
