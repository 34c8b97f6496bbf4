"""Memory that is used again is nobody else's any more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hiddenq.reader import buffers
from hiddenq.reader.buffers import MIN_BYTES, BufferPool


def test_memory_comes_back_only_when_nothing_refers_to_it() -> None:
    pool = BufferPool()
    buffer = pool.take(MIN_BYTES)
    buffer.fill_(7)
    place, part = buffer.data_ptr(), buffer[10:20].view(torch.int16)
    array = part.numpy()
    del buffer, part
    other = pool.take(MIN_BYTES)
    assert other.data_ptr() != place, "an array over a part of it is still there"
    other.fill_(9)
    assert set(array.view("u1").tolist()) == {7}
    del array
    assert pool.take(MIN_BYTES).data_ptr() == place


@pytest.mark.parametrize(("asked", "is_same"), [(MIN_BYTES, True), (2 * MIN_BYTES, True), (4 * MIN_BYTES, False)])
def test_a_buffer_is_used_for_one_that_is_not_much_smaller(asked: int, is_same: bool) -> None:
    pool = BufferPool()
    place = pool.take(2 * MIN_BYTES).data_ptr()
    buffer = pool.take(asked)
    assert len(buffer) == asked
    assert (buffer.data_ptr() == place) is is_same


def test_what_lies_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAX_IDLE_BYTES", 3 * MIN_BYTES)
    pool = BufferPool()
    held = [pool.take(MIN_BYTES) for _ in range(8)]
    held.clear()
    assert sum(map(len, pool._idle)) == 3 * MIN_BYTES


def test_threads_never_share_a_buffer() -> None:
    pool, barrier = BufferPool(), threading.Barrier(4)

    def work(number: int) -> bool:
        barrier.wait(10)
        intact = True
        for _ in range(50):
            buffer = pool.take(MIN_BYTES)
            buffer.fill_(number)
            intact &= bool((buffer == number).all())
        return intact

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
