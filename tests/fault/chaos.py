"""Everything dies at random, and the run comes out right: `python -m tests.fault.chaos --minutes 20 [--seed N]`.

Three workers and two uploaders on two hosts (spools), a real Redis, a real S3 server. By a seeded schedule workers and
uploaders are killed or stopped past their lease and continued, Redis and the S3 server are killed and come back, and
one host is lost for good with everything in its spool. It ends on the invariant of invariant.py, or raises.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from pathlib import Path

import redis

from hiddenq.contracts.errors import MissingShard, RetryableError
from hiddenq.delivery import Ledger, Reaper, connect, dead_batches
from hiddenq.delivery import fleet as look_at_fleet
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from tests.fault import invariant
from tests.fault.fleet import Fleet
from tests.fault.parts import KILLS, KILLS_UPLOADERS, RAISES, SETTINGS
from tests.support.s3_server import BUCKET, S3Server
from uploader import finish_run

POISON = {RAISES, KILLS, KILLS_UPLOADERS}
NUM_STRIKES_OF_ONE_KIND = 3


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
    """One run under fire.

    `only` is the one kind of strike there is ("" for none, None for all): it comes thrice, each time to a fleet that
    has something to lose by it.
    """

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
        self._random = random.Random(seed)
        self._began = time.monotonic()
        self._deadline = self._began + limit_seconds
        self._only = only
        self._log = log
        self._outcome = Outcome(seed, num_batches=num_batches)
        self._fleet = Fleet(
            folder, num_batches=num_batches, forward_seconds=forward_seconds, poison=poison, sabotage=sabotage, s3=s3
        )
        self._surroundings = self._fleet.surroundings
        self._run = self._surroundings.run()
        self.close = self._fleet.close

    def play(self) -> Outcome:
        """From the first batch to the invariant.

        Raises:
            invariant.Broken: a promise was not kept, or the run did not end in time.
        """
        settings = StoreSettings(endpoint_url=self._fleet.s3.endpoint_url, region="us-east-1", addressing_style="path")
        store = open_store(f"s3://{BUCKET}/chaos-{secrets.token_hex(4)}", settings)
        client = connect(self._surroundings.redis_url, password=self._surroundings.redis_password)
        self._run.start(client, store, settings.model_dump(mode="json"))
        self._fleet.start()
        # This process keeps every promise, so where one is broken it must not make up for the others.
        with Reaper(client, SETTINGS) if not self._surroundings.sabotage else contextlib.nullcontext():
            self._under_fire(client)
            self._in_peace(client, store)
        self._outcome.seconds = round(time.monotonic() - self._began, 1)
        self._count(client)
        return self._outcome

    def _under_fire(self, client: redis.Redis) -> None:
        """Until the greater part of the batches is in."""
        next_strike = time.monotonic() + (2.0 if self._only is None else 0.0)
        while self._share_done(client) < 0.8:
            self._outcome.num_restarts += self._fleet.keep_alive()
            if time.monotonic() >= next_strike and self._strike(client):
                next_strike = time.monotonic() + self._random.uniform(0.6, 1.8)
            time.sleep(0.05)
            self._check_time(client)

    def _strike(self, client: redis.Redis) -> bool:
        """Whether there was anything to strike."""
        fleet, draw, patience_seconds = self._fleet, self._random, 3.0
        workers = fleet.workers
        if self._only is not None:
            workers = [worker for worker in workers if fleet.is_at_work(worker, client)]
            patience_seconds = 20.0
            if not workers or sum(self._outcome.events.values()) >= NUM_STRIKES_OF_ONE_KIND:
                return False
        kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "worker killed": (6, lambda: fleet.kill(draw.choice(workers))),
            "worker stopped past its lease": (2, lambda: fleet.stop(draw.choice(workers))),
            "uploader killed": (5, lambda: fleet.kill(draw.choice(fleet.uploaders))),
            "uploader stopped past its lease": (1, lambda: fleet.stop(draw.choice(fleet.uploaders))),
            "Redis killed": (2, lambda: fleet.lose_redis(draw.choice([0.1, 1.0, 4.0]))),
            "S3 server killed": (2, lambda: fleet.lose_s3(draw.choice([0.1, 2.0]))),
            "host lost with its spool": (2, lambda: fleet.lose_host(client, patience_seconds=patience_seconds)),
        }
        if fleet.has_outage:
            del kinds["Redis killed"], kinds["S3 server killed"]
        if fleet.host_is_lost:
            del kinds["host lost with its spool"]
        if self._only is not None:
            kinds = {name: kind for name, kind in kinds.items() if name == self._only}
            if not kinds:
                return False
        [name] = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])
        self._outcome.events[name] += 1
        self._log(f"{time.monotonic() - self._began:6.1f} s  {name}")
        kinds[name][1]()
        return True

    def _in_peace(self, client: redis.Redis, store: ObjectStore) -> None:
        """No more strikes: the run comes to its end by itself, then it is looked at."""
        self._fleet.await_outages()
        self._log(f"{time.monotonic() - self._began:6.1f} s  peace")
        while not self._is_quiet(client):
            self._outcome.num_restarts += self._fleet.keep_alive()
            time.sleep(0.1)
            self._check_time(client)
        self._fleet.end()
        [record] = [run.record for run in look_at_fleet(client).runs]
        try:
            finish_run(client, record, store)
        except MissingShard as error:
            raise invariant.Broken(str(error)) from error
        invariant.holds(client, self._run, store, self._fleet.spools, self._surroundings.poison)

    def _is_quiet(self, client: redis.Redis) -> bool:
        """Every batch is in or set aside, and no spool holds a file."""
        try:
            if self._share_done(client) < 1 or client.zcard("hiddenq:leases"):
                return False
        except redis.RedisError:
            return False
        return self._fleet.is_quiet()

    def _share_done(self, client: redis.Redis) -> float:
        try:
            done = Ledger(client, self._run.name).totals().num_batches + len(dead_batches(client, self._run.name))
        except RetryableError:
            return 0.0
        return done / len(self._run.batches)

    def _check_time(self, client: redis.Redis) -> None:
        if time.monotonic() > self._deadline:
            with contextlib.suppress(RetryableError):
                queues = [queue for queue in look_at_fleet(client).queues if queue.num_waiting + queue.num_started]
                done = round(self._share_done(client) * len(self._run.batches))
                raise invariant.Broken(f"not ended in time: {done} of {len(self._run.batches)} batches; {queues}")
            raise invariant.Broken("not ended in time, and Redis is away")

    def _count(self, client: redis.Redis) -> None:
        for batch in self._run.batches:
            job = f"rq:job:{self._run.name}-{batch.batch_id}"
            attempts, remakes = client.hmget(job, "attempts", "remakes")
            self._outcome.num_charged += int(attempts or 0)
            self._outcome.num_remade += int(remakes or 0)


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
