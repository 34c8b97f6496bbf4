"""A message in Redis is data: whatever it says, nothing is imported, nothing is run, nothing grows without bound."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from typing import Any

import pytest
from rq.job import Job

from hiddenq.contracts.errors import BadMessage, UnknownSchema
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.delivery import dead_letters, jobs
from tests.delivery.conftest import Bench, batch

KEYWORDS = batch(0).model_dump(mode="json")


def packed(
    function: str = "hiddenq.extract", keywords: Any = None, *, arguments: Any = (), instance: Any = None
) -> bytes:
    call = [function, instance, list(arguments), KEYWORDS if keywords is None else keywords]
    return zlib.compress(json.dumps(call).encode())


CRAFTED = {
    "another function": (packed("os.system", {"command": "touch pwned"}), "asks for 'os.system'; here only"),
    "the other stage's function": (packed("hiddenq.upload"), "asks for 'hiddenq.upload'"),
    "a pickle": (zlib.compress(pickle.dumps(os.getcwd)), "is not JSON .another serializer"),
    "no packing": (b"\x80\x04nonsense", "is not in RQ's packed form"),
    "a bomb": (zlib.compress(b"[" * 1_000_000), "unpacks to more than 2048 bytes"),
    "too much": (os.urandom(4000), "without data, or with more than 2048 bytes"),
    "nothing": (b"", "without data"),
    "no call": (zlib.compress(b"{}"), "is not a call"),
    "an instance": (packed(instance="x"), "expected keywords only"),
    "arguments": (packed(arguments=["rm"]), "expected keywords only"),
    "an unknown field": (packed(keywords={**KEYWORDS, "callback": "os.system"}), "callback: Extra inputs"),
    "no version": (packed(keywords={**KEYWORDS, "schema_version": "x"}), "schema_version: expected a whole number"),
    "another output prefix": (packed(keywords={**KEYWORDS, "run": "../../etc"}), "run: String should match"),
    "another batch": (packed(keywords={**KEYWORDS, "batch_id": "000007"}), "carries the message of 'run-000007'"),
    "another run": (packed(keywords={**KEYWORDS, "run": "other"}), "carries the message of 'other-000000'"),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_message_runs_nothing_and_goes_to_the_failed_registry_uncharged(bench: Bench, kind: str) -> None:
    data, text = CRAFTED[kind]
    bench.enqueue(2)
    bench.client.hset("rq:job:run-000000", "data", data)
    worker = bench.gpu_worker()
    assert [claim.message.batch_id for claim in worker.claim(5)] == ["000001"]
    assert bench.status("run-000000") == "failed"
    assert bench.client.hget("rq:job:run-000000", "attempts") is None
    assert bench.client.zrange("rq:failed:hiddenq-extract-run", 0, -1) == [b"run-000000"]
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(bench.field("run-000000", "exc_info"))


def test_a_newer_schema_is_handed_back_uncharged_and_ends_the_process(bench: Bench) -> None:
    bench.enqueue(3)
    newer = packed(keywords={**KEYWORDS, "schema_version": 2, "batch_id": "000001"})
    bench.client.hset("rq:job:run-000001", "data", newer)
    worker = bench.gpu_worker()
    with pytest.raises(UnknownSchema, match="schema version 2 found, this hiddenq knows 1") as caught:
        worker.claim(3)
    assert caught.value.exit_status == 2
    assert {bench.status(f"run-{number:06d}") for number in range(3)} == {"queued"}
    assert {bench.client.hget(f"rq:job:run-{number:06d}", "attempts") for number in range(3)} == {None}
    assert dead_letters(bench.client, "run") == []


@pytest.mark.parametrize(
    "file_name", ["../../etc/passwd", "a/000000-00000000.safetensors", "000000-00000000.safetensors/..", ".hidden"]
)
def test_a_path_in_a_message_is_a_bare_file_name_or_refused(file_name: str) -> None:
    ready = {
        "schema_version": 1, "batch": KEYWORDS, "spool_id": "00000000-0000-4000-8000-000000000001",
        "file_name": file_name, "num_bytes": 1, "data_offset": 8, "checksum": "crc64nvme:AAAAAAAAAAA=",
        "execution": "00000000", "worker": "w",
    }  # fmt: skip
    with pytest.raises(BadMessage, match="file_name: String should match pattern"):
        jobs.unpack(packed("hiddenq.upload", ready), ShardReady)


def test_callbacks_in_a_job_are_never_called(bench: Bench) -> None:
    bench.enqueue(1)
    bench.client.hset(
        "rq:job:run-000000", mapping={"success_callback_name": "os.abort", "failure_callback_name": "os.abort"}
    )
    worker = bench.gpu_worker()
    [claim] = worker.claim()
    worker.fail(claim, BadMessage("set aside"))
    assert bench.status("run-000000") == "failed"


def test_a_message_reads_as_it_was_written_and_rq_reads_it_too(bench: Bench) -> None:
    assert jobs.unpack(jobs.pack(batch(3)), BatchJob) == batch(3)
    bench.enqueue(1)
    job = Job.fetch("run-000000", connection=bench.client, serializer="json")
    assert (job.func_name, job.kwargs, job.args) == ("hiddenq.extract", KEYWORDS, [])
    assert job.description == "extract run batch 000000: 2 samples"
