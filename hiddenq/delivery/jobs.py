"""Messages as RQ jobs, and back.

Invariant: what a job says is data. Its function name is looked up in an allow-list and never imported, its size is
bounded before it is read, its arguments are JSON of exactly the fields that the contract names, and its id must be the
one that its message gives. Anything else is a BadMessage and runs nothing.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar, cast

import redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage
from hiddenq.contracts.messages import MAX_MESSAGE_BYTES, BatchJob, ShardReady
from hiddenq.contracts.wording import counted

MAX_DATA_BYTES = 2 * MAX_MESSAGE_BYTES
"""Most bytes of a job's data, packed or unpacked: the message and its function's name."""
EXTRACT_PREFIX, UPLOAD_PREFIX = names.extract_queue(""), names.upload_queue("")

M = TypeVar("M", bound=BatchJob | ShardReady)
_FUNCTIONS: dict[type, str] = {BatchJob: names.EXTRACT_JOB, ShardReady: names.UPLOAD_JOB}
# RQ wants a connection to build a job; this one is never opened.
_NOWHERE = redis.Redis(connection_pool=redis.ConnectionPool(host="", port=0))


def job_id(message: BatchJob | ShardReady) -> str:
    """The id of the one job that carries this message."""
    if isinstance(message, BatchJob):
        return names.extract_job_id(message.run, message.batch_id)
    return names.upload_job_id(message.batch.run, message.batch.batch_id, message.execution)


def queue_of(message: BatchJob | ShardReady) -> str:
    """The queue that this message waits in."""
    if isinstance(message, BatchJob):
        return names.extract_queue(message.run)
    return names.upload_queue(message.spool_id)


def run_of(queue: str) -> str:
    """The run of an extract queue; "" for any other queue."""
    return queue.removeprefix(EXTRACT_PREFIX) if queue.startswith(EXTRACT_PREFIX) else ""


def job_fields(message: BatchJob | ShardReady) -> dict[str, Any]:
    """The hash of a queued job, as RQ itself would write it, and hiddenq's own fields."""
    batch = message if isinstance(message, BatchJob) else message.batch
    fields: dict[str, Any] = {
        **shared_fields(type(message), queue_of(message)),
        "data": pack(message),
        "description": describe(message),
        "run": batch.run,
        "batch_id": batch.batch_id,
    }
    if isinstance(message, ShardReady):
        fields |= {"spool_id": message.spool_id, "file_name": message.file_name}
    return fields


@lru_cache(maxsize=1024)
def shared_fields(kind: type[BatchJob | ShardReady], queue: str) -> Mapping[str, Any]:
    """What RQ writes into the hash of every job of a queue, whatever its message."""
    job = Job.create(
        _FUNCTIONS[kind],
        connection=_NOWHERE,
        origin=queue,
        status=JobStatus.QUEUED,
        timeout=-1,
        result_ttl=-1,
        failure_ttl=-1,
        serializer=JSONSerializer,
    )
    fields: dict[str, Any] = job.to_dict()
    for own in ("data", "description", "created_at"):
        del fields[own]
    return MappingProxyType(fields | {"status": str(fields["status"].value)})


def describe(message: BatchJob | ShardReady) -> str:
    """One line for RQ's tools."""
    if isinstance(message, BatchJob):
        return f"extract {message.run} batch {message.batch_id}: {counted(message.num_samples, 'sample')}"
    return f"upload {message.batch.run} {message.file_name}: {message.num_bytes} bytes"


def pack(message: BatchJob | ShardReady) -> bytes:
    """A job's data alone, as RQ packs it."""
    call: list[Any] = [_FUNCTIONS[type(message)], None, [], message.model_dump(mode="json")]
    return zlib.compress(json.dumps(call).encode())


def unpack(data: bytes, message: type[M]) -> M:
    """The message in a job's data.

    Raises:
        UnknownSchema: it is of a newer hiddenq.
        BadMessage: it is anything else than a message of this kind.
    """
    if not data:
        raise BadMessage(f"job without data, or with more than {MAX_DATA_BYTES} bytes of it")
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data, MAX_DATA_BYTES)
    except zlib.error:
        raise BadMessage("job data is not in RQ's packed form") from None
    if unpacker.unconsumed_tail:
        raise BadMessage(f"job data unpacks to more than {MAX_DATA_BYTES} bytes")
    try:
        call = json.loads(raw)
    except ValueError:
        raise BadMessage("job data is not JSON (another serializer?); nothing was run") from None
    if not isinstance(call, list) or len(call) != 4:
        raise BadMessage("job data is not a call: expected [function, instance, arguments, keywords]")
    function, instance, arguments, keywords = call
    expected = _FUNCTIONS[message]
    if function != expected:
        raise BadMessage(f"job asks for {str(function)[:80]!r}; here only {expected!r} is run")
    if instance is not None or arguments or not isinstance(keywords, dict):
        raise BadMessage(f"{expected}: expected keywords only")
    return cast(M, message.parse(keywords))


def check_id(message: BatchJob | ShardReady, found: str, queue: str) -> None:
    """Refuse a message under another job's id or in another queue.

    Raises:
        BadMessage: it is not where it belongs.
    """
    if job_id(message) != found or queue_of(message) != queue:
        raise BadMessage(
            f"job {found!r} in {queue!r} carries the message of {job_id(message)!r} in {queue_of(message)!r}"
        )


def pack_traceback(text: str) -> str:
    """A traceback as RQ keeps it in a job's results."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack_traceback(packed: bytes) -> str:
    """The traceback in a job's result."""
    return zlib.decompress(base64.b64decode(packed)).decode()
