"""Hosts whose clocks are an hour apart: no decision of delivery reads a host's clock."""

from __future__ import annotations

import ast
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rq.job import Job

from hiddenq import delivery
from hiddenq.delivery import fleet
from tests.delivery.conftest import Bench, entry, shard

WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}


def test_no_module_of_delivery_reads_the_hosts_clock() -> None:
    for path in Path(delivery.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in WALL_CLOCKS, f"{path.name}:{node.lineno}"


def test_times_shown_by_rqs_tools_are_the_redis_servers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rq.job.now", lambda: datetime(2001, 1, 1, tzinfo=UTC))  # a host whose clock is odd
    bench.enqueue(1)
    worker, uploader = bench.gpu_worker(), bench.uploader()
    [claim] = worker.claim()
    worker.publish(claim, shard(claim))
    [upload] = uploader.claim()
    uploader.commit(upload, entry(upload.message))
    for job_id in (claim.job_id, upload.job_id):
        job = Job.fetch(job_id, connection=bench.client, serializer="json")
        for moment in (job.created_at, job.enqueued_at, job.started_at, job.ended_at):
            assert moment is not None
            assert abs(moment.timestamp() - time.time()) < 60
    assert abs(fleet(bench.client).now - time.time()) < 60
