"""One `run` on one location, from its preparation to its manifest.

Invariant: it goes on for as long as anything alive can bring it further, and ends when nothing can, saying why. What is
missing from the queue (a Redis that lost its data, a job that someone deleted) is found by comparing plan, queue and
store once more; that is done again by the same producer that did it first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from hiddenq import state
from hiddenq.contracts import names
from hiddenq.contracts.errors import HiddenqError, StoreAway, TransientError
from hiddenq.contracts.manifest import Manifest
from hiddenq.delivery import OUTAGE_SECONDS, DeliverySettings, RunRecord, through_outage
from hiddenq.interruption import Interrupted
from hiddenq.monitor import Embedded
from hiddenq.produce import ProducerProcess
from hiddenq.progress import RunProgress, print_summary
from hiddenq.storage import ObjectStore, Spool, StoreSettings
from hiddenq.supervisor import ProcessSpec, Supervisor, hiddenq_command
from hiddenq.telemetry import logger
from hiddenq.watch import Watch
from uploader import finish_run

if TYPE_CHECKING:
    from producer import ProducerSettings

LOOK_SECONDS = 0.5
MAX_COMPARISONS = 2
"""So often plan, queue and store are compared again before a run that does not move is given up."""
GRACE_SECONDS = 120.0
"""What is on a GPU may take so long to end after SIGTERM."""
STOPPING = f"stopping: each worker ends its batch, {GRACE_SECONDS:g} s at most; Ctrl-C again hands batches back at once"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of `hiddenq run`."""

    producer: ProducerSettings
    out: str
    """The output location."""
    store: StoreSettings
    devices: tuple[str, ...]
    """One GPU worker each."""
    num_uploaders: int
    spool: Path | None
    """None for a folder of the location's own state."""
    redis_url: str | None
    """None for an embedded server."""
    worker_arguments: tuple[str, ...] = ()
    """Passed on to each GPU worker."""
    host_arguments: tuple[str, ...] = ()
    """Passed on to GPU workers and uploaders alike."""
    target_head: bool = False
    """Whether to write the target's embedding, final norm and lm_head, too."""
    delivery: DeliverySettings = field(default_factory=DeliverySettings)


class Pipeline:
    """One `run`, from an empty or half-done location to its end."""

    def __init__(
        self,
        settings: RunSettings,
        store: ObjectStore,
        client: redis.Redis,
        folder: Path,
        check_owner: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._client = client
        self._check_owner = check_owner
        self._spool = settings.spool or folder / "spool"
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        own = state.is_own_redis(store, settings.redis_url)
        self._embedded = Embedded(is_running=True, logs=str(self._logs)) if own else None
        self.is_prepared = False
        """Whether the run exists: from then on nothing of it may be thrown away."""

    def run(self) -> int:
        """Bring the location to completion; returns the exit status.

        Raises:
            UserError: something is not as it must be.
            RetryableError: nothing alive could finish the run, with the reason.
        """
        try:
            return self._run()
        except (HiddenqError, OSError):
            self._check_folder()  # gone, it is the reason of whatever else was seen
            raise

    def _run(self) -> int:
        settings = self._settings
        seconds: dict[str, float] = {}
        began = time.monotonic()
        with ProducerProcess(settings.producer, settings.out, settings.store, settings.delivery) as producer:
            record = producer.wait_for_record()
            self.is_prepared = True
            self._store.anchor(names.RUN_JSON)
            self._store = self._store.patient(OUTAGE_SECONDS)
            if settings.target_head:
                from gpu_worker.target_head import write_target_head  # torch, which this process has no other use for

                write_target_head(self._store, record.config)
            seconds["prepare"] = time.monotonic() - began
            began = time.monotonic()
            with through_outage(lambda: RunProgress(self._client, record, self._embedded)) as progress:
                before = progress.committed
                reason = None if progress.is_ended else self._extract(record, producer, progress)
            seconds["extract and upload"] = time.monotonic() - began
        if isinstance(reason, StoreAway):  # nor could its end be written
            raise reason
        began = time.monotonic()
        manifest = through_outage(lambda: self._finish(record))
        seconds["finish"] = time.monotonic() - began
        through_outage(lambda: print_summary(self._client, record, manifest, seconds, before))
        if reason:
            raise reason
        return 0 if manifest.complete else 1

    def _finish(self, record: RunRecord) -> Manifest:
        self._check_owner()
        manifest = finish_run(self._client, record, self._store)
        if self._settings.spool is None and self._spool.exists():
            self._tidy_spool(manifest.complete)
        return manifest

    def _tidy_spool(self, complete: bool) -> None:
        """Clear this run's own spool: every process that ever wrote into it has ended."""
        spool = Spool.open(self._spool)
        spool.sweep(lambda execution: True)
        if complete:
            for entry in spool.files():  # published by a process that died before it could say so
                spool.delete(entry.file_name)

    def _extract(self, record: RunRecord, producer: ProducerProcess, progress: RunProgress) -> HiddenqError | None:
        """Run workers and uploaders to the end; returns why the run can't end, or None if it did."""
        supervisor = Supervisor([*self._workers(record), *self._uploaders()])
        watch = Watch(self._client, record, supervisor)
        num_comparisons = 0
        try:
            supervisor.start()
            while True:
                time.sleep(LOOK_SECONDS)
                self._check_owner()
                self._check_folder()
                supervisor.poll()
                producer.poll()
                progress.refresh()
                if progress.is_ended:
                    return None
                if not producer.is_enqueuing and watch.is_unknown():
                    logger().warning("redis_lost_the_run", run=record.run, next="rebuilding it from the store")
                    producer.start_again(settle_seconds=2 * record.delivery.renew_seconds)
                elif reason := watch.reason(progress.committed, enqueuing=producer.is_enqueuing):
                    hopeless = watch.is_final or producer.is_enqueuing or not supervisor.any_left
                    if hopeless or num_comparisons == MAX_COMPARISONS:
                        return reason
                    num_comparisons += 1
                    producer.start_again()  # plan against store, once more: nothing may be missing from the queue
        except Interrupted as interrupted:
            if interrupted.number == signal.SIGINT:  # somebody watches
                progress.say(STOPPING)
            raise
        finally:
            try:
                supervisor.stop(GRACE_SECONDS)
            except Interrupted:
                supervisor.stop(LOOK_SECONDS * 20)  # a second signal: they hand back and leave at once
                raise

    def _check_folder(self) -> None:
        """Raise `TransientError` unless this run's own folder is there: no process could be started without it."""
        folder = self._logs.parent
        gone = next((path for path in (folder.parent, folder, self._logs) if not path.is_dir()), None)
        if gone:
            raise TransientError(
                f"{gone} is not there any more (unmounted, moved or removed?); put it back, and the same command goes "
                "on from here"
            )

    def _workers(self, record: RunRecord) -> list[ProcessSpec]:
        return [
            self._spec(
                f"worker-{device.replace(':', '-')}",
                *("worker-process", "--device", device, "--run", record.run),
                *self._settings.worker_arguments,
            )
            for device in self._settings.devices
        ]

    def _uploaders(self) -> list[ProcessSpec]:
        return [
            self._spec(f"uploader-{index}", "upload-process", "--index", str(index))
            for index in range(self._settings.num_uploaders)
        ]

    def _spec(self, name: str, *arguments: str) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            command=hiddenq_command(*arguments, "--spool", str(self._spool), *self._settings.host_arguments),
            environment={"HIDDENQ_ANY_RUN": "0"},  # these serve this run, whatever the shell says
            log_file=self._logs / f"{name}.log",
        )
