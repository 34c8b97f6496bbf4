"""From a dataset to a queue full of batches: the producer's work with the queue behind it.

Invariant: safe to repeat at any moment. The plan is made once and then reused; the ledger is brought in line with the
store before anything is enqueued, because the store alone says what is there; and `enqueue` adds only what is neither
committed nor held by a live job.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import redis

from hiddenq.contracts import names
from hiddenq.contracts.errors import HiddenqError
from hiddenq.delivery import (
    OUTAGE_SECONDS,
    DeliverySettings,
    EnqueueReport,
    Ledger,
    RunRecord,
    connect,
    enqueue,
    retry_dead,
    save_run,
    through_outage,
)
from hiddenq.interruption import SIGNALS, uninterrupted
from hiddenq.model_identity import block_torch
from hiddenq.progress import TerminalProgress
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from hiddenq.storage.runfiles import iterate_batches
from hiddenq.supervisor import die_with_parent
from hiddenq.telemetry import configure_logging, logger
from producer import prepare
from uploader import rebuild_ledger

if TYPE_CHECKING:
    from producer import ProducerSettings
    from producer.job import Progress


def produce(
    settings: ProducerSettings,
    store: ObjectStore,
    store_settings: StoreSettings,
    client: redis.Redis,
    *,
    delivery: DeliverySettings,
    progress: Progress,
    prepared: Callable[[RunRecord], None] = lambda record: None,
    retry_failed: bool = True,
    settle_seconds: float = 0.0,
    stop: threading.Event | None = None,
) -> EnqueueReport:
    """Prepare the run if it is not there yet, then enqueue what is not done; `prepared` hears of the run in between.

    Store and Redis were probed: from here on one that is away is waited for.

    `retry_failed` gives dead letters all their attempts again. `settle_seconds`: how long to wait before the first
    batch, so that uploaders of a Redis that lost its data first register what waits in their spools.

    Raises:
        UserError: model, dataset, location or settings are not as they must be.
        StoreAway, RedisAway: for longer than `OUTAGE_SECONDS`.
    """
    store = store.patient(OUTAGE_SECONDS)
    plan = prepare(settings, store, progress)
    store.anchor(names.RUN_JSON)
    record = RunRecord(
        config=plan.config,
        location=store.uri,
        store=store_settings.model_dump(mode="json"),
        delivery=delivery,
    )
    through_outage(lambda: save_run(client, record))
    through_outage(lambda: reconcile_ledger(client, store, record, progress))
    if retry_failed and (num_retried := through_outage(lambda: retry_dead(client, record.run))):
        logger().warning("dead_letters_retried", run=record.run, num_batches=num_retried)
    prepared(record)
    (stop or threading.Event()).wait(settle_seconds)
    jobs = (batch.job(record.run) for batch in iterate_batches(store))
    return enqueue(client, record, jobs, stop=stop)


def reconcile_ledger(client: redis.Redis, store: ObjectStore, record: RunRecord, progress: Progress) -> None:
    """Make the ledger say what the store holds: adopt shards it does not know, forget those that are gone.

    The totals are counted anew, so that nothing that was changed by hand is believed.

    A store that proves no checksums has every shard read for it, which takes as long as that takes: `progress` hears.
    """
    ledger = Ledger(client, record.run)
    # Entries before objects: a shard is in the store before the ledger names it, so none looks lost that is not.
    entries = ledger.entries()
    ledger.recount()
    objects = {info.key: info.num_bytes for info in store.list(names.STATES_PREFIX)}
    lost = [entry for entry in entries.values() if objects.get(entry.key) != entry.num_bytes]
    if lost:
        ledger.forget(lost)
        logger().warning("shards_gone_from_store", run=record.run, num_batches=len(lost), next="they are made again")
    known = {entry.key for entry in entries.values()}
    if objects.keys() - known:
        look_at = functools.partial(progress, "confirming shards")
        adopted = ledger.adopt(rebuild_ledger(store, record.config, progress=look_at))
        if adopted:
            logger().info("ledger_rebuilt", run=record.run, num_batches=adopted)


class ProducerProcess:
    """`produce` in a process of its own, so its memory is gone when it is done; what it says comes over a pipe.

    `start_again` runs it once more: it is idempotent, so that is also the last comparison of plan, queue and store.
    """

    MAX_STARTS = 5

    def __init__(
        self, settings: ProducerSettings, out: str, store_settings: StoreSettings, delivery: DeliverySettings
    ) -> None:
        self._arguments = (settings, out, store_settings, delivery)
        self._context = multiprocessing.get_context("spawn")
        self.num_starts = 0
        self._is_prepared = False
        self.is_enqueuing = False
        self.report: EnqueueReport | None = None
        self.start_again()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def start_again(self, *, settle_seconds: float = 0.0) -> None:
        """Start the process (once more); `settle_seconds` as for `produce`."""
        self._pipe, theirs = self._context.Pipe(duplex=False)
        # A batch that died in this very run is not tried again by it.
        arguments = (theirs, os.getpid(), self.num_starts == 0, self._is_prepared, settle_seconds, *self._arguments)
        self._process = self._context.Process(target=_produce_in_child, args=arguments, name="producer")
        resource_tracker.ensure_running()  # multiprocessing's own, which would lift the block
        with uninterrupted():  # Ctrl-C is the parent's to handle, from the child's first moment on
            self._process.start()
        theirs.close()
        self.num_starts += 1
        self.is_enqueuing = True

    def wait_for_record(self) -> RunRecord:
        """Wait until the run is prepared.

        Raises:
            HiddenqError: whatever stopped the producer.
        """
        said = self._receive()
        if not isinstance(said, RunRecord):
            raise HiddenqError("producer: ended before the run was prepared")
        self._is_prepared = True
        return said

    def poll(self) -> None:
        """Hear what it has to say; start it again if it died.

        Raises:
            HiddenqError: whatever stopped the producer.
        """
        if not self.is_enqueuing or not self._pipe.poll():
            return
        said = self._receive()
        if isinstance(said, EnqueueReport):
            self.report = said
            self.is_enqueuing = False
            self._process.join()
        elif said is None:
            if self.num_starts >= self.MAX_STARTS:
                raise HiddenqError(
                    f"producer: died {self.num_starts} times, last with exit status {self._process.exitcode}"
                )
            self.start_again()

    def _receive(self) -> RunRecord | EnqueueReport | None:
        """What it says next; None if it died. An error it ended with is raised here."""
        try:
            said = self._pipe.recv()
        except EOFError:
            self._process.join()
            return None
        if isinstance(said, BaseException):
            raise said
        return cast(RunRecord | EnqueueReport, said)


def _produce_in_child(
    pipe: Connection,
    parent: int,
    is_first_start: bool,
    is_prepared: bool,
    settle_seconds: float,
    settings: ProducerSettings,
    out: str,
    store_settings: StoreSettings,
    delivery: DeliverySettings,
) -> None:
    die_with_parent(parent)
    block_torch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    configure_logging(default_level="WARNING", stage="producer")
    try:
        # A Redis that this run knew before, and that is away now, is waited for.
        wait_seconds = None if is_first_start else OUTAGE_SECONDS
        with contextlib.closing(connect(wait_seconds=wait_seconds)) as client, TerminalProgress() as progress:
            store = open_store(out, store_settings)
            if is_first_start:
                store.probe()
            if is_prepared:  # planned anew below the mount point, it would be another run
                store.patient(OUTAGE_SECONDS).anchor(names.RUN_JSON)
            report = produce(
                settings,
                store,
                store_settings,
                client,
                delivery=delivery,
                progress=progress,
                prepared=pipe.send,
                retry_failed=is_first_start,
                settle_seconds=settle_seconds,
            )
        pipe.send(report)
    except HiddenqError as error:
        pipe.send(error)
    except Exception as error:
        traceback.print_exc()
        pipe.send(HiddenqError(f"producer: a fault of ours: {error!r}; the lines above say where"))
