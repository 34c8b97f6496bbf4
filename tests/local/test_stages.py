"""The stages as services: a Redis that others reach, a producer, a worker and uploaders that join it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import hiddenq
from tests.local.conftest import ALONE, chats, write_rows
from tests.support.command import Command, lines_of, make_command
from tests.support.redis_server import RedisServer, redis_server, shared_redis_server  # noqa: F401  fixtures
from tests.support.samples import both_states
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(redis_server: RedisServer, tmp_path: Path) -> Command:  # noqa: F811
    """The command with the one setting that a machine needs to join: the Redis address, with its password."""
    home = tmp_path / "home"
    home.mkdir()
    return make_command(home, HIDDENQ_REDIS_URL=redis_server.url, HIDDENQ_REDIS_PASSWORD=redis_server.password)


def test_produce_worker_and_upload_complete_a_run_together(
    fleet: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(8))
    out = tmp_path / "out"
    produced = fleet("produce", "--model", models["llama"], "--data", data, "--out", out, "--target-layers", "1,2",
                     "--processes", "1")  # fmt: skip
    assert produced.status == 0, produced
    services = [
        fleet.start("worker", "--devices", "cpu", "--cpu-threads", "1", "--spool", tmp_path / "spool"),
        fleet.start("upload", "--uploaders", "1", "--spool", tmp_path / "spool"),
    ]
    try:
        wait_until(lambda: (out / "manifest.json").exists(), seconds=120, what="the manifest")
    finally:
        for service in services:
            service.send_signal(signal.SIGTERM)
        ended = [service.communicate(timeout=60) for service in services]
    assert [service.returncode for service in services] == [0, 0], ended
    assert json.loads((out / "manifest.json").read_text())["complete"] is True
    run = hiddenq.open_run(out)
    assert len(run) == 8
    assert both_states(run[5])[0].shape[1:] == (2, 64)
    status = fleet("status", "--out", out, "--json")
    assert json.loads(status.out)["complete"] is True, status


def test_a_service_without_a_redis_address_says_which_setting_is_missing(hiddenq: Command, tmp_path: Path) -> None:
    for stage in ("worker", "upload", "monitor"):
        ended = hiddenq(stage)
        assert ended.status == 2, ended
        assert "HIDDENQ_REDIS_URL" in ended.err
        assert len(ended.err.strip().splitlines()) == 1


def test_a_run_whose_workers_are_told_nonsense_ends_with_the_reason_and_keeps_what_it_has(
    hiddenq: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(3))
    out = tmp_path / "out"
    arguments = ("run", "--model", models["llama"], "--data", data, "--out", out, "--target-layers", "1", *ALONE)
    ended = hiddenq(*arguments, "--attention", "flash_attention_2")
    assert ended.status == 2, f"{ended}\n{lines_of(sorted((out / '.hiddenq' / 'logs').glob('*.log')))}"
    assert "worker-cpu was given up" in ended.err
    assert "FlashAttention2" in ended.err, "the worker's own last words"
    assert json.loads((out / "manifest.json").read_text())["complete"] is False
    again = hiddenq(*arguments)
    assert again.status == 0, again
    assert json.loads((out / "manifest.json").read_text())["complete"] is True
