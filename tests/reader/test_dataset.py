"""Torch datasets over a run: complete, disjoint, resumable, bounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hiddenq import HiddenStatesDataset
from hiddenq.contracts.errors import RunMismatch, UsageError
from hiddenq.reader import HiddenStatesStream, Run, Sample, collate, open_run
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]


def ids_of(samples: Any) -> list[int]:
    return [sample.sample_id for sample in samples]


def first(samples: list[Any]) -> Any:
    return samples


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


def test_a_stream_is_a_permutation_of_samples_and_not_of_shards(make: Make) -> None:
    made = make(num_samples=60, samples_per_batch=10, max_length=40)
    stream = HiddenStatesStream(made.folder, seed=3)
    order = ids_of(stream)
    assert sorted(order) == sorted(made.samples)
    assert order == stream.order().tolist()
    lengths = [len(made.samples[sample_id].input_ids) for sample_id in order]
    neighbours = sum(abs(a - b) for a, b in itertools.pairwise(lengths)) / len(lengths)
    assert neighbours > 8, "neighbours in the stream are of similar length"
    shards = [made.shard_of(sample_id) for sample_id in order]
    assert sum(a == b for a, b in itertools.pairwise(shards)) < 20


def test_the_order_follows_from_seed_and_epoch_alone(make: Make) -> None:
    made = make(num_samples=30)
    stream = HiddenStatesStream(made.folder, seed=1)
    assert ids_of(stream) == ids_of(HiddenStatesStream(made.folder, seed=1))
    epoch0 = ids_of(stream)
    stream.set_epoch(1)
    assert ids_of(stream) != epoch0
    assert ids_of(HiddenStatesStream(made.folder, seed=2)) != epoch0
    assert ids_of(HiddenStatesStream(made.folder, seed=None)) == sorted(made.samples)


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (3, 0), (2, 2), (4, 1)])
def test_ranks_and_workers_share_the_samples_without_overlap_or_gap(make: Make, world_size: int, workers: int) -> None:
    made = make(num_samples=23)
    run = open_run(made.folder)
    parts = []
    for rank in range(world_size):
        stream = HiddenStatesStream(run, rank=rank, world_size=world_size)
        loader = DataLoader(
            stream,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        part = ids_of(loader)
        assert len(part) == len(stream)
        parts.append(part)
    together = [sample_id for part in parts for sample_id in part]
    assert sorted(together) == sorted(made.samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_equal_parts_leave_out_less_than_one_sample_a_rank(make: Make) -> None:
    made = make(num_samples=23)
    parts = [ids_of(HiddenStatesStream(made.folder, rank=rank, world_size=4, equal=True)) for rank in range(4)]
    assert [len(part) for part in parts] == [5, 5, 5, 5]
    assert len({sample_id for part in parts for sample_id in part}) == 20


@pytest.mark.parametrize("taken", [0, 1, 7, 22, 23])
def test_a_stream_goes_on_where_its_state_was_taken(make: Make, taken: int) -> None:
    made = make(num_samples=23)
    stream = HiddenStatesStream(made.folder, seed=5)
    stream.set_epoch(2)
    whole = ids_of(HiddenStatesStreamAt(made.folder, 2))
    iterator = iter(stream)
    begun = ids_of(itertools.islice(iterator, taken))
    state = stream.state_dict()
    again = HiddenStatesStream(made.folder)
    again.load_state_dict(state)
    assert begun + ids_of(again) == whole
    assert ids_of(again) == whole, "the next iteration starts anew"


def HiddenStatesStreamAt(folder: Path, epoch: int) -> HiddenStatesStream:  # noqa: N802
    stream = HiddenStatesStream(folder, seed=5)
    stream.set_epoch(epoch)
    return stream


def test_a_state_of_another_split_or_run_is_refused(make: Make) -> None:
    made, other = make(), make("other", run="other")
    state = HiddenStatesStream(made.folder, rank=0, world_size=2).state_dict()
    stream = HiddenStatesStream(made.folder, rank=0, world_size=3)
    stream.load_state_dict(state)
    with pytest.raises(RunMismatch, match="world_size 2, this one has 3"):
        next(iter(stream))
    with pytest.raises(RunMismatch, match="state of run made"):
        HiddenStatesStream(other.folder).load_state_dict(state)


def test_reading_ahead_is_bounded_in_bytes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(num_samples=60)
    run = open_run(made.folder)
    largest = int(run.index.num_bytes.max())
    bound = 4 * largest
    given_out: list[int] = []
    asked: list[int] = []
    read = Run.read

    def counted(self: Run, sample_id: int, dtype: torch.dtype | None = None) -> Sample:
        asked.append(int(self.index.num_bytes[self.index.position(sample_id)]))
        ahead = sum(asked) - sum(given_out)
        assert ahead <= bound + largest, "more is read ahead than allowed"
        return read(self, sample_id, dtype)

    monkeypatch.setattr(Run, "read", counted)
    for sample in HiddenStatesStream(run, prefetch_bytes=bound, threads=3):
        given_out.append(int(run.index.num_bytes[run.index.position(sample.sample_id)]))
    assert len(given_out) == 60


def test_a_stream_that_may_read_nothing_ahead_still_gives_everything(make: Make) -> None:
    made = make()
    assert sorted(ids_of(HiddenStatesStream(made.folder, prefetch_bytes=0))) == sorted(made.samples)


def test_a_damaged_sample_ends_the_stream_with_its_error(make: Make) -> None:
    made = make()
    path = made.folder / made.shard_keys[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Exception, match="hiddenq verify"):
        list(HiddenStatesStream(made.folder))
