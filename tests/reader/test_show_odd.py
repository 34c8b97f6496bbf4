"""`hiddenq sample` of a damaged sample: it is what one looks at then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddenq.reader import open_run, show_sample
from tests.reader.test_show import printed
from tests.support.made_run import MadeRun


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_layer_that_is_not_finite_is_said_so_and_hides_no_other(make: Callable[..., MadeRun], value: float) -> None:
    made = make(model="/nowhere/model")
    made.samples[0].hidden_states[:, 0] = value
    made.write_shards()
    made.finish()
    rows = [line for line in printed(show_sample(open_run(made.folder), 0)).splitlines() if "layer " in line]
    bad, good = rows[1:3]
    assert "not finite" in bad
    assert "█" in good


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_cannot_be_used_leaves_the_ids(
    model_run: MadeRun, model_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).write_text("{}" if name == "tokenizer.json" else "[]")
    run = open_run(model_run.folder)
    shown = printed(show_sample(run, 0, model=str(folder)))
    assert " ".join(str(token) for token in run[0].input_ids[:5].tolist()) in shown.replace("⟦", "").replace("⟧", "")
