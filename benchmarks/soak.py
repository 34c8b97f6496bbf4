"""Hours of work under fire: real runs of a tiny model while everything around is killed, and nothing may grow.

    python -m benchmarks.soak [--minutes 30] [--seed N] [--rows 500]

One run after another, into a real S3 server through a real Redis, on two hosts: the run's own, whose worker and
uploaders are killed at random, and one that has joined for good (`hiddenq worker --any-run`, `hiddenq upload`).
Redis and the S3 server are killed, too, and come back. Each run must end by itself, verify (two samples recomputed),
and leave both spools and all queues empty; the joined host's processes must neither die nor grow in memory or open
files. Prints one JSON object; exit status 1 if anything was not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lives import Lives, children
from hiddenq.delivery import connect, fleet
from tests.support.command import make_command
from tests.support.models import save_tiny_model
from tests.support.redis_server import RedisServer
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, start_server
from tests.support.waiting import wait_until

STRIKE_SECONDS = (6.0, 15.0)
RUN_LIMIT_SECONDS = 900.0
PREPARED = " to do"
"""What a run says once it is prepared; before that, an error ends it, as it should at a start."""
WORDS = """the model reads a token and writes a state for each layer that was asked of it while time goes on"""


def main() -> int:
    """Play it, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--rows", type=int, default=500, help="conversations a run")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed=seed, num_rows=options.rows)
        try:
            soak.play(options.minutes * 60)
        finally:
            soak.close()
        result = {"seed": seed, "minutes": options.minutes, **soak.result()}
    print(json.dumps(result, indent=2))
    return 1 if result["broken"] else 0


