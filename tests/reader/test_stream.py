"""A stream over a run: complete, disjoint, resumable, bounded, the same however it reads ahead."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from hiddenq.contracts.errors import DamagedShard, ObjectMissing, RunMismatch, UsageError
from hiddenq.reader import HiddenStatesStream, Run, Sample, open_run
from hiddenq.reader.buffers import MIN_BYTES
from hiddenq.reader.files import LocalFiles
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]


def ids_of(samples: Any) -> list[int]:
    return [sample.sample_id for sample in samples]


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


def HiddenStatesStreamAt(folder: Path, epoch: int, seed: int = 5) -> HiddenStatesStream:  # noqa: N802
    stream = HiddenStatesStream(folder, seed=seed)
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


def test_a_stream_that_was_left_begins_anew_unless_a_state_says_otherwise(make: Make) -> None:
    made = make(num_samples=23)
    stream = HiddenStatesStream(made.folder)
    ids_of(itertools.islice(stream, 9))
    state = stream.state_dict()
    assert ids_of(stream) == stream.order().tolist()
    stream.load_state_dict(state)
    stream.set_epoch(0)
    assert ids_of(stream) == stream.order().tolist()[9:]
    stream.load_state_dict(state)
    stream.set_epoch(1)
    assert ids_of(stream) == stream.order().tolist(), "another epoch has no use for the state"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_persistent_workers_follow_the_epoch(make: Make, context: str) -> None:
    made = make(num_samples=23)
    stream = HiddenStatesStream(made.folder)
    loader = DataLoader(
        stream, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context=context
    )
    for epoch in (0, 1, 5):
        stream.set_epoch(epoch)
        assert ids_of(loader) == stream.order().tolist()
        assert stream.order().tolist() == HiddenStatesStreamAt(made.folder, epoch, seed=0).order().tolist()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata asks for it
@pytest.mark.parametrize("taken", [1, 4])
def test_a_loader_with_persistent_workers_goes_on_in_the_middle_of_an_epoch(make: Make, taken: int) -> None:
    made = make(num_samples=41)

    def loader_over(stream: HiddenStatesStream) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(
            stream,
            batch_size=4,
            num_workers=2,
            collate_fn=ids_of,
            persistent_workers=True,
            multiprocessing_context="fork",
        )

    stream = HiddenStatesStream(made.folder, rank=1, world_size=2)
    stream.set_epoch(3)
    loader = loader_over(stream)
    iterator = iter(loader)
    begun = [next(iterator) for _ in range(taken)]
    state = loader.state_dict()
    rest = list(iterator)
    again = loader_over(HiddenStatesStream(made.folder, rank=1, world_size=2))
    again.load_state_dict(state)
    assert list(again) == rest
    assert sorted(itertools.chain(*begun, *rest)) == sorted(stream.order().tolist())


@pytest.mark.parametrize("local_files", ["auto", "read"])
def test_large_samples_come_out_of_workers_whole_though_their_memory_is_used_again(
    make: Make, local_files: LocalFiles
) -> None:
    made = make(num_samples=12, min_length=250, max_length=250, hidden_size=1024)
    run = open_run(made.folder, local_files=local_files)
    assert int(run.index.num_bytes.min()) > MIN_BYTES
    stream = HiddenStatesStream(run, threads=2)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    kept = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        kept += list(loader)
    assert sorted(ids_of(kept)) == sorted([*made.samples, *made.samples])
    for sample in kept:
        assert torch.equal(sample.hidden_states, made.samples[sample.sample_id].hidden_states.bfloat16())
        assert torch.equal(sample.input_ids, made.samples[sample.sample_id].input_ids)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 4, "world_size": 4}, "rank 4 of 4"),
        ({"rank": -1, "world_size": 4}, "rank -1 of 4"),
        ({"threads": 0}, "threads 0"),
        ({"prefetch_bytes": -1}, "prefetch_bytes -1"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_a_stream_that_can_not_be_is_refused(make: Make, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        HiddenStatesStream(make().folder, **fields)


def test_a_negative_epoch_is_refused_where_it_is_set(make: Make) -> None:
    stream = HiddenStatesStream(make().folder)
    with pytest.raises(UsageError, match="epoch -1: at least 0"):
        stream.set_epoch(-1)
    assert stream.epoch == 0


def test_many_epochs_take_no_more_memory_than_one(make: Make) -> None:
    made = make(num_samples=24, min_length=250, max_length=250, hidden_size=1024, samples_per_batch=8)
    stream = HiddenStatesStream(made.folder, prefetch_bytes=8 << 20, threads=2)
    num_bytes = int(stream.run.index.num_bytes.sum())
    assert num_bytes > 30 << 20

    def grown_by(epochs: int) -> int:
        before = own_bytes()
        for _ in range(epochs):
            for _ in stream:
                pass
        return own_bytes() - before

    grown_by(2)
    assert grown_by(6) < num_bytes // 4


def own_bytes() -> int:
    """Memory of this process, without pages of mapped files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_reading_ahead_is_bounded_in_bytes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(num_samples=60)
    monkeypatch.setattr("hiddenq.reader.ahead.GROUP_BYTES", 0)
    run = open_run(made.folder, local_files="read")
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


