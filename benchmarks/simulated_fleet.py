"""A fleet of invented GPU workers against a real Redis, in real time.

What is invented: the forward pass (a wait), the shard (a message) and death (a worker falls silent, and comes back
later under another name). What is real: every call to Redis, its clock, leases, renewals, reports and reaping.

A worker holds one batch on its GPU and up to two claimed ahead, as the real one does. Idle is time in which its
GPU had finished a batch, others were still to be had, and the next one had not begun. Lost is forward time whose result
never counted. The tail is the time from the first worker without work to the last batch.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hiddenq.contracts import names
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.contracts.reports import WorkerReport
from hiddenq.delivery import DeliverySettings, EmbeddedServer, Reaper
from hiddenq.delivery.transitions import Claim, Transitions, claim_of, new_executions

CLAIMED_AHEAD = 2
SPOOLS = [f"00000000-0000-4000-8000-{number:012d}" for number in range(128)]
EMPTY_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """What the fleet is like."""

    num_workers: int = 1024
    num_threads: int = 16
    """Each plays a share of the workers on a connection of its own; workers of one thread wait for each other."""
    forward_seconds: float = 1.05
    """Mean; each batch's is drawn between half and twice of it."""
    straggler_share: float = 0.02
    straggler_factor: float = 2.5
    death_share: float = 0.05
    """Share of workers that die once, at a random moment of the first 40 s."""
    rebirth_seconds: float = 20.0
    """From a death to its successor's first claim (a restart and a model load)."""
    seed: int = 1


@dataclass
class Worker:
    """One worker and what it holds."""

    number: int
    name: str
    slowness: float
    dies_at: float
    ready: list[Claim[BatchJob]] = field(default_factory=list)
    running: Claim[BatchJob] | None = None
    free_since: float | None = None
    dead: bool = False


