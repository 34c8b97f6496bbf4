"""The processes of a chaos run: a light but real GPU worker, and the real uploader.

Invariant: everything that touches Redis, the spool and the store is the product's own code; only the forward pass is a
wait. Each process begins in a forked copy of a server that has imported everything, so a kill costs no import.

A promise may be broken on purpose in all of them, to show that chaos notices.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import LeaseLost
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import Claim, Consumer, DeliverySettings, connect, worker_name
from hiddenq.storage import Spool
from tests.fault.sabotage import SABOTAGE
from tests.uploader.small_run import SmallRun, small_run
from uploader import UploaderSettings, serve
from uploader.runs import OpenRun
from uploader.upload import ShardUpload

SETTINGS = DeliverySettings(
    lease_seconds=3.0, renew_seconds=0.5, reap_seconds=0.5, retry_delays=(0.3, 0.6, 1.0), spool_dead_seconds=9.0
)
RAISES, KILLS, KILLS_UPLOADERS = "000007", "000011", "000005"
"""Batches that are poison: one raises, one kills its GPU worker, one's shard kills its uploader."""

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
    poison: Set[str]
    """Batches that are poison."""
    sabotage: str = ""
    """Name of the promise that is broken on purpose (sabotage.py)."""

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
    if surroundings.sabotage:
        SABOTAGE[surroundings.sabotage]()
    if kind == "worker":
        work(surroundings, spool)
    else:
        os.environ["HIDDENQ_REDIS_PASSWORD"] = surroundings.redis_password
        _let_a_shard_kill(surroundings.poison & {KILLS_UPLOADERS})
        serve(
            UploaderSettings(
                spool=spool, redis_url=surroundings.redis_url, metrics_port=0, nice=0, reconcile_seconds=2.0
            )
        )


def _let_a_shard_kill(batch_ids: Set[str]) -> None:
    """The shards of these batches kill whoever uploads them."""
    put = ShardUpload._put

    def poisoned(self: ShardUpload, run: OpenRun, key: str, shard: ShardReady) -> None:
        if shard.batch.batch_id in batch_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, run, key, shard)

    ShardUpload._put = poisoned  # type: ignore[method-assign]


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
                execute(consumer, claim, spool, run, surroundings)
            if not claims:
                consumer.stopping.wait(0.1)


def execute(
    consumer: Consumer[BatchJob], claim: Claim[BatchJob], spool: Spool, run: SmallRun, surroundings: Surroundings
) -> None:
    """One batch from its claim to its end."""
    batch = claim.message
    try:
        consumer.enter(claim, "gpu")
        time.sleep(surroundings.forward_seconds * random.uniform(0.5, 1.5))
        poison = surroundings.poison & {batch.batch_id}
        if RAISES in poison:
            raise RuntimeError("this batch always raises")
        if KILLS in poison:
            os.kill(os.getpid(), signal.SIGKILL)
        consumer.enter(claim, "write")
        consumer.publish(claim, run.put_into_spool(spool, batch, claim.execution))
    except LeaseLost:
        spool.delete(names.shard_file_name(batch.batch_id, claim.execution))
    except Exception as error:
        consumer.fail(claim, error, device="none")
