"""Which of the runs that a process holds ended long enough ago to let go of them.

Invariant: a run is due only if it was not live at every look for `KEEP_ENDED_SECONDS`: longer than its last batch is on
a device, its last upload under way, or its finish undone. One that goes on again starts anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set

KEEP_ENDED_SECONDS = 600.0


class EndedRuns:
    """Looks at runs by name, and remembers since when each was seen to have ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def due(self, held: Iterable[str], live: Set[str]) -> list[str]:
        """Those of the runs held that may be let go."""
        now = self._clock()
        self._since = {run: self._since.get(run, now) for run in held if run not in live}
        return [run for run, since in self._since.items() if now - since >= KEEP_ENDED_SECONDS]
