"""The plan: a partition within its limits, the longest first, and nothing mixed that rotary scaling would mix; and no
different for being sorted on disk."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.batching import BatchLimits, RotaryLimits, cut_batches
from producer.order import RUN_KEYS, Keys, SampleOrder, key_lengths, key_places, make_keys

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)
ROTARY = st.sampled_from([RotaryLimits(), RotaryLimits(longrope_original=100), RotaryLimits(dynamic_original=100)])


def limits(rotary: RotaryLimits, *, token_budget: int = 512, max_shard_bytes: int = 1 << 20) -> BatchLimits:
    return BatchLimits(token_budget=token_budget, max_shard_bytes=max_shard_bytes, bytes_per_token=100, rotary=rotary)


def no_folder() -> Path:
    raise AssertionError("a plan of so few samples needs no disk")


def ordered(
    lengths: Any, seed: int | None, rotary: RotaryLimits, folder: Path | None = None, run_keys: int = RUN_KEYS
) -> Keys:
    order = SampleOrder(lambda: folder or no_folder(), run_keys)
    for part in np.array_split(np.array(lengths, np.int64), 7):
        order.append_lengths(part)
    assert len(order) == len(lengths)
    return np.concatenate([np.empty(0, np.uint64), *order.chunks(seed, rotary)])


@given(LENGTHS, st.sampled_from([None, 0, 7]), ROTARY)
def test_the_plan_is_a_partition_within_its_limits(lengths: list[int], seed: int | None, rotary: RotaryLimits) -> None:
    keys = ordered(lengths, seed, rotary)
    assert sorted(key_places(keys).tolist()) == list(range(len(lengths)))
    assert key_lengths(keys).tolist() == [lengths[place] for place in key_places(keys)]
    first, bounds = 0, limits(rotary, max_shard_bytes=60_000)
    for batch in cut_batches(key_lengths(keys).tolist(), bounds):
        members = [lengths[place] for place in key_places(keys[first : first + batch.num_samples])]
        first += batch.num_samples
        assert members
        assert (batch.num_tokens, batch.padded_length) == (sum(members), max(members))
        assert batch.num_samples == 1 or bounds.fits(batch.num_samples, batch.num_tokens, batch.padded_length)
        assert len({rotary.group(length) for length in members}) == 1
    assert first == len(lengths)


def test_a_batch_of_tiny_samples_has_no_more_rows_than_a_gpus_grid() -> None:
    batches = list(cut_batches([1] * 70_000, limits(RotaryLimits(), token_budget=1 << 20, max_shard_bytes=1 << 30)))
    assert [batch.num_samples for batch in batches] == [65_535, 4_465]


@given(LENGTHS)
def test_the_longest_comes_first_and_equals_keep_the_order_of_rows(lengths: list[int]) -> None:
    keys = ordered(lengths, None, RotaryLimits())
    rows = [
        (-length, place) for length, place in zip(key_lengths(keys).tolist(), key_places(keys).tolist(), strict=True)
    ]
    assert rows == sorted(rows)


@given(LENGTHS, st.integers(0, 1 << 63), ROTARY)
def test_a_shuffle_moves_samples_among_similar_lengths_only(
    lengths: list[int], seed: int, rotary: RotaryLimits
) -> None:
    plain, shuffled = ordered(lengths, None, rotary), ordered(lengths, seed, rotary)
    assert sorted(shuffled.tolist()) == plain.tolist()
    for before, after in zip(key_lengths(plain).tolist(), key_lengths(shuffled).tolist(), strict=True):
        assert abs(before - after) <= max(before, after) / 64
    assert ordered(lengths, seed, rotary).tolist() == shuffled.tolist()


@pytest.mark.parametrize("rotary", [RotaryLimits(), RotaryLimits(dynamic_original=100)])
@pytest.mark.parametrize("run_keys", [1100, 3000, 20_000])
def test_an_order_sorted_on_disk_is_that_of_memory(tmp_path: Path, rotary: RotaryLimits, run_keys: int) -> None:
    lengths = np.clip(np.random.default_rng(3).lognormal(5, 1, 20_000), 1, 4000).astype(np.int64)
    assert ordered(lengths, None, rotary, tmp_path, run_keys).tolist() == ordered(lengths, None, rotary).tolist()
    assert any(tmp_path.iterdir())
    assert ordered(lengths, 5, rotary, tmp_path, run_keys).tolist() == ordered(lengths, 5, rotary).tolist()


def test_a_band_of_more_samples_than_a_run_holds_is_shuffled_piece_by_piece(tmp_path: Path) -> None:
    keys = ordered([50] * 5000, 1, RotaryLimits(), tmp_path, 1000)
    places = key_places(keys)
    assert places.tolist() != sorted(places.tolist())
    assert [set(piece.tolist()) for piece in np.split(places, 5)] == [
        set(range(begin, begin + 1000)) for begin in range(0, 5000, 1000)
    ]


def test_sorting_on_disk_holds_some_runs_in_memory_at_most(tmp_path: Path) -> None:
    order = SampleOrder(lambda: tmp_path, 5000)
    chance = np.random.default_rng(4)
    for _ in range(60):
        order.append_lengths(np.clip(chance.lognormal(5, 1, 1000), 1, 4000).astype(np.int64))
    sizes = [len(chunk) for chunk in order.chunks(None, RotaryLimits())]
    assert sum(sizes) == 60_000
    assert max(sizes) <= 5000 + 12 * 1024


def test_a_seed_decides_the_shuffle() -> None:
    orders = {tuple(ordered([50] * 100, seed, RotaryLimits()).tolist()) for seed in (None, 1, 2)}
    assert len(orders) == 3


def test_samples_are_kept_apart_where_dynamic_scaling_starts() -> None:
    batches = list(cut_batches([34, 33, 33, 32, 31, 20], limits(RotaryLimits(dynamic_original=32))))
    assert [(batch.num_samples, batch.padded_length) for batch in batches] == [(1, 34), (2, 33), (3, 32)]


def test_samples_are_kept_apart_where_longrope_changes_its_factors() -> None:
    batches = list(cut_batches([40, 33, 32, 20], limits(RotaryLimits(longrope_original=32))))
    assert [(batch.num_samples, batch.padded_length) for batch in batches] == [(2, 40), (2, 32)]


def test_a_shard_never_outgrows_its_bound() -> None:
    bounds = limits(RotaryLimits(), max_shard_bytes=60_000, token_budget=1 << 20)
    for batch in cut_batches([100] * 50, bounds):
        assert batch.num_tokens * bounds.bytes_per_token <= 60_000
    assert bounds.max_sample_tokens * bounds.bytes_per_token <= 60_000


@pytest.mark.parametrize(("seed", "most"), [(None, 1.005), (1, 1.01)])
def test_padding_is_small_for_lengths_as_in_life(seed: int | None, most: float) -> None:
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(np.log(365), 0.9, 100_000), 16, 4096).astype(np.int64)
    keys = ordered(lengths, seed, RotaryLimits())
    bounds = BatchLimits(token_budget=32768, max_shard_bytes=1 << 40, bytes_per_token=1, rotary=RotaryLimits())
    padded = sum(batch.num_samples * batch.padded_length for batch in cut_batches(key_lengths(keys).tolist(), bounds))
    assert padded / lengths.sum() <= most


@pytest.mark.parametrize(
    ("rope", "positions", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 4096, RotaryLimits()),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, 4096, RotaryLimits()),
        ({"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 8192}, 4096, RotaryLimits()),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 2048, RotaryLimits(dynamic_original=2048)),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096},
            131072,
            RotaryLimits(longrope_original=4096),
        ),
        (
            {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}},
            512,
            RotaryLimits(dynamic_original=512),
        ),
        (None, 512, RotaryLimits()),
    ],
)
def test_rotary_limits_come_from_the_config(rope: Any, positions: int, expected: RotaryLimits) -> None:
    config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=positions)
    assert RotaryLimits.of(config) == expected


def test_batches_of_one_budget_come_in_falling_length() -> None:
    keys = ordered(list(range(1, 300)), None, RotaryLimits())
    lengths = [batch.padded_length for batch in cut_batches(key_lengths(keys).tolist(), limits(RotaryLimits()))]
    assert all(longer >= shorter for longer, shorter in pairwise(lengths))


def test_keys_keep_their_order_at_the_end_of_their_range() -> None:
    first = (1 << 40) - 100
    keys = make_keys(np.full(100, 7, np.int64), first)
    keys.sort()
    assert sorted(key_places(keys).tolist()) == list(range(first, first + 100))
    assert set(key_lengths(keys).tolist()) == {7}
