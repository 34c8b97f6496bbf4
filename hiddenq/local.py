"""The whole pipeline on one machine: `hiddenq run`.

Invariant: this process does none of the work and holds none of the truth. It starts a Redis, a producer, one GPU
worker a device and some uploaders, watches the ledger, and may be killed at any moment: what is committed is in the
store, what is not is found again by the next `run`.

    lock the location ─► produce (its own process) ─► workers and uploaders ─► watch ─► finish: index, manifest
                                                        restarted when they die         exit 0, or 1 with the reason
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import redis

from hiddenq import state
from hiddenq.contracts.errors import HiddenqError, RedisAway, RetryableError, UsageError, UserError
from hiddenq.delivery import (
    DeliverySettings,
    EmbeddedServer,
    LocationLock,
    Reaper,
    RunRecord,
    connect,
    fleet,
    run_state,
    stuck_reason,
)
from hiddenq.owner import OwnerMark
from hiddenq.produce import ProducerProcess
from hiddenq.progress import RunProgress, print_summary
from hiddenq.storage import ObjectStore, Spool, StoreSettings, open_store
from hiddenq.supervisor import ProcessSpec, Supervisor, hiddenq_command
from hiddenq.telemetry import logger
from uploader import finish_run

if TYPE_CHECKING:
    from producer import ProducerSettings

LOOK_SECONDS = 0.5
STUCK_SECONDS = 15.0
"""A run that nothing alive can finish is watched for so long before it is given up."""
GRACE_SECONDS = 120.0
"""What is on a GPU may take so long to end after SIGTERM."""


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


def run(settings: RunSettings) -> int:
    """Bring a location to completion; returns the exit status.

    Raises:
        UserError: something is not as it must be; nothing heavy was started, nothing is left behind.
        RetryableError: nothing alive could finish the run, with the reason.
    """
    store = open_store(settings.out, settings.store)
    folder = state.state_folder(store)
    is_new = not folder.exists()
    litter: list[Path] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, litter)
        client = _take(stack, store, folder, settings)
        stack.enter_context(Reaper(client, settings.delivery))
        pipeline = _Pipeline(settings, store, client, folder)
        try:
            return pipeline.run()
        except UserError:
            if is_new and not pipeline.is_prepared:
                litter.append(folder)  # no run came of it
            raise


def _take(stack: contextlib.ExitStack, store: ObjectStore, folder: Path, settings: RunSettings) -> redis.Redis:
    """Own the location, and have a Redis that children find in their environment; the stack gives both back.

    Raises:
        RunMismatch: another `run` owns the location.
    """
    url = settings.redis_url or os.environ.get(state.REDIS_VARIABLE)
    if url:
        os.environ[state.REDIS_VARIABLE] = url
        client = connect(url)
        stack.callback(client.close)
        stack.enter_context(_lock(client, store, settings, _joining(url)))
        stack.enter_context(OwnerMark(store))
        return client
    left_running = EmbeddedServer.find(folder / "redis")
    if left_running is None:
        stack.enter_context(OwnerMark(store))  # nobody on this host has the location; on another one somebody may
    server = left_running or EmbeddedServer.start(folder / "redis")
    if left_running is None:
        stack.callback(server.stop)
    os.environ[state.REDIS_VARIABLE] = server.url
    os.environ[state.PASSWORD_VARIABLE] = server.password
    client = server.connect()
    stack.callback(client.close)
    lock = _lock(client, store, settings, _joining(server.url, f"HIDDENQ_REDIS_PASSWORD_FILE={server.password_file} "))
    lock.__enter__()  # refused here, a server that was left running is the owner's, and goes on
    if left_running:
        stack.callback(server.stop)
        stack.enter_context(OwnerMark(store))
    stack.push(lock)
    return client


def _lock(client: redis.Redis, store: ObjectStore, settings: RunSettings, joining: str) -> LocationLock:
    return LocationLock(client, store.uri, settings=settings.delivery, command=joining)


def _joining(url: str, password: str = "") -> str:
    """How another process joins a run; never with a password in it."""
    parts = urlsplit(url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return f"HIDDENQ_REDIS_URL={shown} {password}hiddenq worker (and hiddenq upload)"


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


class _Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn the signals that end a run into `_Interrupted`, raised wherever this process is."""

    def interrupt(number: int, _frame: Any) -> None:
        raise _Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Pipeline:
    """One `run`, from an empty or half-done location to its end."""

    def __init__(self, settings: RunSettings, store: ObjectStore, client: redis.Redis, folder: Path) -> None:
        self._settings = settings
        self._store = store
        self._client = client
        self._spool = settings.spool or folder / "spool"
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.is_prepared = False
        """Whether the run exists: from then on nothing of it may be thrown away."""

    def run(self) -> int:
        with _interruptible():
            try:
                return self._run()
            except _Interrupted as interrupted:
                print("interrupted; the same command goes on from here", file=sys.stderr)
                return 128 + interrupted.number

    def _run(self) -> int:
        settings = self._settings
        seconds: dict[str, float] = {}
        began = time.monotonic()
        with ProducerProcess(settings.producer, settings.out, settings.store, settings.delivery) as producer:
            record = producer.wait_for_record()
            self.is_prepared = True
            if settings.target_head:
                from gpu_worker.target_head import write_target_head  # torch, which this process has no other use for

                write_target_head(self._store, record.config)
            seconds["prepare"] = time.monotonic() - began
            began = time.monotonic()
            with RunProgress(self._client, record) as progress:
                before = progress.committed
                reason = None if progress.is_ended else self._extract(record, producer, progress)
            seconds["extract and upload"] = time.monotonic() - began
        began = time.monotonic()
        manifest = finish_run(self._client, record, self._store)
        if settings.spool is None and self._spool.exists():
            self._tidy_spool(manifest.complete)
        seconds["finish"] = time.monotonic() - began
        print_summary(self._client, record, manifest, seconds, before)
        if reason:
            raise reason
        return 0 if manifest.complete else 1

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
        stuck_since: float | None = None
        committed = progress.committed
        try:
            supervisor.start()
            while True:
                time.sleep(LOOK_SECONDS)
                supervisor.poll()
                producer.poll()
                progress.refresh()
                if progress.is_ended:
                    return None
                moved, committed = progress.committed != committed, progress.committed
                if moved or producer.is_enqueuing or not (reason := self._stuck(record, supervisor)):
                    stuck_since = None
                    continue
                if supervisor.withdrawn and supervisor.only_misconfigured:
                    return UsageError(f"{record.run}: {reason}")
                stuck_since = stuck_since or time.monotonic()
                if time.monotonic() - stuck_since < STUCK_SECONDS:
                    continue
                if producer.num_starts < 3 and supervisor.any_left:
                    producer.start_again()  # plan against store, once more: nothing may be missing from the queue
                    stuck_since = None
                    continue
                return RetryableError(f"{record.run}: {reason}; the same command goes on from here")
        finally:
            try:
                supervisor.stop(GRACE_SECONDS)
            except _Interrupted:
                supervisor.stop(LOOK_SECONDS * 20)  # a second signal: they hand back and leave at once
                raise

    def _stuck(self, record: RunRecord, supervisor: Supervisor) -> str | None:
        """Why nothing alive could finish the run, or None while something can."""
        try:
            snapshot = fleet(self._client)
            if run_state(self._client, record.run) == "cancelled":
                return "it was cancelled"
        except (RedisAway, redis.RedisError) as error:
            logger().debug("redis_away", error=str(error))
            return None
        reason = stuck_reason(snapshot, record.run)
        if reason is None:
            queues = [queue for queue in snapshot.queues if queue.spool_id or queue.run == record.run]
            held = any(queue.num_waiting or queue.num_started or queue.num_delayed for queue in queues)
            return None if held else "no queue holds what is left of it"
        if not supervisor.withdrawn:
            return reason
        return "; ".join(f"{name} was given up: {why}" for name, why in supervisor.withdrawn.items())

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
