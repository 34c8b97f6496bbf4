"""How long to wait before a store is asked again: at random, up to twice as long each time.

Invariant: Python's own random generator is not touched. A training process seeds it, and what that process draws must
not depend on whether its store was away for a moment.
"""

from __future__ import annotations

import random

from tenacity import RetryCallState, wait_exponential

_random = random.SystemRandom()
"""It has no state, so processes forked from one another don't wait in step."""


class RandomGrowingWait(wait_exponential):
    """Between nothing and `multiplier` seconds, then twice, four times, … that, at most `max`."""

    def __call__(self, retry_state: RetryCallState) -> float:
        return _random.uniform(self.min, super().__call__(retry_state))
