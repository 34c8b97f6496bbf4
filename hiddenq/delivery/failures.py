"""What a failed execution means for its batch: decided by the error's class alone.

RedisAway, StoreAway, SpoolAway, UserError
                                     nobody's fault here: uncharged, back after the first delay
PermanentError (NonFiniteStates, …)  another attempt can't help: a dead letter at once; ObjectTooLarge as well, which is
                                     the store's word on this one shard
anything else                        charged: tried again with growing delays, then a dead letter
"""

from __future__ import annotations

import traceback

from hiddenq.contracts.errors import ObjectTooLarge, PermanentError, RedisAway, SpoolAway, StoreAway, UserError
from hiddenq.delivery.settings import DeliverySettings
from hiddenq.delivery.transitions import Failure

MAX_TRACEBACK_CHARACTERS = 16_000
MAX_ERROR_CHARACTERS = 500


def failure_of(error: BaseException, settings: DeliverySettings, *, device: str = "") -> Failure:
    """How an execution that raised `error` ends."""
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]
    away = isinstance(error, RedisAway | StoreAway | SpoolAway | UserError) and not isinstance(error, ObjectTooLarge)
    return Failure(
        error=one_line(error),
        traceback=text,
        charged=not away,
        dead=not away and isinstance(error, PermanentError),
        delay_seconds=settings.retry_delays[0],
        device=device,
    )


def one_line(error: BaseException) -> str:
    """Class and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARACTERS]
