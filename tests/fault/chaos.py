"""Everything dies at random, and the run comes out right: `python -m tests.fault.chaos --minutes 20 [--seed N]`.

Three workers and two uploaders on two hosts (spools), a real Redis, a real S3 server. By a seeded schedule workers and
uploaders are killed or stopped past their lease and continued, Redis and the S3 server are killed and come back, and
one host is lost for good with everything in its spool. It ends on the invariant of invariant.py, or raises.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import boto3
import redis
from botocore.config import Config

from hiddenq.contracts import names
from hiddenq.contracts.errors import MissingShard, RetryableError
from hiddenq.delivery import Ledger, Reaper, connect, dead_batches, fleet
from hiddenq.storage import ObjectStore, Spool, StoreSettings, open_store
from tests.fault import invariant
from tests.fault.parts import KILLS, KILLS_UPLOADERS, RAISES, SETTINGS, Surroundings, start
from tests.support.redis_server import RedisServer
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, start_server
from uploader import finish_run

POISON = {RAISES, KILLS, KILLS_UPLOADERS}
STOPPED_SECONDS = 1.5 * SETTINGS.lease_seconds


@dataclass
class Part:
    """One process of the fleet and how to start it again."""

    kind: str
    host: str
    spool: Path
    process: ForkServerProcess | None = None
    stopped_until: float | None = None
    busy_until: float = 0.0
    """Continued after a stop, it has until then to finish what it held."""


@dataclass
class Outcome:
    """What happened."""

    seed: int
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0
    num_restarts: int = 0
    num_charged: int = 0
    num_remade: int = 0


class Chaos:
    """One run under fire."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        num_batches: int,
        forward_seconds: float,
        limit_seconds: float,
        poison: Set[str] = frozenset(POISON),
        sabotage: str = "",
        only: str | None = None,
        s3: S3Server | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._deadline = time.monotonic() + limit_seconds
        self._log = log
        self._outcome = Outcome(seed, num_batches=num_batches)
        self._began = time.monotonic()
        self._only = only
        """The one kind of strike there is; "" for none, None for all."""
        (folder / "s3").mkdir()
        (folder / "logs").mkdir()
        with contextlib.ExitStack() as servers:
            self._redis_server = RedisServer(folder / "redis")
            servers.callback(self._redis_server.stop)
            self._s3 = s3 or start_server(folder / "s3")
            if s3 is None:
                servers.callback(self._s3.stop)
            self._servers = servers.pop_all()
        self._surroundings = Surroundings(
            redis_url=self._redis_server.bare_url,
            redis_password=self._redis_server.password,
            num_batches=num_batches,
            forward_seconds=forward_seconds,
            log_folder=folder / "logs",
            environment={
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_EC2_METADATA_DISABLED": "true",
                "HIDDENQ_LOG_FORMAT": "json",
            },
            poison=poison,
            sabotage=sabotage,
        )
        os.environ.update(self._surroundings.environment)
        self._run = self._surroundings.run()
        self._parts = [
            Part("worker", "a", folder / "spool-a"),
            Part("worker", "a", folder / "spool-a"),
            Part("uploader", "a", folder / "spool-a"),
            Part("worker", "b", folder / "spool-b"),
            Part("uploader", "b", folder / "spool-b"),
        ]
        self._outages: list[threading.Thread] = []
        self._host_is_lost = False

    def play(self) -> Outcome:
        """From the first batch to the invariant.

        Raises:
            invariant.Broken: a promise was not kept, or the run did not end in time.
        """
        settings = StoreSettings(endpoint_url=self._s3.endpoint_url, region="us-east-1", addressing_style="path")
        store = open_store(f"s3://{BUCKET}/chaos-{secrets.token_hex(4)}", settings)
        client = connect(self._surroundings.redis_url, password=self._surroundings.redis_password)
        self._run.start(client, store, settings.model_dump(mode="json"))
        for part in self._parts:
            self._start(part)
        # This process keeps every promise, so where one is broken it must not make up for the others.
        with Reaper(client, SETTINGS) if not self._surroundings.sabotage else contextlib.nullcontext():
            self._under_fire(client)
            self._in_peace(client, store)
        self._outcome.seconds = round(time.monotonic() - self._began, 1)
        self._count(client)
        return self._outcome

    def close(self) -> None:
        """Nothing is left running."""
        for part in self._parts:
            self._kill(part)
        for outage in self._outages:
            outage.join()
        self._servers.close()

    # Under fire

    def _under_fire(self, client: redis.Redis) -> None:
        """Until the greater part of the batches is in."""
        next_event = time.monotonic() + (2.0 if self._only is None else 0.0)
        while self._share_done(client) < 0.8:
            self._keep_alive()
            if time.monotonic() >= next_event and self._strike(client):
                next_event = time.monotonic() + self._random.uniform(0.6, 1.8)
            time.sleep(0.05)
            self._check_time(client)

    def _strike(self, client: redis.Redis) -> bool:
        """Whether there was anything to strike. An only kind strikes thrice, and spares workers with no work."""
        workers = [part for part in self._parts if part.kind == "worker"]
        uploaders = [part for part in self._parts if part.kind == "uploader"]
        if self._only is not None:
            workers = [worker for worker in workers if self._is_at_work(worker, client)]
            if not workers or sum(self._outcome.events.values()) >= 3:
                return False
        draw = self._random
        kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "worker killed": (6, lambda: self._kill(draw.choice(workers))),
            "worker stopped past its lease": (2, lambda: self._stop(draw.choice(workers))),
            "uploader killed": (5, lambda: self._kill(draw.choice(uploaders))),
            "uploader stopped past its lease": (1, lambda: self._stop(draw.choice(uploaders))),
            "Redis killed": (2, lambda: self._outage(self._redis_outage, draw.choice([0.1, 1.0, 4.0]))),
            "S3 server killed": (2, lambda: self._outage(self._s3_outage, draw.choice([0.1, 2.0]))),
            "host lost with its spool": (0 if self._host_is_lost else 2, lambda: self._lose_host(client)),
        }
        if any(outage.is_alive() for outage in self._outages):
            kinds = {name: kind for name, kind in kinds.items() if name not in ("Redis killed", "S3 server killed")}
        if self._only is not None:
            kinds = {name: kind for name, kind in kinds.items() if name == self._only}
            if not any(weight for weight, _ in kinds.values()):
                return False
        [name] = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])
        self._outcome.events[name] += 1
        self._log(f"{time.monotonic() - self._began:6.1f} s  {name}")
        kinds[name][1]()
        return True

    def _is_at_work(self, worker: Part, client: redis.Redis) -> bool:
        """Whether it lives and holds a batch."""
        if worker.stopped_until is not None or worker.process is None or not worker.process.is_alive():
            return False
        held = client.scan_iter(f"rq:worker:*-{worker.host}-{worker.process.pid}-*:executions", count=1000)
        return any(client.scard(key) for key in held)

    def _kill(self, part: Part) -> None:
        if part.process is not None:
            part.process.kill()
            part.process.join()

    def _stop(self, part: Part) -> None:
        if part.process is not None and part.process.is_alive() and part.process.pid:
            os.kill(part.process.pid, signal.SIGSTOP)
            part.stopped_until = time.monotonic() + STOPPED_SECONDS

    def _lose_host(self, client: redis.Redis) -> None:
        """Host b burns down with published shards in its spool, and a new one takes its place."""
        self._host_is_lost = True
        spool = Spool.open(self._folder / "spool-b")
        uploads = f"rq:queue:{names.upload_queue(spool.spool_id)}"
        for part in self._parts:
            if part.host == "b" and part.kind == "uploader":
                self._stop(part)
        deadline = time.monotonic() + (3.0 if self._only is None else 20.0)
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError):
                if client.llen(uploads):
                    break
            time.sleep(0.02)
        for part in self._parts:
            if part.host == "b":
                self._kill(part)
        subprocess.run(["rm", "-rf", str(self._folder / "spool-b")], check=True)
        for part in self._parts:
            if part.host == "b":
                part.host, part.spool = "c", self._folder / "spool-c"

    def _outage(self, outage: Callable[[float], None], seconds: float) -> None:
        thread = threading.Thread(target=outage, args=(seconds,))
        thread.start()
        self._outages.append(thread)

    def _redis_outage(self, seconds: float) -> None:
        self._redis_server.restart(away_seconds=seconds)

    def _s3_outage(self, seconds: float) -> None:
        self._s3.restart(away_seconds=seconds)
        _wait_for_s3(self._s3)

    def _keep_alive(self) -> None:
        """What a supervisor does: start again what has died, and here also continue what was stopped."""
        now = time.monotonic()
        for part in self._parts:
            if part.stopped_until is not None and now >= part.stopped_until:
                part.stopped_until, part.busy_until = None, now + 2.0
                if part.process is not None and part.process.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(part.process.pid, signal.SIGCONT)
            if part.process is not None and not part.process.is_alive():
                self._outcome.num_restarts += 1
                self._start(part)

    def _start(self, part: Part) -> None:
        part.stopped_until = None
        part.process = start(part.kind, self._surroundings, part.spool, part.host)

    # In peace

    def _in_peace(self, client: redis.Redis, store: ObjectStore) -> None:
        """No more strikes: the run comes to its end by itself, then it is looked at."""
        for outage in self._outages:
            outage.join()
        self._log(f"{time.monotonic() - self._began:6.1f} s  peace")
        while not self._is_quiet(client):
            self._keep_alive()
            time.sleep(0.1)
            self._check_time(client)
        for part in self._parts:
            if part.process is not None:
                part.process.terminate()
        for part in self._parts:
            if part.process is not None:
                part.process.join(20)
        [record] = [run.record for run in fleet(client).runs]
        try:
            finish_run(client, record, store)
        except MissingShard as error:
            raise invariant.Broken(str(error)) from error
        spools = {part.spool for part in self._parts}
        invariant.holds(client, self._run, store, sorted(spools), self._surroundings.poison)

    def _is_quiet(self, client: redis.Redis) -> bool:
        """Every batch is in or set aside, and no spool holds a file."""
        try:
            if self._share_done(client) < 1 or client.zcard("hiddenq:leases"):
                return False
        except redis.RedisError:
            return False
        if any(part.stopped_until or time.monotonic() < part.busy_until for part in self._parts):
            return False
        return all(Spool.open(spool).usage().num_bytes == 0 for spool in {part.spool for part in self._parts})

    def _share_done(self, client: redis.Redis) -> float:
        try:
            done = Ledger(client, self._run.name).totals().num_batches + len(dead_batches(client, self._run.name))
        except RetryableError:
            return 0.0
        return done / len(self._run.batches)

    def _check_time(self, client: redis.Redis) -> None:
        if time.monotonic() > self._deadline:
            with contextlib.suppress(RetryableError):
                queues = [queue for queue in fleet(client).queues if queue.num_waiting + queue.num_started]
                done = round(self._share_done(client) * len(self._run.batches))
                raise invariant.Broken(f"not ended in time: {done} of {len(self._run.batches)} batches; {queues}")
            raise invariant.Broken("not ended in time, and Redis is away")

    def _count(self, client: redis.Redis) -> None:
        for batch in self._run.batches:
            job = f"rq:job:{self._run.name}-{batch.batch_id}"
            attempts, remakes = client.hmget(job, "attempts", "remakes")
            self._outcome.num_charged += int(attempts or 0)
            self._outcome.num_remade += int(remakes or 0)


def _wait_for_s3(server: S3Server) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}, connect_timeout=1, read_timeout=2),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            client.put_object(Bucket=BUCKET, Key="alive", Body=b"1")
            return
        time.sleep(0.1)


def main() -> int:
    """Run after run until the minutes are over, each with the next seed; the logs of a failed one are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else secrets.randbelow(1_000_000)
    end = time.monotonic() + 60 * options.minutes
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        print(f"seed {seed}, logs in {folder}", flush=True)
        chaos = Chaos(folder, seed=seed, num_batches=1200, forward_seconds=0.2, limit_seconds=900, log=print)
        try:
            outcome = chaos.play()
        finally:
            chaos.close()
        shutil.rmtree(folder)
        print(json.dumps(vars(outcome)), flush=True)
        seed += 1
        if time.monotonic() > end:
            return 0


if __name__ == "__main__":
    sys.exit(main())
