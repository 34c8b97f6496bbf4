"""Runs in a process with NeMo Automodel on its path: its own DSpark cache reader over an export.

Arguments: the export, the run. Prints `loaded` when everything agrees.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from nemo_automodel.components.datasets.llm.dspark_cache import (
    CachedDSparkDataset,
    build_cached_dspark_dataloader,
    read_target_weight_modules,
)

import hiddenq
from tests.support.samples import both_states


def main(exported: str, location: str) -> None:
    run = hiddenq.open_run(location)
    order = np.load(Path(exported, "sample_ids.npy"))
    dataset = CachedDSparkDataset(exported)
    assert len(dataset) == len(run)
    assert dataset.manifest["target_layer_ids"] == list(run.target_layer_ids)
    for row, sample_id in enumerate(order.tolist()):
        item, sample = dataset[row], run[sample_id]
        hidden, final = both_states(sample)
        wanted = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "target_hidden_states": hidden.flatten(1),
            "target_last_hidden_states": run.target_head.post_norm(final),
        }
        assert item.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert item[name].dtype == tensor.dtype, name
            assert torch.equal(item[name][: len(sample)], tensor), name
            assert not item[name][len(sample) :].any(), name
    rows = sum(
        len(batch["input_ids"])
        for batch in build_cached_dspark_dataloader(cache_dir=exported, batch_size=3, shuffle=True)
    )
    assert rows == len(run)
    embed, lm_head = read_target_weight_modules(exported)
    assert torch.equal(embed.weight, run.target_head.embedding.float())
    assert torch.equal(lm_head.weight, run.target_head.lm_head.float())
    print("loaded")


main(*sys.argv[1:])
