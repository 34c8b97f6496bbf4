"""Runs in a process with SpecForge on its path: its own reader, normalizers and loader over an export of each method.

Arguments: the EAGLE-3, DFlash and DSpark exports, the run. Prints `loaded` when everything agrees.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specforge.algorithms.common import dflash_family_data as dflash
from specforge.algorithms.common.collation import concatenate_features
from specforge.algorithms.eagle3 import data as eagle3
from specforge.runtime.data_plane import FeatureDataLoader, LocalFeatureStore
from specforge.training.vocab_mapping import count_effective_feature_tokens

import hiddenq
from hiddenq.reader import Run
from tests.support.samples import both_states

MAX_LEN = 64


def main(eagle3_folder: str, dflash_folder: str, dspark_folder: str, location: str) -> None:
    run = hiddenq.open_run(location)
    asked = {"run_id": "drafter", "ttt_length": 7, "max_len": MAX_LEN}
    reader = eagle3.build_offline_reader(eagle3_folder, **asked)
    for sample_id, item in items(run, eagle3_folder, reader, eagle3.build_offline_normalizer(MAX_LEN)):
        sample = run[sample_id]
        hidden, final = both_states(sample)
        same(item["hidden_state"], hidden.flatten(1))
        same(item["target"], run.target_head.post_norm(final))
        same(item["input_ids"], sample.input_ids)
        same(item["loss_mask"][:, :-1], sample.loss_mask[:-1])
    counts = torch.load(Path(eagle3_folder, "token_freq.pt"), weights_only=True)
    assert counts == dict(count_effective_feature_tokens(eagle3_folder, target_vocab_size=run.config.model.vocab_size))
    mapping = torch.load(Path(eagle3_folder, "vocab_mapping.pt"), weights_only=True)
    assert int(mapping["t2d"].sum()) == len(mapping["d2t"])

    readers = {
        dflash_folder: dflash.build_offline_reader("dflash", dflash_folder, **asked),
        dspark_folder: dflash.build_dspark_offline_reader("dspark", dspark_folder, **asked),
    }
    for folder, reader in readers.items():
        last = folder == dspark_folder
        normalizer = (dflash.build_dspark_offline_normalizer if last else dflash.build_offline_normalizer)(MAX_LEN)
        for sample_id, item in items(run, folder, reader, normalizer):
            sample = run[sample_id]
            hidden, final = both_states(sample)
            same(item["hidden_states"], hidden.flatten(1))
            same(item["loss_mask"], sample.loss_mask)
            if last:
                same(item["target_last_hidden_states"], run.target_head.post_norm(final))
    print("loaded")


def items(run: Run, folder: str, reader: Any, normalizer: Any) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """(sample id, what their loader makes of it), of every file that their reader finds."""
    order = np.load(Path(folder, "sample_ids.npy"))
    reader.validate_files = True
    refs = reader.read()
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=refs,
        strategy=reader.strategy,
        per_sample_transform=normalizer,
        collate_fn=concatenate_features,
    )
    rows = [int(ref.feature_store_uri.rpartition("data_")[2].removesuffix(".ckpt")) for ref in refs]
    found = [(int(order[row]), batch.tensors) for row, batch in zip(rows, loader, strict=True)]
    assert len(found) > len(run) // 2
    return found


def same(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.dtype == ours.dtype
    assert torch.equal(theirs[0], ours)


main(*sys.argv[1:])