@dataclass
class Tally:
    """What happened, over all threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_published: int = 0
    num_deaths: int = 0
    num_refused: int = 0
    idle_seconds: float = 0.0
    busy_seconds: float = 0.0
    lost_seconds: float = 0.0
    first_empty: float | None = None
    last_published: float = 0.0


def simulate(server: EmbeddedServer, run: str, num_batches: int, settings: FleetSettings) -> dict[str, Any]:
    """Play the fleet until every batch is published; returns the figures."""
    tally, began = Tally(), time.monotonic()
    shares = [range(index, settings.num_workers, settings.num_threads) for index in range(settings.num_threads)]
    players = [Player(server, run, num_batches, settings, share, tally, began) for share in shares]
    with Reaper(server.connect(), DeliverySettings()):
        threads = [threading.Thread(target=player.play) for player in players]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = tally.last_published - began
    until_empty = (tally.first_empty or tally.last_published) - began
    return {
        "workers": settings.num_workers,
        "batches": num_batches,
        "seconds": round(seconds, 1),
        "published_per_second": round(num_batches / seconds),
        "published_per_second_before_the_tail": round((num_batches - settings.num_workers) / until_empty),
        "idle_share_before_the_last_batch_was_claimed": round(
            tally.idle_seconds / (tally.idle_seconds + tally.busy_seconds), 5
        ),
        "tail_seconds": round(seconds - until_empty, 1),
        "deaths": tally.num_deaths,
        "lost_gpu_seconds": round(tally.lost_seconds, 1),
        "lost_share": round(tally.lost_seconds / tally.busy_seconds, 5),
        "refused_late_results": tally.num_refused,
    }


class Player:
    """Plays some of the workers, event by event, in one thread."""

    def __init__(
        self,
        server: EmbeddedServer,
        run: str,
        num_batches: int,
        settings: FleetSettings,
        numbers: range,
        tally: Tally,
        began: float,
    ) -> None:
        self._moves = Transitions(server.connect(), DeliverySettings())
        self._run = run
        self._num_batches = num_batches
        self._settings = settings
        self._tally = tally
        self._random = random.Random(f"{settings.seed}-{numbers.start}")
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        for number in numbers:
            self._birth(number, began + self._random.uniform(0, settings.forward_seconds), began, mortal=True)

    def play(self) -> None:
        """Until every batch of the run is published."""
        while self._tally.num_published < self._num_batches:
            due, _, act = self._events[0]
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(min(wait, 0.05))
                continue
            heapq.heappop(self._events)
            act(due)

    def _at(self, due: float, act: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (due, self._count, act))

    def _birth(self, number: int, due: float, began: float, *, mortal: bool) -> None:
        settings, draw = self._settings, self._random
        slowness = settings.straggler_factor if draw.random() < settings.straggler_share else 1.0
        dies_at = began + draw.uniform(5, 40) if mortal and draw.random() < settings.death_share else float("inf")
        worker = Worker(number, f"sim-{number}-{draw.getrandbits(32):08x}", slowness, dies_at)
        self._at(due, lambda due: self._begin(worker, None))
        self._at(due + draw.uniform(0, 5), lambda due: self._beat(worker, due))

    def _begin(self, worker: Worker, free_since: float | None) -> None:
        """The GPU is free: fetch if nothing is ready, and start the next batch."""
        if not worker.ready:
            self._claim(worker)
        if not worker.ready:
            now = time.monotonic()
            with self._tally.lock:
                self._tally.first_empty = self._tally.first_empty or now
            self._at(now + EMPTY_POLL_SECONDS, lambda due: self._begin(worker, None))
            return
        claim = worker.ready.pop(0)
        if not self._moves.enter(claim.job_id, claim.execution, "gpu"):
            self._begin(worker, free_since)
            return
        worker.running = claim
        now = time.monotonic()
        seconds = self._settings.forward_seconds * self._random.triangular(0.5, 2.0, 0.5) * worker.slowness
        if free_since is not None and self._tally.first_empty is None:
            with self._tally.lock:
                self._tally.idle_seconds += now - free_since
        if now < worker.dies_at < now + seconds:
            self._at(worker.dies_at, lambda due: self._die(worker, due - now))
        else:
            self._at(now + seconds, lambda due: self._end(worker, claim, seconds, due))
        if not worker.ready:
            self._claim(worker)  # while the GPU is busy

    def _end(self, worker: Worker, claim: Claim[BatchJob], seconds: float, due: float) -> None:
        """The forward pass is done: the next one starts, then this one is published, as the real pipeline does."""
        self._begin(worker, due)
        shard = shard_of(claim, SPOOLS[worker.number % len(SPOOLS)])
        done = self._moves.publish(claim.job_id, claim.execution, shard, host=f"host-{worker.number // 8}")
        with self._tally.lock:
            self._tally.busy_seconds += seconds
            self._tally.last_published = time.monotonic()
            if done:
                self._tally.num_published += 1
            else:
                self._tally.num_refused += 1
                self._tally.lost_seconds += seconds

    def _die(self, worker: Worker, seconds: float) -> None:
        worker.dead = True
        with self._tally.lock:
            self._tally.num_deaths += 1
            self._tally.lost_seconds += seconds
            self._tally.busy_seconds += seconds
        now = time.monotonic()
        self._birth(worker.number, now + self._settings.rebirth_seconds, now, mortal=False)

    def _claim(self, worker: Worker) -> None:
        raws = self._moves.claim(
            names.extract_queue(self._run),
            worker=worker.name,
            host=f"host-{worker.number // 8}",
            executions=new_executions(CLAIMED_AHEAD),
        )
        worker.ready += [claim_of(raw, BatchJob) for raw in raws]

    def _beat(self, worker: Worker, due: float) -> None:
        if worker.dead:
            return
        held = [*worker.ready, *([worker.running] if worker.running else [])]
        report = WorkerReport(
            role="gpu_worker", name=worker.name, target=str(worker.number), host=f"host-{worker.number // 8}", pid=1,
            spool_id=SPOOLS[worker.number % len(SPOOLS)], run=self._run, state="busy",
        )  # fmt: skip
        self._moves.beat(
            worker=worker.name,
            queues=[names.extract_queue(self._run)],
            fields={"state": "busy"},
            entry=f"gpu_worker:{worker.number}",
            report=report.to_json(),
            spool_id=report.spool_id,
            host=report.host,
            claims=[(claim.job_id, claim.execution) for claim in held],
        )
        self._at(due + self._moves.settings.renew_seconds, lambda due: self._beat(worker, due))


def shard_of(claim: Claim[BatchJob], spool_id: str) -> ShardReady:
    """The shard that an execution might have written."""
    batch = claim.message
    return ShardReady(
        batch=batch, spool_id=spool_id, file_name=names.shard_file_name(batch.batch_id, claim.execution),
        num_bytes=500_000_000, data_offset=4096, checksum="crc64nvme:AAAAAAAAAAA=", execution=claim.execution,
        worker="w",
    )  # fmt: skip
