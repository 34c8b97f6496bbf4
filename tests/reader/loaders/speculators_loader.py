"""Runs in a process with speculators on its path: its own loader over an export, and our dataset in its data loader.

Arguments: the export, the linked export, the run. Prints `loaded` when everything agrees.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from hs_connectors.transfer import FP8Transfer
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import _setup_dataloader
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution, save_token_frequency_distribution

import hiddenq
from hiddenq.reader.trainers import SpeculatorsDataset, SpeculatorsTransfer
from tests.support.samples import both_states


def main(exported: str, linked: str, fp8: str, location: str) -> None:
    run = hiddenq.open_run(location)
    order = np.load(Path(exported, "sample_ids.npy"))
    layers = len(run.target_layer_ids)
    whole = ArrowDataset(max_len=64, datapath=exported, on_missing="raise")
    assert len(whole) == len(run), "every row"
    assert list(whole.approx_lengths) == [int(run.lengths[run.index.position(int(i))]) for i in order]
    for row, sample_id in enumerate(order):
        same(whole[row], SpeculatorsDataset(run, sample_ids=[int(sample_id)])[0])
        hidden, final = both_states(run[int(sample_id)])
        assert torch.equal(whole[row]["hidden_states"], hidden.flatten(1))
        assert torch.equal(whole[row]["verifier_last_hidden_states"], final)

    train = ArrowDataset(max_len=64, datapath=exported, on_missing="raise", train_ratio=0.75, split="train")
    val = ArrowDataset(max_len=64, datapath=exported, on_missing="raise", train_ratio=0.75, split="val")
    same(val[0], whole[len(train)])

    transfer = SpeculatorsTransfer(run, np.load(Path(linked, "sample_ids.npy")))
    through = ArrowDataset(max_len=64, datapath=linked, transfer=transfer, on_missing="raise")
    for row in range(len(whole)):
        same(through[row], whole[row])
    assert not Path(linked, "hidden_states").exists(), "nothing was copied"

    eighth = ArrowDataset(
        max_len=64, datapath=fp8, transfer=FP8Transfer(Path(fp8, "hidden_states")), on_missing="raise"
    )
    wide = whole[0]["hidden_states"].float()
    assert (eighth[0]["hidden_states"].float() - wide).abs().max() <= wide.abs().max() / 8

    for dataset in (whole, SpeculatorsDataset(run, sample_ids=order.tolist())):
        loader = _setup_dataloader(dataset, 128, run.config.model.hidden_size, num_workers=0, num_target_layers=layers)
        documents = 0
        for batch in loader:
            assert batch["error_records"] == 0
            assert batch["hidden_states"].shape == (1, 128, layers * run.config.model.hidden_size)
            documents += int(batch["document_ids"].max()) + 1
        assert documents == len(run)

    theirs = Path(linked, "their_freq.pt")
    save_token_frequency_distribution(whole.data, theirs)
    counts = torch.load(theirs, weights_only=True)
    assert counts == torch.load(Path(exported, "token_freq.pt"), weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(counts, 48, run.config.model.vocab_size)
    assert np.array_equal(d2t.numpy(), np.load(Path(exported, "d2t.npy")))
    assert np.array_equal(t2d.numpy(), np.load(Path(exported, "t2d.npy")))
    print("loaded")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


main(*sys.argv[1:])
