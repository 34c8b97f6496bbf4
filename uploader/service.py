"""One uploader process: claims shards of its spool's queue and sees each to its end.

Invariant: the process holds no more claims than it works on, and ends in one of three ways: asked to (what is under
way is finished, what waits for a store is handed back), refused by the store of the only run there is before any of it
worked (handed back, exit status 2), or killed (the leases run out).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import redis
from prometheus_client import CollectorRegistry

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import HiddenqError, RedisAway, RetryableError
from hiddenq.contracts.messages import ShardReady
from hiddenq.delivery import (
    Consumer,
    DeliverySettings,
    connect,
    dead_batches,
    list_runs,
    run_state,
    worker_name,
)
from hiddenq.storage import Spool, SpoolPresence
from uploader.finish import finish_run
from uploader.leftovers import remove_unfinished
from uploader.mirror import mirror_of, mirror_run
from uploader.reconcile import Reconciler
from uploader.runs import OpenRun, Runs
from uploader.settings import UploaderSettings
from uploader.status import UploaderStatus
from uploader.upload import ShardUpload
from uploader.waiting import WaitingRuns

IDLE_SECONDS = 0.2
"""Between two looks at an empty queue."""
OVERSEE_SECONDS = 5.0
"""Between two looks for runs that are over, and at the spool."""


def serve(settings: UploaderSettings) -> int:
    """Upload until asked to stop; returns the exit status.

    Raises:
        UserError: the spool, Redis or a store can't be used as it is.
    """
    spool = Spool.open(settings.spool, high_bytes=settings.spool_high_bytes, low_bytes=settings.spool_low_bytes)
    client = connect(settings.redis_url)
    os.nice(settings.nice)
    name = worker_name("uploader")
    telemetry.bind(stage="uploader", worker=name, spool=spool.spool_id)
    registry = CollectorRegistry()
    status = UploaderStatus(registry, spool, index=settings.index, name=name)
    port = telemetry.serve_metrics(registry, port=settings.metrics_port, address=settings.metrics_bind)
    if port:
        status.metrics_address = telemetry.advertised_address(settings.metrics_bind, port)
    consumer = Consumer(
        client,
        names.upload_queue(spool.spool_id),
        ShardReady,
        name=name,
        settings=_delivery(client),
        report=status.report,
        presence=SpoolPresence(spool.folder, spool.spool_id),
    )
    with contextlib.closing(client), consumer:
        if threading.current_thread() is threading.main_thread():
            consumer.install_signals()
        telemetry.logger().info("uploader_started", metrics=status.metrics_address, index=settings.index)
        Uploader(client, consumer, spool, status, settings).work()
    return 128 + consumer.stop_signal if consumer.stop_signal else 0


def _delivery(client: redis.Redis) -> DeliverySettings:
    """The durations that the newest run of this Redis uses, so that all of its processes agree."""
    records = list_runs(client)
    return max(records, key=lambda record: record.config.created_at).delivery if records else DeliverySettings()


class Uploader:
    """The loop of one process."""

    def __init__(
        self,
        client: redis.Redis,
        consumer: Consumer[ShardReady],
        spool: Spool,
        status: UploaderStatus,
        settings: UploaderSettings,
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._status = status
        self._settings = settings
        self._runs = Runs(client, spool, settings, status)
        self._waiting_runs = WaitingRuns(self._runs, status)
        self._upload = ShardUpload(
            consumer,
            spool,
            self._runs,
            self._waiting_runs,
            status,
            settings,
            after_commit=self._finish_if_complete,
        )
        self._reconciler = Reconciler(
            client, spool, self._runs, _delivery(client), consumer.stopping, consumer.execution_is_dead
        )
        self._finished: dict[str, tuple[int, int]] = {}
        """By run: committed and dead batches when it was last finished."""
        self._finishing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._oversight: Future[None] | None = None
        self._next_oversee = self._next_reconcile = self._next_let_go = time.monotonic()
        self._epoch = consumer.redis_epoch

    def work(self) -> None:
        """Until asked to stop.

        Raises:
            UserError: the only run's store refuses from the start; everything was handed back.
        """
        under_way: set[Future[None]] = set()
        num_concurrent = self._settings.num_concurrent
        with (
            ThreadPoolExecutor(num_concurrent, thread_name_prefix="upload") as pool,
            ThreadPoolExecutor(1, thread_name_prefix="oversight") as aside,
        ):
            try:
                while not self._consumer.stopping.is_set():
                    claims = self._consumer.claim(num_concurrent - len(under_way))
                    under_way |= {pool.submit(self._upload.handle, claim) for claim in claims}
                    if not claims:
                        self._consumer.stopping.wait(IDLE_SECONDS)
                    under_way = self._collect(under_way)
                    due = time.monotonic() >= self._next_oversee or self._consumer.redis_epoch != self._epoch
                    if due and (not self._oversight or self._oversight.done()):
                        self._next_oversee = time.monotonic() + OVERSEE_SECONDS
                        self._oversight = aside.submit(self._oversee)
            finally:
                self._status.draining()
                self._consumer.stopping.set()
                wait(under_way)
        for future in under_way:
            future.result()

    def _collect(self, under_way: set[Future[None]]) -> set[Future[None]]:
        """Wait for a free place; returns what is still under way."""
        full = len(under_way) == self._settings.num_concurrent
        done, left = wait(under_way, timeout=IDLE_SECONDS if full else 0, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        return left

    def _oversee(self) -> None:
        self._status.observe_spool()
        try:
            self._waiting_runs.forget_ended()
            if self._consumer.redis_epoch != self._epoch:  # Redis lost its data: nobody knows what lies in the spool
                self._epoch, self._next_reconcile = self._consumer.redis_epoch, 0.0
            if self._settings.index == 0 and time.monotonic() >= self._next_reconcile:
                self._next_reconcile = time.monotonic() + self._settings.reconcile_seconds
                self._reconciler.once()
            if time.monotonic() >= self._next_let_go:
                self._next_let_go = time.monotonic() + self._settings.reconcile_seconds
                self._runs.let_go()
            for run in self._runs.opened().values():
                self._finish_if_over(run)
        except RetryableError as error:
            telemetry.logger().warning("oversight_postponed", error=str(error))
        except Exception:
            telemetry.logger().exception("oversight_failed")

    def _finish_if_complete(self, run: OpenRun) -> None:
        """Finish a run whose last batch has just been committed; what is not done now, the next look does."""
        with contextlib.suppress(RedisAway):
            if run.ledger.totals().num_batches >= run.config.num_batches:
                self._finish_if_over(run)

    def _finish_if_over(self, run: OpenRun) -> None:
        """Finish a run whose batches are all committed or dead letters, once for each such state."""
        name = run.record.run
        if not self._finishing[name].acquire(blocking=False):  # another thread is at it
            return
        try:
            committed = run.ledger.totals().num_batches
            dead = len(dead_batches(self._client, name)) if committed < run.config.num_batches else 0
            if committed + dead < run.config.num_batches:
                return
            is_live = run_state(self._client, name) == "live"
            is_open_again = is_live and dead == 0  # whole, and not finished: perhaps it lost a shard since
            if self._finished.get(name) == (committed, dead) and not is_open_again:
                return
            if is_live:
                finish_run(self._client, run.record, run.store)
            mirror = mirror_of(name, self._settings)
            if mirror and self._settings.index == 0:
                mirror_run(run.store, mirror)
                remove_unfinished(self._client, name, mirror)
            self._finished[name] = (committed, dead)
        except HiddenqError as error:
            telemetry.logger().warning("not_finished", run=name, error=str(error), next="tried again")
        finally:
            self._finishing[name].release()
