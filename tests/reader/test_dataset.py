"""A run as a map-style dataset, and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hiddenq import HiddenStatesDataset
from hiddenq.contracts.errors import UsageError
from hiddenq.reader import collate, open_run
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]


def ids_of(samples: Any) -> list[int]:
    return [sample.sample_id for sample in samples]


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_a_loader_gives_every_sample_once_in_batches_that_are_padded_at_the_end(
    make: Make, context: str | None
) -> None:
    made = make()
    dataset = HiddenStatesDataset(made.folder, dtype=torch.float32)
    dataset[0]
    loader = DataLoader(
        dataset, batch_size=5, collate_fn=collate, num_workers=1 if context else 0, multiprocessing_context=context
    )
    seen = []
    for batch in loader:
        assert batch["hidden_states"].shape == (*batch["input_ids"].shape, 2, 16)
        assert batch["final_hidden_state"].shape == (*batch["input_ids"].shape, 16)
        assert torch.equal(batch["attention_mask"].sum(1), batch["lengths"])
        for row, (sample_id, length) in enumerate(zip(batch["sample_ids"], batch["lengths"], strict=True)):
            sample = made.samples[int(sample_id)]
            assert torch.equal(batch["input_ids"][row, :length], sample.input_ids)
            assert torch.equal(batch["loss_mask"][row, :length], sample.loss_mask)
            assert torch.equal(batch["hidden_states"][row, :length], sample.hidden_states.bfloat16().float())
            assert not batch["hidden_states"][row, length:].any()
            assert not batch["loss_mask"][row, length:].any()
        seen += batch["sample_ids"].tolist()
    assert seen == sorted(made.samples)


def test_a_dataset_of_chosen_samples_keeps_their_order_and_refuses_unknown_ones(make: Make) -> None:
    made = make()
    chosen = [7, 0, 5]
    dataset = HiddenStatesDataset(made.folder, sample_ids=chosen)
    assert ids_of(dataset[position] for position in range(len(dataset))) == chosen
    assert dataset.lengths.tolist() == [len(made.samples[sample_id].input_ids) for sample_id in chosen]
    with pytest.raises(UsageError, match="1 are not in run made, first 2"):
        HiddenStatesDataset(made.folder, sample_ids=[0, 2])


def test_states_that_are_not_stored_are_not_in_the_batch(make: Make) -> None:
    made = make(target_layer_ids=())
    batch = collate([open_run(made.folder)[0]])
    assert "hidden_states" not in batch
