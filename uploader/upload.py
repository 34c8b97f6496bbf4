"""One shard on its way from the spool to the store.

Invariant: the local file is deleted only after the ledger names a shard of its batch, and the ledger names a shard only
after the store was shown to hold exactly the bytes that the worker recorded. Every step may be done twice.

    ledger has the batch ──► job finished ──► file deleted (a twin)
    put and confirm ──► commit (ledger entry + job finished, one fenced step) ──► file deleted
    file damaged ──► quarantine ──► made again        file gone ──► in the store after all? commit : made again
    store away ──► wait, file and claim kept          store refuses ──► handed back, its run waits (waiting.py)
    too large for the store, or failed too often ──► dead letter, file in quarantine
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import (
    DamagedShard,
    HiddenqError,
    LeaseLost,
    MissingShard,
    ObjectTooLarge,
    RedisAway,
    SpoolGone,
    StoreAway,
    UnknownSchema,
    UserError,
)
from hiddenq.contracts.messages import LedgerEntry, ShardReady
from hiddenq.contracts.shard import header_num_bytes, parse_header
from hiddenq.delivery import Claim, Consumer
from hiddenq.storage import ObjectStore, RandomGrowingWait, Spool
from hiddenq.storage.local import LocalStore
from uploader.mirror import mirror_of
from uploader.runs import OpenRun, Runs
from uploader.settings import UploaderSettings
from uploader.status import UploaderStatus
from uploader.waiting import WaitingRuns

T = TypeVar("T")
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
"""Between two tries of a store that is away, with jitter."""
PATIENCE_SECONDS = 60.0
"""A shard whose store is away keeps its place for so long while other runs are live, too."""


class ShardUpload:
    """Ends claims on shards, one at a time or from several threads."""

    def __init__(
        self,
        consumer: Consumer[ShardReady],
        spool: Spool,
        runs: Runs,
        waiting: WaitingRuns,
        status: UploaderStatus,
        settings: UploaderSettings,
        *,
        after_commit: Callable[[OpenRun], None],
    ) -> None:
        self._consumer = consumer
        self._spool = spool
        self._runs = runs
        self._waiting_runs = waiting
        self._status = status
        self._settings = settings
        self._after_commit = after_commit

    def handle(self, claim: Claim[ShardReady]) -> None:
        """See one claim to its end.

        Raises:
            UserError: the store refuses, or the location is another run's, and there is nothing else to do here; or a
                newer hiddenq is at work; or the spool is gone. The claim was handed back.
        """
        shard = claim.message
        if seconds := self._waiting_runs.seconds_left(shard.batch.run):
            self._consumer.hand_back(claim, delay_seconds=seconds)
            return
        log = telemetry.logger().bind(run=shard.batch.run, batch=shard.batch.batch_id, execution=shard.execution)
        with self._status.under_way(shard):
            try:
                self._deliver(claim, log)
                self._waiting_runs.served(shard.batch.run)
            except LeaseLost as error:
                self._status.lease_lost()
                log.warning("lease_lost", error=str(error), next="another uploader has it")
            except RedisAway as error:
                log.warning("given_up", error=str(error), next="the lease runs out")
            except StoreAway as error:
                stopping = self._consumer.stopping.is_set()
                seconds = 0.0 if stopping else self._waiting_runs.refused(shard.batch.run, error)
                self._consumer.hand_back(claim, delay_seconds=seconds)
                log.info("handed_back", error=str(error))
            except UserError as error:
                self._status.failed(error)
                if isinstance(error, (UnknownSchema, SpoolGone)) or self._waiting_runs.is_all_there_is(shard.batch.run):
                    self._consumer.hand_back(claim)
                    raise
                if isinstance(error, ObjectTooLarge):
                    self._give_up(claim, error, log)
                    return
                seconds = self._waiting_runs.refused(shard.batch.run, error)
                self._consumer.hand_back(claim, delay_seconds=seconds)
                log.error("run_refused", error=str(error), next=f"other runs go on; tried again in {seconds:.0f} s")
            except Exception as error:
                self._status.failed(error)
                self._give_up(claim, error, log)

    def _give_up(self, claim: Claim[ShardReady], error: Exception, log: Any) -> None:
        """This attempt failed by the shard's own fault; the last one sets the file aside."""
        log.warning("upload_failed", exc_info=not isinstance(error, HiddenqError), error=str(error))
        if self._consumer.fail(claim, error) == "dead":
            self._spool.quarantine(claim.message.file_name, f"upload given up: {error}")
            self._status.ended("quarantined")

    def _deliver(self, claim: Claim[ShardReady], log: Any) -> None:
        shard = claim.message
        run, committed = self._waiting(claim, lambda: self._look(shard))
        if committed:
            self._consumer.finish(claim)
            if committed.execution != shard.execution:
                self._status.ended("twin")
                log.info("twin_deleted", committed=committed.execution)
            self._spool.delete(shard.file_name)
            return
        key = names.shard_key(shard.batch.batch_id, shard.execution)
        try:
            self._consumer.enter(claim, "put")
            with self._status.stage("put"):
                self._waiting(claim, lambda: self._put(run, key, shard))
        except DamagedShard as error:
            self._spool.quarantine(shard.file_name, str(error))
            self._status.ended("quarantined")
            log.error("shard_damaged", error=str(error), next=self._consumer.remake(claim, str(error)))
            return
        except MissingShard as error:
            if not self._waiting(claim, lambda: _is_stored(run, key, shard)):
                self._status.ended("missing")
                log.error("shard_missing", error=str(error), next=self._consumer.remake(claim, str(error)))
                return
        with self._status.stage("commit"):
            is_ours = self._consumer.commit(claim, ledger_entry(key, shard))
        with self._status.stage("delete"):
            if is_ours:
                self._status.committed(shard)
            else:
                self._status.ended("twin")
                run.store.delete(key)
                if mirror := self._mirror(run):
                    mirror.delete(key)
            self._spool.delete(shard.file_name)
        log.info("committed" if is_ours else "twin_deleted", key=key, num_bytes=shard.num_bytes)
        self._after_commit(run)

    def _look(self, shard: ShardReady) -> tuple[OpenRun, LedgerEntry | None]:
        run = self._runs.get(shard.batch.run)
        return run, run.ledger.get(shard.batch.batch_id)

    def _put(self, run: OpenRun, key: str, shard: ShardReady) -> None:
        with self._spool.open_shard(shard.file_name) as file:
            check_header(file, shard)
        path = self._spool.path(shard.file_name)
        stores: list[ObjectStore] = [run.store]
        if mirror := self._mirror(run):
            stores.append(mirror)
        for store in stores:
            store.put_file(key, path, checksum=shard.checksum, num_bytes=shard.num_bytes)

    def _mirror(self, run: OpenRun) -> LocalStore | None:
        return mirror_of(run.record.run, self._settings)

    def _waiting(self, claim: Claim[ShardReady], work: Callable[[], T]) -> T:
        """Do `work`, again and again while store or Redis is away; file and claim are kept.

        Raises:
            StoreAway, RedisAway: the process is stopping.
            LeaseLost: the claim was lost meanwhile.
        """
        shard = claim.message

        def before_sleep(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, StoreAway):
                self._status.store_away(shard, error)
            telemetry.logger().warning("away", batch=shard.batch.batch_id, error=str(error), next="the file is kept")
            if self._consumer.lost(claim):
                raise LeaseLost(f"{claim.job_id}: execution {claim.execution} lost its lease while waiting")

        retrying = Retrying(
            retry=retry_if_exception_type((StoreAway, RedisAway)),
            wait=RandomGrowingWait(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
            sleep=self._sleep,
            stop=lambda state: self._consumer.stopping.is_set() or self._is_in_the_way(shard.batch.run, state),
            before_sleep=before_sleep,
            reraise=True,
        )
        result = retrying(work)
        self._status.store_back(shard)
        return result

    def _is_in_the_way(self, run: str, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        waited = state.seconds_since_start or 0.0
        return isinstance(error, StoreAway) and waited > PATIENCE_SECONDS and not self._waiting_runs.is_alone(run)

    def _sleep(self, seconds: float) -> None:
        with self._consumer.pause_deadlines():
            self._consumer.stopping.wait(seconds)


def check_header(file: BinaryIO, shard: ShardReady) -> None:
    """Raise `DamagedShard` unless the file's size and header are those of the shard; its bytes are checked later."""
    size = os.fstat(file.fileno()).st_size
    if size != shard.num_bytes:
        raise DamagedShard(f"{shard.file_name}: expected {shard.num_bytes} bytes, found {size}")
    prefix = file.read(8)
    num_bytes = header_num_bytes(prefix, name=shard.file_name)
    if num_bytes != shard.data_offset:
        raise DamagedShard(f"{shard.file_name}: expected a header of {shard.data_offset} bytes, found {num_bytes}")
    parse_header(prefix + file.read(num_bytes - 8), name=shard.file_name, num_bytes=size)


def _is_stored(run: OpenRun, key: str, shard: ShardReady) -> bool:
    """Whether the store holds the shard although its file is gone: its uploader died after the put."""
    info = run.store.stat(key)
    return bool(info and info.num_bytes == shard.num_bytes and run.store.checksum(key) == shard.checksum)


def ledger_entry(key: str, shard: ShardReady) -> LedgerEntry:
    """What the ledger says of a shard that lies in the store under `key`."""
    return LedgerEntry(
        batch_id=shard.batch.batch_id,
        execution=shard.execution,
        key=key,
        num_bytes=shard.num_bytes,
        data_offset=shard.data_offset,
        checksum=shard.checksum,
        num_samples=shard.batch.num_samples,
        num_tokens=shard.batch.num_tokens,
    )
