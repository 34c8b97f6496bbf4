"""Waiting for a store that does not answer, and not waiting when nobody wants the answer any more.

Invariant: only `StoreAway` is waited for, which concerns the store as a whole and may pass; whatever else is wrong is
raised at once. So training, exports and verifications of hours outlive an outage of minutes, and yet end at once when
they are interrupted in it. (A store's own `patient` can't be interrupted, and knows no outage of a disk; an uploader
waits by run, in `uploader.waiting`, so that one run's store holds up no other's.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
)

from hiddenq.contracts.errors import StoreAway
from hiddenq.storage import RandomGrowingWait

WAIT_SECONDS = 600.0
MAX_PAUSE_SECONDS = 10.0
"""Between two looks at a store that is away."""

_this_thread = threading.local()


def patiently(wait_seconds: float = WAIT_SECONDS) -> Retrying:
    """Calls a function again while it raises `StoreAway`, for so long: `patiently()(store.get_bytes, key)`."""
    leaving: threading.Event = getattr(_this_thread, "leaving", None) or threading.Event()
    return Retrying(
        retry=retry_if_exception_type(StoreAway),
        stop=stop_after_delay(wait_seconds) | stop_when_event_set(leaving),
        wait=RandomGrowingWait(multiplier=0.2, max=MAX_PAUSE_SECONDS),
        sleep=sleep_using_event(leaving),
        before_sleep=_say_waiting,
        reraise=True,
    )


@contextlib.contextmanager
def patient_threads(number: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads that no longer wait once the block is left; work that they have not begun is dropped then."""
    leaving = threading.Event()
    pool = ThreadPoolExecutor(number, thread_name_prefix=name, initializer=_note, initargs=(leaving,))
    try:
        yield pool
    finally:
        leaving.set()
        pool.shutdown(cancel_futures=True)


def _note(leaving: threading.Event) -> None:
    _this_thread.leaving = leaving


def _say_waiting(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    logging.getLogger(__name__).warning("waiting for the store: %s", error)
