"""The byte budget of verify: bounded, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from hiddenq.reader.budget import ByteBudget


def test_threads_never_hold_more_than_the_limit_together() -> None:
    budget, lock = ByteBudget(100), threading.Lock()
    held = most = 0

    def work(num_bytes: int) -> None:
        nonlocal held, most
        with budget.taken(num_bytes):
            with lock:
                held += num_bytes
                most = max(most, held)
            with lock:
                held -= num_bytes

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [10, 60, 45, 100, 1, 99] * 50))
    assert most <= 100


def test_one_that_is_larger_than_the_limit_is_let_in_alone() -> None:
    budget, entered = ByteBudget(100), threading.Event()

    def large() -> None:
        with budget.taken(1000):
            entered.set()

    with budget.taken(50):
        thread = threading.Thread(target=large)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(10)
    assert entered.is_set()
