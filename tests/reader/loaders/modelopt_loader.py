"""Runs in a process with Model-Optimizer on its path: its own dataset over an export, and ours in its collator.

Arguments: the export, the run. Prints `loaded` when everything agrees.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

import hiddenq
from hiddenq.reader.trainers import ModelOptimizerDataset


def main(exported: str, prenorm: str, location: str) -> None:
    run = hiddenq.open_run(location)
    for folder, before_norm in ((exported, False), (prenorm, True)):
        files = sorted(Path(folder).rglob("*.pt"), key=lambda path: int(path.stem))
        assert len(files) == len(run)
        for answer_only in (False, True):
            theirs = OfflineSupervisedDataset([str(path) for path in files], answer_only_loss=answer_only)
            ours = ModelOptimizerDataset(run, answer_only_loss=answer_only, prenorm=before_norm)
            assert len(theirs) == len(ours)
            for position in range(len(theirs)):
                left, right = theirs[position], ours[position]
                assert left.keys() == right.keys()
                for name, value in left.items():
                    if isinstance(value, torch.Tensor):
                        assert value.dtype == right[name].dtype, name
                        assert torch.equal(value, right[name]), name
                    else:
                        assert value == right[name] == before_norm, name
            for dataset in (theirs, ours):
                batch = EagleOfflineDataCollator(train_len=32)([dataset[0], dataset[1]])
                assert batch["base_model_outputs"]["base_hidden_prenorm"] is before_norm
                assert batch["base_model_outputs"]["aux_hidden_states"].shape[:2] == (2, 32)
    print("loaded")


main(*sys.argv[1:])
