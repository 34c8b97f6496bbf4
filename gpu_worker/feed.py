"""The thread in front of the device: claims batches, reads and pads their tokens, reserves their bytes in the spool.

Invariant: a batch that leaves the feed has everything it needs, so the device waits for neither Redis, store nor disk
while work is queued; and nothing is claimed that has no place to go: not over the spool's mark, not while the worker is
sick or every run's store refuses it, not once it was told to stop.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.failures import FailureStreak
from gpu_worker.inputs import PaddedBatch
from gpu_worker.report import WorkerStatus
from gpu_worker.runs import Host, ServedRun
from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import SpoolAway, StoreAway, StoreRefused, UserError
from hiddenq.contracts.messages import BatchJob
from hiddenq.contracts.shard import ShardLayout
from hiddenq.delivery import Claim, Consumer
from hiddenq.delivery.refusals import Refusals
from hiddenq.storage import Spool, SpoolFile

DEPTH = 2
"""Batches that wait ready; more would be taken from other workers for nothing."""
IDLE_SECONDS = 0.2
PAUSED_SECONDS = 0.5
FULL_SECONDS = 10.0
"""A spool that had no room for a batch is tried again after so long, even if nothing has left it."""
REFRESH_SECONDS = 5.0
SWEEP_SECONDS = 30.0
SWEEP_MIN_AGE_SECONDS = 300.0


@dataclass(kw_only=True)
class Work:
    """A batch ready for the device."""

    claim: Claim[BatchJob]
    run: ServedRun
    batch: PaddedBatch
    layout: ShardLayout
    file: SpoolFile


class Feed:
    """A bounded queue of ready batches and the thread that fills it."""

    def __init__(
        self,
        consumer: Consumer[BatchJob],
        spool: Spool,
        runs: dict[str, ServedRun],
        host: Host,
        status: WorkerStatus,
        streak: FailureStreak,
        *,
        pinned: bool,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._consumer, self._spool, self._runs, self._host = consumer, spool, runs, host
        self._status, self._streak, self._pinned, self._refresh = status, streak, pinned, refresh
        self._ready: queue.Queue[Work] = queue.Queue(maxsize=DEPTH)
        self._refusals = Refusals()
        self._next_refresh = self._next_sweep = 0.0
        self._claims: list[Claim[BatchJob]] = []
        self.error: BaseException | None = None
        """Why the thread ended, if not because it was told to."""
        self.is_paused = False
        self._full_bytes, self._full_until = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    @property
    def refusal(self) -> str:
        """Why every run's store refuses this worker; "" if one does not."""
        return self._refusals.reason(tuple(self._runs))

    def start(self) -> None:
        """Begin to claim."""
        self._thread.start()

    def take(self, timeout_seconds: float) -> Work | None:
        """The next ready batch; None if none came in time."""
        try:
            return self._ready.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Wait for the thread (stopping is set) and hand back what never reached the device."""
        while self._thread.is_alive():
            self._hand_back_ready()
            self._thread.join(timeout=0.05)
        self._hand_back_ready()

    def _run(self) -> None:
        telemetry.bind(worker=self._consumer.name)
        try:
            while not self._consumer.stopping.is_set():
                self._keep_house()
                if self._streak.is_sick:
                    self._hand_back_ready()
                    self._consumer.stopping.wait(IDLE_SECONDS)
                elif self._over_the_mark():
                    self._consumer.stopping.wait(PAUSED_SECONDS)
                elif self._refusals.all_wait(self._runs) or not self._claim_some():
                    self._consumer.stopping.wait(IDLE_SECONDS)
        except BaseException as error:
            self.error = error
        finally:
            for claim in self._claims:
                self._consumer.hand_back(claim)
            self._claims = []

    def _claim_some(self) -> bool:
        """Claim as many batches as there is room for; False if there was nothing to do."""
        room = DEPTH - self._ready.qsize()
        if room <= 0:
            return False
        self._claims = self._consumer.claim(room)
        found = bool(self._claims)
        while self._claims:
            claim = self._claims[0]
            work = self._prepare(claim)
            self._claims.pop(0)
            if work is not None:
                self._put(work)
        return found

    def _put(self, work: Work) -> None:
        while not self._consumer.stopping.is_set():
            try:
                self._ready.put(work, timeout=IDLE_SECONDS)
            except queue.Full:
                continue
            return
        self._give_up(work)

    def _prepare(self, claim: Claim[BatchJob]) -> Work | None:
        """A claim made ready; None if it was handed back or failed.

        Raises:
            UserError: the user's to mend, for every batch alike; the claim is handed back.
        """
        run = self._runs[claim.message.run]
        if seconds := self._refusals.seconds_left(claim.message.run):
            self._consumer.hand_back(claim, delay_seconds=0.0 if self.refusal else seconds)
            return None
        try:
            with self._status.metrics.stage_seconds.labels("prepare").time():
                batch = run.prepare(claim.message, pinned=self._pinned)
                layout = run.layout(claim.message, claim.execution, batch, self._host)
                file_name = names.shard_file_name(claim.message.batch_id, claim.execution)
                file = self._spool.reserve(file_name, layout.num_bytes)
        except (StoreAway, StoreRefused, SpoolAway) as error:
            self._refusals.refused(claim.message.run, error)
            self._status.failed(error)
            telemetry.logger().warning("batch_waits", run=claim.message.run, error=str(error), next="tried again")
            seconds = 0.0 if self.refusal else self._refusals.seconds_left(claim.message.run)
            self._consumer.hand_back(claim, delay_seconds=seconds)  # meanwhile the other runs' batches
            return None
        except UserError:
            self._consumer.hand_back(claim)
            raise
        except Exception as error:
            self._status.failed(error)
            self._streak.failed(error)
            self._consumer.fail(claim, error, device=self._host.device)
            return None
        self._refusals.served(claim.message.run)
        if file is None:
            self.is_paused = True
            self._full_bytes, self._full_until = self._spool.usage().num_bytes, time.monotonic() + FULL_SECONDS
            self._consumer.hand_back(claim)
            return None
        return Work(claim=claim, run=run, batch=batch, layout=layout, file=file)

    def _over_the_mark(self) -> bool:
        """Whether the spool is so full that the worker waits: until it has fallen to the low mark, and by something.

        A spool of few shards may have no room for the next one below its low mark: that is tried again now and then.
        """
        usage = self._spool.usage()
        if usage.paused or self.is_paused:
            self.is_paused = usage.num_bytes > usage.low_bytes or (
                usage.num_bytes >= self._full_bytes and time.monotonic() < self._full_until
            )
        return self.is_paused

    def _keep_house(self) -> None:
        now = time.monotonic()
        if now >= self._next_refresh:
            self._refresh()
            self._next_refresh = now + REFRESH_SECONDS
        if now >= self._next_sweep:
            removed = self._spool.sweep(self._consumer.execution_is_dead, min_age_seconds=SWEEP_MIN_AGE_SECONDS)
            if removed:
                telemetry.logger().info("swept", files=removed)
            self._next_sweep = now + SWEEP_SECONDS

    def _hand_back_ready(self) -> None:
        while (work := self.take(0)) is not None:
            self._give_up(work)

    def _give_up(self, work: Work) -> None:
        work.file.discard()
        self._consumer.hand_back(work.claim)
