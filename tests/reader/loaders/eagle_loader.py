"""Runs in a process with EAGLE on its path: the dataset and the collator of its training script over an export.

The script itself starts to train when it is imported, so its classes are taken out of its source, unchanged.
Arguments: the export, the run. Prints `loaded` when everything agrees.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hiddenq
from tests.support.samples import both_states

WANTED = {"list_files", "CustomDataset", "DataCollatorWithPadding"}


def main(exported: str, location: str) -> None:
    run = hiddenq.open_run(location)
    theirs = training_script()
    order = np.load(Path(exported, "sample_ids.npy"))
    paths = theirs["list_files"](str(Path(exported, "data")))
    dataset = theirs["CustomDataset"](paths)
    assert len(dataset) == len(run), "every file below the folder is a sample"
    for path, item in zip(paths, dataset, strict=True):
        sample = run[int(order[int(Path(path).stem.removeprefix("data_"))])]
        post_norm = run.target_head.post_norm(both_states(sample)[1]).float()
        assert torch.equal(item["hidden_state_big"][0], post_norm)
        assert torch.equal(item["target"][0, :-1], post_norm[1:])
        assert torch.equal(item["input_ids"][0, :-1], sample.input_ids[1:])
        assert item["loss_mask"][:-1] == sample.loss_mask[:-1].tolist()
    batch = theirs["DataCollatorWithPadding"]()([dataset[0], dataset[1]])
    assert batch["hidden_states"].shape[:2] == batch["loss_mask"].shape
    print("loaded")


def training_script() -> dict[str, Any]:
    """Those definitions of `eagle.train.main`, compiled from its source."""
    spec = importlib.util.find_spec("eagle.train")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "main.py")
    chosen = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in WANTED]
    assert len(chosen) == len(WANTED)
    names: dict[str, Any] = {"os": os, "torch": torch, "Dataset": torch.utils.data.Dataset, "List": list, "Dict": dict}
    names |= {"Any": Any, "train_config": {"max_len": 2048}}
    exec(compile(ast.Module(body=chosen, type_ignores=[]), str(source), "exec"), names)
    return names


main(*sys.argv[1:])
