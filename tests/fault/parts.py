"""The processes of a chaos run: a light but real GPU worker, and the real uploader.

Invariant: everything that touches Redis, the spool and the store is the product's own code; only the forward pass is a
wait. Each process begins in a forked copy of a server that has imported everything, so a kill costs no import.

With `without_leases` a promise is deliberately broken in all of them, to show that chaos notices.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import LeaseLost
from hiddenq.contracts.messages import BatchJob
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import Claim, Consumer, DeliverySettings, connect, scripts, worker_name
from hiddenq.storage import Spool
from tests.uploader.small_run import SmallRun, small_run
from uploader import UploaderSettings, serve

SETTINGS = DeliverySettings(
    lease_seconds=3.0, renew_seconds=0.5, reap_seconds=0.5, retry_delays=(0.3, 0.6, 1.0), spool_dead_seconds=9.0
)
RAISES, KILLS = "000007", "000011"
"""Batches that are poison: one raises, one kills its process."""

LEASE = "redis.call('ZADD', 'hiddenq:leases', precise(now + a.lease_seconds), member)"
"""What keeps, in the script that claims, the promise that a dead process's batches come back."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.fault.parts"])


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What every process of a chaos run is told."""

    redis_url: str
    redis_password: str
    num_batches: int
    forward_seconds: float
    log_folder: Path
    environment: Mapping[str, str]
    without_leases: bool = False

    def run(self) -> SmallRun:
        """The run, made anew from its size alone."""
        made = small_run(name="chaos", num_batches=self.num_batches, num_samples=3, hidden_size=16)
        made.settings = SETTINGS
        return made


def start(kind: str, surroundings: Surroundings, spool: Path, host: str) -> ForkServerProcess:
    """Start a `worker` or an `uploader`."""
    process = _context.Process(target=_main, args=(kind, surroundings, spool, host), daemon=True)
    process.start()
    return process


def _main(kind: str, surroundings: Surroundings, spool: Path, host: str) -> None:
    os.environ.update(surroundings.environment)
    os.environ["HIDDENQ_HOST"] = host
    log = surroundings.log_folder / f"{kind}-{host}-{os.getpid()}.log"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    telemetry.configure_logging(host=host)
    if surroundings.without_leases:
        _break_leases()
    if kind == "worker":
        work(surroundings, spool)
    else:
        os.environ["HIDDENQ_REDIS_PASSWORD"] = surroundings.redis_password
        serve(
            UploaderSettings(
                spool=spool, redis_url=surroundings.redis_url, metrics_port=0, nice=0, reconcile_seconds=2.0
            )
        )


def _break_leases() -> None:
    """Claims have no lease from now on: nobody gives back what a dead process held."""
    whole = scripts.source
    assert LEASE in whole("claim"), "the promise is kept somewhere else now"
    scripts.source = lambda name: whole(name).replace(LEASE, "")  # type: ignore[assignment]


def work(surroundings: Surroundings, spool_folder: Path) -> None:
    """A GPU worker whose forward pass is a wait."""
    spool, run = Spool.open(spool_folder), surroundings.run()
    client = connect(surroundings.redis_url, password=surroundings.redis_password, wait_seconds=60)
    name = worker_name("gpu")
    report = WorkerReport(
        role="gpu_worker", name=name, target=f"{spool.spool_id}/{os.getpid()}", host=telemetry.host_name(),
        pid=os.getpid(), spool_id=spool.spool_id, run=run.name,
    )  # fmt: skip
    queue = names.extract_queue(run.name)
    with Consumer(client, queue, BatchJob, name=name, settings=SETTINGS, report=lambda: report) as consumer:
        consumer.install_signals()
        while not consumer.stopping.is_set():
            claims = consumer.claim(2)
            for claim in claims:
                execute(consumer, claim, spool, run, surroundings.forward_seconds)
            if not claims:
                consumer.stopping.wait(0.1)


def execute(
    consumer: Consumer[BatchJob], claim: Claim[BatchJob], spool: Spool, run: SmallRun, forward_seconds: float
) -> None:
    """One batch from its claim to its end."""
    batch = claim.message
    try:
        consumer.enter(claim, "gpu")
        time.sleep(forward_seconds * random.uniform(0.5, 1.5))
        if batch.batch_id == RAISES:
            raise RuntimeError("this batch always raises")
        if batch.batch_id == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        consumer.enter(claim, "write")
        consumer.publish(claim, run.put_into_spool(spool, batch, claim.execution))
    except LeaseLost:
        spool.delete(names.shard_file_name(batch.batch_id, claim.execution))
    except Exception as error:
        consumer.fail(claim, error, device="none")
