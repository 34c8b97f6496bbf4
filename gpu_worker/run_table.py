"""The runs that a worker takes batches of: the one it was started for and, with `--any-run`, all that need its model.

Invariant: no run costs another one anything. A run whose store is away is looked at again later, one that is refused is
left alone, each said once. A run that has ended is let go, with its hooks on the layers, when no batch of it can be on
the device any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import redis

from gpu_worker.extraction import Extractor
from gpu_worker.runs import ServedRun, open_location, same_model, serve_run
from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import RedisAway, RetryableError, UserError
from hiddenq.contracts.shard import ShardFormat
from hiddenq.delivery import EndedRuns, RunRecord


class RunTable:
    """Runs by name; `refresh` brings it in line with the live runs."""

    def __init__(
        self,
        client: redis.Redis,
        first: RunRecord,
        served: ServedRun,
        extractor: Extractor,
        listen: Callable[[Sequence[str]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runs = {first.run: served}
        self._client, self._first, self._extractor, self._listen = client, first, extractor, listen
        self._ended = EndedRuns(clock)
        self._waiting: set[str] = set()
        self._refused: set[str] = set()

    def refresh(self) -> None:
        """Take up runs that have come, let go of those that ended; nothing while Redis is away."""
        try:
            live = {record.run: record for record in same_model(self._client, self._first)}
            known = self.runs.keys() | self._refused
            came = [self._take_up(record) for run, record in live.items() if run not in known]
        except RedisAway:
            return
        gone = [self._let_go(run) for run in self._ended.due(self.runs, live.keys())]
        if any(came) or any(gone):
            self._listen([names.extract_queue(run) for run in self.runs])

    def _take_up(self, record: RunRecord) -> bool:
        try:
            store = open_location(record)
            extractor = self._extractor.for_format(ShardFormat.of_run(record.config))
            self.runs[record.run] = serve_run(self._client, record, store, extractor)
        except RedisAway:
            raise
        except RetryableError as error:
            if record.run not in self._waiting:
                telemetry.logger().warning("run_waits", run=record.run, error=str(error), next="looked at again")
            self._waiting.add(record.run)
            return False
        except UserError as error:
            self._refused.add(record.run)
            telemetry.logger().error("run_refused", run=record.run, error=str(error), next="left to other workers")
            return False
        self._waiting.discard(record.run)
        return True

    def _let_go(self, run: str) -> bool:
        if len(self.runs) == 1:
            return False
        self.runs.pop(run).extractor.close()
        return True
