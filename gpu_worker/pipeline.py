"""The threads around the device, and what becomes of a batch in each.

Invariant: every claim that enters ends in exactly one of publish, fail, hand back or lost; every pinned buffer comes
back to the ring and every reserved file is published or discarded, whatever raised. At most `ON_DEVICE` batches are on
the device, so a batch that kills it drags down few others; the rest of the work overlaps with them.

    feed ──► this thread: launch ──► collector: wait for the device ──► publisher: finite? write, rename, publish
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from gpu_worker.engine import DeviceTime, Engine, Launched, Ring, Slot, is_dead
from gpu_worker.failures import DeviceLost, FailureStreak
from gpu_worker.feed import Feed, Work
from gpu_worker.report import WorkerStatus
from gpu_worker.selfcheck import report_check
from gpu_worker.writing import ShardWriter, publish_shard, refuse_nonfinite
from hiddenq import telemetry
from hiddenq.contracts.errors import LeaseLost, NonFiniteStates, SpoolAway
from hiddenq.contracts.manifest import SelfCheck
from hiddenq.contracts.messages import BatchJob
from hiddenq.delivery import Consumer
from hiddenq.storage import Spool

ON_DEVICE = 2
LOOK_SECONDS = 0.1


class Pipeline:
    """Takes ready batches from a feed until the consumer is told to stop."""

    def __init__(
        self,
        consumer: Consumer[BatchJob],
        spool: Spool,
        feed: Feed,
        engine: Engine,
        ring: Ring,
        status: WorkerStatus,
        streak: FailureStreak,
        *,
        record_check: Callable[[str, SelfCheck], None],
        num_writers: int,
        fsync: bool,
    ) -> None:
        self.device_time = DeviceTime()
        self._consumer, self._spool, self._feed, self._engine, self._ring = consumer, spool, feed, engine, ring
        self._status, self._streak, self._record_check, self._fsync = status, streak, record_check, fsync
        self._launched: queue.SimpleQueue[tuple[Work, Launched] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[Work, Launched] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(ON_DEVICE)
        self._fatal: BaseException | None = None
        self._collector = threading.Thread(target=self._collect, name="collector", daemon=True)
        self._publisher = threading.Thread(target=self._publish, name="publisher", daemon=True)
        self._writer = ShardWriter(num_writers)

    def run(self) -> None:
        """Work until told to stop; what is on the device then is finished, what is not is handed back.

        Raises:
            DeviceLost: the device is gone.
            UserError: what the user has to mend, met in any thread.
        """
        for thread in (self._collector, self._publisher):
            thread.start()
        self._feed.start()
        idle_since: float | None = None
        try:
            while not self._consumer.stopping.is_set():
                self._raise_fatal()
                work = self._feed.take(LOOK_SECONDS)
                if work is not None:
                    idle_since = None
                    self._launch(work)
                elif self._status.num_on_device == 0:
                    idle_since = self._idle(idle_since)
            self._status.become("draining", "finishing what is on the device")
        finally:
            self._consumer.stopping.set()
            self._close()
        self._raise_fatal()

    def fail(self, error: BaseException) -> None:
        """End the pipeline with an error from outside (the GPU's sampler, say)."""
        self._fatal = self._fatal or error

    def _raise_fatal(self) -> None:
        error = self._fatal or self._feed.error
        if error is not None:
            raise error

    def _close(self) -> None:
        self._feed.close()
        self._launched.put(None)
        self._collector.join()
        self._finished.put(None)
        self._publisher.join()
        self._writer.close()

    def _idle(self, since: float | None) -> float:
        now = time.monotonic()
        if since is not None:
            self._status.metrics.claim_wait_seconds.inc(now - since)
        self._status.queue_ran_empty()
        if self._streak.is_sick:
            self._status.become("sick", str(self._streak))
        elif self._feed.is_paused:
            self._status.become("paused", "the spool is over its high mark")
        elif refusal := self._feed.refusal:
            self._status.become("waiting", refusal)
        else:
            self._status.become("idle")
        return now

    # The device

    def _launch(self, work: Work) -> None:
        slot = None if self._streak.is_sick else self._wait_for_room()
        if slot is None:
            work.file.discard()
            self._consumer.hand_back(work.claim)
            return
        self._status.become("busy")
        batch_id = work.claim.message.batch_id
        try:
            self._consumer.enter(work.claim, "gpu")
            self._status.launched(batch_id, 0)
            check = work.run.needs_check(work.batch.padded_length)
            launched = self._engine.launch(work.run.extractor, work.batch, slot, check=check)
        except Exception as error:
            self._room.release()
            self._end_badly(work, slot, error)
            if is_dead(self._engine.device):
                self.fail(DeviceLost(f"batch {batch_id}: {error}"))
            return
        self._status.launched(batch_id, launched.num_splits)
        self._launched.put((work, launched))

    def _wait_for_room(self) -> Slot | None:
        """A pinned buffer, once the device can take another batch; None if the worker is to stop first."""
        slot: Slot | None = None
        while not self._consumer.stopping.is_set() and self._fatal is None:
            slot = slot or self._ring.take(LOOK_SECONDS)
            if slot is not None and self._room.acquire(timeout=LOOK_SECONDS):
                return slot
        if slot is not None:
            self._ring.give(slot)
        return None

    def _collect(self) -> None:
        telemetry.bind(worker=self._consumer.name)
        while (item := self._launched.get()) is not None:
            try:
                self._collect_one(*item)
            except Exception as error:  # not of a batch: those are dealt with inside
                self.fail(error)

    def _collect_one(self, work: Work, launched: Launched) -> None:
        try:
            launched.wait()
            seconds = self.device_time.add(launched)
        except Exception as error:  # what the device raised long after the launch
            self._room.release()
            self.fail(DeviceLost(f"batch {work.claim.message.batch_id}: {error}"))
            self._end_badly(work, launched.slot, error)
            return
        self._room.release()
        self._status.busy(seconds)
        if launched.ended is not None:
            self._status.metrics.memory_peak.set(torch.cuda.max_memory_reserved(self._engine.device))
        self._status.metrics.stage_seconds.labels("gpu").observe(seconds)
        self._status.left_device(work.claim.message.batch_id)
        self._finished.put((work, launched))

    # The spool

    def _publish(self) -> None:
        telemetry.bind(worker=self._consumer.name)
        while (item := self._finished.get()) is not None:
            try:
                self._publish_one(*item)
            except Exception as error:  # not of a batch: those are dealt with inside
                self.fail(error)

    def _publish_one(self, work: Work, launched: Launched) -> None:
        slot: Slot | None = launched.slot
        try:
            self._refuse_nonfinite(work, launched)
            self._consumer.enter(work.claim, "write")
            with self._status.metrics.stage_seconds.labels("write").time():
                written = self._writer.write(work.file, work.layout, launched.payload)
            self._ring.give(launched.slot)
            slot = None
            with self._status.metrics.stage_seconds.labels("publish").time():
                publish_shard(
                    self._consumer.publish,
                    work.claim,
                    self._spool,
                    work.file,
                    work.layout,
                    written,
                    worker=self._consumer.name,
                    fsync=self._fsync,
                )
        except Exception as error:
            self._end_badly(work, slot, error)
            return
        self._streak.succeeded()
        self._status.published(
            num_samples=work.batch.num_rows,
            num_tokens=work.batch.num_tokens,
            num_padded_tokens=work.batch.num_padded_tokens,
            num_bytes=written.num_bytes,
        )
        self._report_check(work, launched)

    def _refuse_nonfinite(self, work: Work, launched: Launched) -> None:
        try:
            refuse_nonfinite(work.claim.message, work.batch, work.run.extractor.columns, launched.nonfinite_CB)
        except NonFiniteStates:
            self._status.metrics.nonfinite.inc()
            raise

    def _report_check(self, work: Work, launched: Launched) -> None:
        if launched.check is None:
            return
        config, columns = work.run.config, [column.name for column in work.run.extractor.columns]
        found = launched.check.found(columns, work.claim.message.batch_id, self._consumer.name)
        report_check(found, launched.check.typical(), config, self._record_check)

    def _end_badly(self, work: Work, slot: Slot | None, error: Exception) -> None:
        """A batch failed: its buffer, its file and its claim go back."""
        if slot is not None:
            self._ring.give(slot)
        work.file.discard()
        self._status.left_device(work.claim.message.batch_id)
        if isinstance(error, LeaseLost):
            self._status.lease_lost()
            telemetry.logger().warning("lease_lost", batch=work.claim.message.batch_id, error=str(error))
            return
        self._status.failed(error)
        if isinstance(error, SpoolAway):  # the feed will wait with the next one
            self._consumer.hand_back(work.claim)
            return
        self._streak.failed(error)
        self._consumer.fail(work.claim, error, device=self._status.report().gpu_uuid or str(self._engine.device))
