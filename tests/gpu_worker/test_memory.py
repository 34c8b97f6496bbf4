"""Out of memory: split, go on, remember; every row run exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker import engine
from gpu_worker.engine import Engine, Ring
from gpu_worker.extraction import Extractor
from gpu_worker.inputs import pad_rows
from gpu_worker.memory import OutOfMemory, RowLimits, run_in_parts
from hiddenq.contracts.errors import TransientError
from tests.gpu_worker.conftest import extract, shard_format, tiny_decoder, token_rows
from tests.support.models import VOCAB_SIZE


class Memory:
    """A device that holds so many padded tokens."""

    def __init__(self, tokens: int, padded_length: int) -> None:
        self.tokens, self.padded_length = tokens, padded_length
        self.done: list[int] = []
        self.refusals = 0

    def run(self, first: int, last: int) -> None:
        """Run some rows."""
        if (last - first) * self.padded_length > self.tokens:
            self.refusals += 1
            raise OutOfMemory("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        self.done += range(first, last)


@given(st.integers(1, 200), st.integers(1, 64), st.integers(64, 2000))
def test_every_row_runs_once_and_in_order(num_rows: int, padded_length: int, tokens: int) -> None:
    memory = Memory(tokens, padded_length)
    splits = run_in_parts(
        memory.run, num_rows=num_rows, padded_length=padded_length, limits=RowLimits(), release=lambda: None
    )
    assert memory.done == list(range(num_rows))
    assert splits == memory.refusals


def test_the_limit_is_remembered_for_the_length_and_for_longer_ones() -> None:
    limits = RowLimits()
    memory = Memory(100, 10)
    run_in_parts(memory.run, num_rows=16, padded_length=10, limits=limits, release=lambda: None)
    assert memory.refusals == 1
    run_in_parts(memory.run, num_rows=16, padded_length=10, limits=limits, release=lambda: None)
    assert memory.refusals == 1
    assert limits.most_rows(20) == 4
    assert limits.most_rows(9) is None


def test_memory_is_released_after_each_refusal_and_not_before_it_is_over() -> None:
    released: list[bool] = []
    memory = Memory(10, 10)
    run_in_parts(memory.run, num_rows=4, padded_length=10, limits=RowLimits(), release=lambda: released.append(True))
    assert len(released) == memory.refusals


def test_one_row_that_does_not_fit_is_an_error_in_one_line() -> None:
    memory = Memory(9, 10)
    with pytest.raises(TransientError, match=r"one row of 10 tokens: CUDA out of memory. .*2.00 GiB.; lower --max-len"):
        run_in_parts(memory.run, num_rows=3, padded_length=10, limits=RowLimits(), release=lambda: None)


def test_a_batch_that_is_split_gives_the_same_bytes() -> None:
    decoder = tiny_decoder("qwen3")
    extractor = Extractor(decoder, shard_format([0, 2]))
    rows = token_rows([12, 9, 30, 4, 22])
    expected = extract(extractor, rows).payload
    handle = decoder.layers[1].register_forward_pre_hook(_refuse_more_than(2))
    batch = pad_rows(rows, extractor.shard_format, padded_length=30, vocab_size=VOCAB_SIZE)
    slot = Ring(2, batch.num_bytes, pinned=False).take(1)
    assert slot is not None
    launched = Engine(torch.device("cpu")).launch(extractor, batch, slot)
    handle.remove()
    assert launched.num_splits == 2
    assert torch.equal(launched.payload, expected)


def test_a_self_check_that_memory_has_no_room_for_costs_its_batch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OutOfMemory("CUDA out of memory.")

    monkeypatch.setattr(engine, "compare_alone", refuse)
    extractor = Extractor(tiny_decoder("qwen3"), shard_format([0, 2]))
    rows = token_rows([12, 9])
    batch = pad_rows(rows, extractor.shard_format, padded_length=12, vocab_size=VOCAB_SIZE)
    slot = Ring(2, batch.num_bytes, pinned=False).take(1)
    assert slot is not None
    launched = Engine(torch.device("cpu")).launch(extractor, batch, slot, check=True)
    assert launched.check is None
    assert torch.equal(launched.payload, extract(extractor, rows).payload)


def _refuse_more_than(rows: int) -> Callable[[object, tuple[torch.Tensor, ...]], None]:
    def refuse(_module: object, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].shape[0] > rows:
            raise OutOfMemory("CUDA out of memory.")

    return refuse
