"""Spool, queue, ledger and store compared, at a start and every few minutes.

Invariant: nothing is removed that a living process may still need. A finished file is touched only if no upload job
names it, it is older than three leases, and its execution has been dead for as long (or Redis, which lost its data,
knows nothing of it: then it is adopted at once, before its batch is made again); a half-done upload only if its
shard's upload job is not live. What no one needs is adopted (its upload job made anew) if its batch is open, and
removed if it is not; each with a log line.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import redis

from hiddenq import telemetry
from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, MissingShard, StoreAway, UsageError, UserError
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.contracts.messages import ShardReady
from hiddenq.contracts.shard import header_num_bytes, parse_header
from hiddenq.delivery import (
    DeliverySettings,
    dead_batches,
    execution_is_known,
    list_runs,
    restore_uploads,
    run_state,
    spool_file_names,
    upload_is_live,
)
from hiddenq.storage import Spool, SpoolEntry
from hiddenq.storage.runfiles import load_batches
from uploader.runs import OpenRun, Runs

UNKNOWN_RUN_SECONDS = 3600.0
"""A shard of a run that Redis does not know waits so long for the run to come back."""


class Orphan(NamedTuple):
    """A finished file that no upload job names."""

    entry: SpoolEntry
    run: str
    batch_id: str
    execution: str
    data_offset: int


class Reconciler:
    """Looks after one spool and the runs whose shards pass through it."""

    def __init__(
        self,
        client: redis.Redis,
        spool: Spool,
        runs: Runs,
        settings: DeliverySettings,
        stopping: threading.Event,
        is_dead: Callable[[str], bool],
    ) -> None:
        self._client = client
        self._spool = spool
        self._runs = runs
        self._patience_seconds = 3 * settings.lease_seconds
        self._stopping = stopping
        self._is_dead = is_dead
        self._log = telemetry.logger().bind(spool=spool.spool_id)

    def once(self) -> None:
        """Compare and mend, until it is done or `stopping`.

        Raises:
            RedisAway: not everything was looked at; the next time will do.
        """
        for run in self._known_runs():
            with self._left_alone(run.record.run):
                self._set_aside_dead_uploads(run)
                self._sweep_store(run)
        for orphan in self._orphans():
            if self._stopping.is_set():
                return
            with self._left_alone(orphan.run):
                self._settle(orphan)
        for name in self._spool.sweep(self._is_dead, min_age_seconds=self._patience_seconds):
            self._log.info("temporary_removed", file=name)

    def _known_runs(self) -> Iterator[OpenRun]:
        """Live runs, and those that this process has worked for."""
        opened = self._runs.opened()
        for record in list_runs(self._client):
            if record.run in opened:
                yield opened[record.run]
            elif run_state(self._client, record.run) == "live":
                with self._left_alone(record.run):
                    self._runs.get(record.run)
                if (run := self._runs.opened().get(record.run)) is not None:
                    yield run

    @contextlib.contextmanager
    def _left_alone(self, run: str) -> Iterator[None]:
        """What a run's store refuses, or is away for, waits for the next time; other runs are looked after now."""
        try:
            yield
        except (StoreAway, UserError) as error:
            self._log.warning("run_left_alone", run=run, error=str(error), next="looked at again next time")

    def _set_aside_dead_uploads(self, run: OpenRun) -> None:
        """A shard whose upload was given up lies outside the marks, or the spool would stay full for ever."""
        dead = dead_batches(self._client, run.record.run, queue=names.upload_queue(self._spool.spool_id))
        if not dead:
            return
        for entry in self._spool.files():
            batch_id, _ = _parse(entry.file_name)
            with contextlib.suppress(MissingShard, DamagedShard):
                if batch_id in dead and self._header(entry).run == run.record.run:
                    self._spool.quarantine(entry.file_name, "upload given up")
                    self._log.warning("dead_upload_set_aside", file=entry.file_name)

    def _sweep_store(self, run: OpenRun) -> None:
        def is_abandoned(file_name: str) -> bool:
            batch_id, execution = _parse(file_name)
            return not upload_is_live(self._client, run.record.run, batch_id, execution) and self._is_dead(execution)

        if num_removed := run.store.abort_unfinished(is_abandoned):
            self._log.info("unfinished_uploads_removed", run=run.record.run, num=num_removed)

    def _orphans(self) -> Iterator[Orphan]:
        needed = spool_file_names(self._client, self._spool.spool_id)
        for entry in self._spool.files():
            execution = _parse(entry.file_name)[1]
            if entry.file_name in needed:
                continue
            # An execution that Redis never heard of can publish nothing any more: Redis lost its data.
            if execution_is_known(self._client, execution) and not self._is_left_behind(entry, execution):
                continue
            try:
                yield self._header(entry)
            except MissingShard:
                continue
            except DamagedShard as error:
                self._spool.quarantine(entry.file_name, str(error))
                self._log.warning("orphan_damaged", file=entry.file_name, error=str(error))

    def _is_left_behind(self, entry: SpoolEntry, execution: str) -> bool:
        return time.time() - entry.modified >= self._patience_seconds and self._is_dead(execution)

    def _header(self, entry: SpoolEntry) -> Orphan:
        with self._spool.open_shard(entry.file_name) as file:
            prefix = file.read(8)
            size = header_num_bytes(prefix, name=entry.file_name)
            header = prefix + file.read(size - 8)
        _, metadata = parse_header(header, name=entry.file_name, num_bytes=entry.num_bytes)
        return Orphan(entry, str(metadata.get("run", "")), *_parse(entry.file_name), size)

    def _settle(self, orphan: Orphan) -> None:
        log = self._log.bind(run=orphan.run, batch=orphan.batch_id, file=orphan.entry.file_name)
        try:
            run = self._runs.get(orphan.run)
        except UsageError:
            if time.time() - orphan.entry.modified > UNKNOWN_RUN_SECONDS:
                self._spool.quarantine(orphan.entry.file_name, f"Redis knows no run {orphan.run!r}")
                log.warning("orphan_set_aside", reason="Redis knows no such run")
            return
        reason = "its batch is committed"
        if run.ledger.get(orphan.batch_id) is None:
            reason = self._adopt(run, orphan)
        if not reason:
            log.info("orphan_adopted")
        elif self._is_left_behind(orphan.entry, orphan.execution) and orphan.entry.file_name not in spool_file_names(
            self._client, self._spool.spool_id
        ):
            self._spool.delete(orphan.entry.file_name)
            log.info("orphan_removed", reason=reason)

    def _adopt(self, run: OpenRun, orphan: Orphan) -> str:
        """Queue an orphan's upload; returns why not, or "" if it was."""
        if orphan.entry.modified < boot_time():
            return "written before this host was started: what a power cut tore can't be told from what is whole"
        plans: dict[str, BatchPlan] = {plan.batch_id: plan for plan in load_batches(run.store)}
        if orphan.batch_id not in plans:
            return "its run has no such batch"
        try:
            checksum = crc.of_file(self._spool.path(orphan.entry.file_name))
        except FileNotFoundError:
            return "it is gone already"
        shard = ShardReady(
            batch=plans[orphan.batch_id].job(run.record.run),
            spool_id=self._spool.spool_id,
            file_name=orphan.entry.file_name,
            num_bytes=orphan.entry.num_bytes,
            data_offset=orphan.data_offset,
            checksum=checksum,
            execution=orphan.execution,
            worker="reconciler",
        )
        return "" if restore_uploads(self._client, run.record, [shard]) else "its batch is on its way otherwise"


def boot_time() -> float:
    """Unix time at which this host was started."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _parse(file_name: str) -> tuple[str, str]:
    parsed = names.parse_shard_name(file_name)
    if parsed is None:
        raise DamagedShard(f"{file_name}: not a shard's name")
    return parsed