class Soak:
    """Two hosts, a Redis, an S3 server, and who shoots at them."""

    def __init__(self, folder: Path, *, seed: int, num_rows: int) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._strikes: Counter[str] = Counter()
        self._broken: list[str] = []
        self._totals: Counter[str] = Counter()
        (folder / "s3").mkdir()
        self._s3 = start_server(folder / "s3")
        self._redis = RedisServer(folder / "redis", appendfsync="everysec")
        (folder / "password").write_text(self._redis.password)
        (folder / "home").mkdir()
        save_tiny_model(
            folder / "model",
            num_hidden_layers=16,
            hidden_size=256,
            intermediate_size=1024,
            max_position_embeddings=1024,
        )
        (folder / "chats.jsonl").write_text("".join(self._row() for _ in range(num_rows)))
        self._command = make_command(
            folder / "home",
            AWS_ACCESS_KEY_ID=ACCESS_KEY,
            AWS_SECRET_ACCESS_KEY=SECRET_KEY,
            HIDDENQ_REDIS_URL=self._redis.bare_url,
            HIDDENQ_REDIS_PASSWORD_FILE=str(folder / "password"),
            HIDDENQ_ENDPOINT_URL=self._s3.endpoint_url,
        )
        few = ("--devices", "cpu", "--cpu-threads", "1")
        self._joined = [
            self._start("joined worker", "worker", "--spool", folder / "spool-b", "--any-run", *few),
            self._start("joined uploader", "upload", "--spool", folder / "spool-b"),
        ]
        self._lives = Lives(dict(zip(("joined worker", "joined uploader"), self._joined, strict=True)))

    def play(self, seconds: float) -> None:
        """Run after run until the time is over."""
        self._lives.start()
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until and not self._broken:
            self._one_run(number)
            number += 1
        self._lives.stop()

    def close(self) -> None:
        """End everything."""
        self._lives.stop()
        for process in self._joined:
            process.terminate()
        for process in self._joined:
            if process.wait(60) != 0:
                self._broken.append(f"the joined host's process ended with {process.returncode}")
        self._redis.stop()
        self._s3.stop()

    def result(self) -> dict[str, Any]:
        """What happened."""
        lives = self._lives.growth()
        return {
            **self._totals,
            "strikes": dict(self._strikes),
            "processes": lives,
            "broken": self._broken + [f"{role}: grew" for role, found in lives.items() if not found["flat"]],
        }

    # One run

    def _one_run(self, number: int) -> None:
        folder, out = self._folder, f"s3://{BUCKET}/soak-{os.getpid()}-{number}"
        run = self._start(
            "run", "run", "--model", folder / "model", "--data", folder / "chats.jsonl", "--out", out,
            "--target-layers", "2,8,13", "--token-budget", "512", "--max-length", "256",
            "--devices", "cpu", "--cpu-threads", "1", "--processes", "1", "--uploaders", "2", "--metrics-port", "0",
        )  # fmt: skip
        deadline, strike_at = time.monotonic() + RUN_LIMIT_SECONDS, 0.0
        begun = len(self._log("run"))
        while run.poll() is None and time.monotonic() < deadline:
            if time.monotonic() >= strike_at and PREPARED in self._log("run")[begun:]:
                self._strike(run)
                strike_at = time.monotonic() + self._random.uniform(*STRIKE_SECONDS)
            time.sleep(0.2)
        if run.poll() is None:
            run.terminate()
            self._broken.append(f"run {number} did not end within {RUN_LIMIT_SECONDS:g} s")
        elif run.returncode:
            self._broken.append(f"run {number} ended with {run.returncode}: {self._log('run')[-600:]}")
        run.wait(120)
        wait_until(self._s3_answers, seconds=120, what="the S3 server")
        verified = self._command("verify", "--out", out, "--recompute", "2", "--json", seconds=300)
        if verified.status:
            self._broken.append(f"run {number}: {verified.out[-1500:]}{verified.err[-600:]}")
            return
        report = json.loads(verified.out)
        self._totals.update(runs=1, samples=report["num_samples"], shards=report["num_shards"])
        self._look_for_leftovers(number)

    def _look_for_leftovers(self, number: int) -> None:
        client = connect(self._redis.bare_url, password=self._redis.password)
        queues = [queue for queue in fleet(client).queues if queue.num_waiting + queue.num_started + queue.num_delayed]
        spools = [self._folder / name for name in ("home", "spool-b")]  # the run's own lies in its user's home
        files = [str(path.relative_to(self._folder)) for spool in spools for path in spool.rglob("*.safetensors*")]
        if queues or files:
            self._broken.append(f"run {number} left {queues} and {files}")
        client.close()

    def _s3_answers(self) -> bool:
        with contextlib.suppress(Exception):
            self._s3.client().head_bucket(Bucket=BUCKET)
            return True
        return False

    # Who shoots

    def _strike(self, run: subprocess.Popen[bytes]) -> None:
        victims = [pid for pid in children(run.pid) if self._is_part(pid)]
        kinds = ["Redis killed", "S3 server killed"] + ["process killed", "process stopped past its lease"] * bool(
            victims
        )
        weights = [2, 2, 5, 1][: len(kinds)]
        [kind] = self._random.choices(kinds, weights)
        self._strikes[kind] += 1
        if kind == "Redis killed":
            self._redis.restart(away_seconds=self._random.choice([0.1, 1.0, 4.0]))
        elif kind == "S3 server killed":
            self._s3.restart(away_seconds=self._random.choice([0.1, 3.0]))
        elif kind == "process killed":
            _signal(self._random.choice(victims), signal.SIGKILL)
        else:
            victim = self._random.choice(victims)
            _signal(victim, signal.SIGSTOP)
            threading.Timer(40.0, _signal, (victim, signal.SIGCONT)).start()

    @staticmethod
    def _is_part(pid: int) -> bool:
        """A worker or an uploader of the run."""
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            return b"\0worker" in line or b"\0upload" in line
        return False

    def _start(self, name: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "hiddenq", *map(str, arguments)],
                env=self._command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def _row(self) -> str:
        turns = [" ".join(self._random.choices(WORDS.split(), k=self._random.randint(5, 60))) for _ in range(2)]
        roles = ("user", "assistant")
        return json.dumps({"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]}) + "\n"


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
