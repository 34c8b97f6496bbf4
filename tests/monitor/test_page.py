"""The page as a browser shows it: headless Chromium reads what a person would.

Needs Debian's `chromium`; without it the page is only checked for what it may not hold (test_server.py).
With HIDDENQ_SCREENSHOTS=FOLDER it leaves pictures there; those in `docs/` were made so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis

from hiddenq.contracts.errors import NonFiniteStates
from hiddenq.monitor.history import History
from tests.monitor.made_fleet import MadeWorker, made_fleet, made_record
from tests.monitor.test_server import monitor
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.slow


def browse(port: int, folder: Path, picture: str) -> str:
    """The text of the page once its script has run."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    url = f"http://127.0.0.1:{port}/"
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=4000", "--window-size=1180,900",
    ]  # fmt: skip
    if pictures := os.environ.get("HIDDENQ_SCREENSHOTS"):
        path = Path(pictures).resolve() / f"{picture}.png"
        subprocess.run([*command, f"--screenshot={path}", url], check=True, capture_output=True, timeout=120)
    done = subprocess.run([*command, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=120)
    body = re.sub(r"<script>.*?</script>", "", done.stdout.partition("<body>")[2], flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDENQ_HOST", "node1")


def look_back(client: redis.Redis, seconds: float) -> None:
    """As if the looks until now had been so long ago."""
    history = History.load(client)
    marks = {target: mark.model_copy(update={"since": mark.since - seconds}) for target, mark in history.marks.items()}
    runs = {
        run: one.model_copy(
            update={
                "first": one.first.model_copy(update={"at": one.first.at - seconds}),
                "points": tuple(point.model_copy(update={"at": point.at - seconds}) for point in one.points),
            }
        )
        for run, one in history.runs.items()
    }
    history.model_copy(update={"marks": marks, "runs": runs}).save(client)


def test_a_person_sees_at_a_glance_that_it_goes_well(
    redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    record = made_record("qwen3-27b-eagle3", num_batches=400)
    with made_fleet(redis_client, record) as (worker, uploader):
        others = [MadeWorker(redis_client, record, f"cuda:{number}") for number in (1, 2, 3)]
        for other, temperature in zip([worker, *others], (61, 64, 59, 66), strict=True):
            other.say(
                state="busy",
                batch_id=f"{110 + temperature:06d}",
                batch_seconds=temperature / 20,
                tokens_per_second=21_000 + 37 * temperature,
                useful_mfu=0.4 + temperature / 1000,
                memory_used_bytes=71 << 30,
                memory_total_bytes=96 << 30,
                temperature_celsius=temperature,
                utilization=0.99,
                fast_kernels=True,
                spool_bytes=37 << 30,
                spool_files=41,
                spool_high_bytes=400 << 30,
                disk_free_bytes=1100 << 30,
            )
        with monitor(redis_server.url) as seen:
            for one in range(170):
                [worker, *others][one % 4].extract()
                if one >= 9:
                    uploader.upload()
            for other in (worker, *others):
                other.beat()
            look_back(redis_client, 280)
            seen.watcher.look()
            text = browse(seen.port, tmp_path, "status-goes-well")
        assert "qwen3-27b-eagle3 goes well" in text
        assert "40.3 %: 644 of 1,600 samples, 161 of 400 batches in the store (by the ledger)" in text
        assert "node1 cuda:3 busy" in text
        assert "71.0 GiB / 96.0 GiB" in text
        assert "170 batches (executions: a batch that ran twice counts twice)" in text


def test_a_person_sees_what_is_wrong_and_what_to_do(
    redis_server: RedisServer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    record = made_record("qwen3-27b-eagle3", num_batches=40)
    with made_fleet(redis_client, record) as (worker, uploader):
        for number in range(12):
            worker.extract()
            if number < 6:
                uploader.upload()
        (claim,) = worker.consumer.claim(1)
        worker.consumer.enter(claim, "gpu")
        worker.consumer.fail(claim, NonFiniteStates(f"batch {claim.message.batch_id}: sample 48: layer 31 has <NaN>"))
        worker.say(state="busy", batch_id="000013", batch_seconds=611.0, tokens_per_second=0.0)
        other = MadeWorker(redis_client, record, "cuda:1", tokens_per_second=21_000.0)
        other.beat()
        redis_client.zadd("hiddenq:workers:seen", {f"gpu_worker:{other.report().target}": time.time() - 247})
        with monitor(redis_server.url) as seen:
            look_back(redis_client, 611)
            worker.beat()
            seen.watcher.look()
            text = browse(seen.port, tmp_path, "status-needs-help")
        assert "qwen3-27b-eagle3 needs help" in text
        assert "node1 cuda:0: no batch finished for 10m 1" in text
        assert "kill pid 4242" in text
        assert "hiddenq failed list --run qwen3-27b-eagle3" in text
        assert "layer 31 has &lt;NaN&gt;" in text, "shown as text, not as markup"