@pytest.mark.parametrize("local_files", ["auto", "map"])
def test_the_kernel_reads_ahead_what_it_has_not_within_the_bound(
    make: Make, local_files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(num_samples=60)
    run = open_run(made.folder, local_files=local_files)
    bound = 4 * int(run.index.num_bytes.max())
    asked: list[int] = []
    given_out = 0
    preadv = os.preadv

    def not_cached(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            raise BlockingIOError
        return preadv(descriptor, buffers, offset, flags)

    def noted(_descriptor: int, _begin: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append(num_bytes)

    monkeypatch.setattr(os, "preadv", not_cached)
    monkeypatch.setattr(os, "posix_fadvise", noted)
    for sample in HiddenStatesStream(run, prefetch_bytes=bound):
        assert sum(asked) - given_out <= bound
        given_out += int(run.index.num_bytes[run.index.position(sample.sample_id)])
    assert sum(asked) == given_out
    asked.clear()
    monkeypatch.setattr(os, "preadv", preadv)
    assert len(list(HiddenStatesStream(run))) == 60
    assert not asked, "what lies in the page cache is not asked for"


def test_a_stream_that_may_read_nothing_ahead_still_gives_everything(make: Make) -> None:
    made = make()
    assert sorted(ids_of(HiddenStatesStream(made.folder, prefetch_bytes=0))) == sorted(made.samples)


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
@pytest.mark.parametrize("group_bytes", [0, 3_000, 1 << 20])
def test_a_stream_gives_what_the_run_gives_however_it_reads_ahead(
    make: Make, local_files: LocalFiles, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(num_samples=40)
    monkeypatch.setattr("hiddenq.reader.ahead.GROUP_BYTES", group_bytes)
    run = open_run(made.folder, local_files=local_files)
    for dtype in (None, torch.float32):
        for sample in HiddenStatesStream(run, dtype=dtype, prefetch_bytes=10_000, threads=2):
            wanted = run.read(sample.sample_id, dtype)
            for name in ("input_ids", "loss_mask", "hidden_states", "final_hidden_state"):
                assert torch.equal(getattr(sample, name), getattr(wanted, name))
                assert getattr(sample, name).dtype == getattr(wanted, name).dtype


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_a_damaged_sample_ends_the_stream_after_all_before_it(
    make: Make, local_files: LocalFiles, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(num_samples=30)
    monkeypatch.setattr("hiddenq.reader.ahead.GROUP_BYTES", group_bytes)
    run = open_run(made.folder, local_files=local_files)
    stream = HiddenStatesStream(run)
    order = stream.order().tolist()
    path = made.folder / made.shard_of(order[17])
    whole = path.read_bytes()
    last = made.sample_ids[made.shard_keys.index(made.shard_of(order[17]))][-1]
    path.write_bytes(whole[:-1])
    got: list[int] = []
    with pytest.raises(DamagedShard, match=f"sample {last}: expected .*hiddenq verify"):
        got.extend(sample.sample_id for sample in stream)
    assert got == order[: order.index(last)]
    state = stream.state_dict()
    path.write_bytes(whole)
    mended = HiddenStatesStream(open_run(made.folder))
    mended.load_state_dict(state)
    assert got + ids_of(mended) == order


@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
def test_a_shard_that_is_deleted_in_the_middle_of_an_epoch_ends_it_with_its_name(
    make: Make, local_files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(num_samples=30)
    monkeypatch.setattr("hiddenq.reader.ahead.GROUP_BYTES", 0)
    stream = HiddenStatesStream(open_run(made.folder, local_files=local_files), prefetch_bytes=0, threads=1)
    iterator = iter(stream)
    first = next(iterator).sample_id
    gone = next(made.shard_of(each) for each in stream.order()[5:] if made.shard_of(each) != made.shard_of(first))
    (made.folder / gone).unlink()
    with pytest.raises(ObjectMissing, match=f"{gone}: no such object; run `hiddenq verify`"):
        list(iterator)
