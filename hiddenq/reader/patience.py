"""Waiting for a store that does not answer.

Invariant: only `StoreAway` is waited for, which concerns the store as a whole and may pass; whatever else is wrong is
raised at once. So training, exports and verifications of hours outlive an outage of minutes.
"""

from __future__ import annotations

import logging

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from hiddenq.contracts.errors import StoreAway

WAIT_SECONDS = 600.0
MAX_PAUSE_SECONDS = 10.0
"""Between two looks at a store that is away."""


def patiently(wait_seconds: float = WAIT_SECONDS) -> Retrying:
    """Calls a function again while it raises `StoreAway`, for so long: `patiently()(store.get_bytes, key)`."""
    return Retrying(
        retry=retry_if_exception_type(StoreAway),
        stop=stop_after_delay(wait_seconds),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_PAUSE_SECONDS),
        before_sleep=_say_waiting,
        reraise=True,
    )


def _say_waiting(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    logging.getLogger(__name__).warning("waiting for the store: %s", error)
