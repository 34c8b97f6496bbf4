"""Names of objects, files, queues and jobs.

Invariant: a name is built and taken apart here and nowhere else. An object key holds its batch and its execution,
so two executions never write the same key.
"""

from __future__ import annotations

import re
import secrets

RUN_JSON = "run.json"
BATCHES = "tokens/batches.jsonl"
REJECTED = "rejected.jsonl"
DEAD_LETTERS = "dead_letters.jsonl"
INDEX = "index.parquet"
MANIFEST = "manifest.json"
TARGET_HEAD = "target_head.safetensors"
OWNER = "owner.json"
"""There only while a `run` or a `produce` is going on."""
REDIS_WAIT_VARIABLE = "HIDDENQ_REDIS_WAIT_SECONDS"
"""Environment variable: how long a process that starts waits for a Redis that is away."""
STATES_PREFIX = "states/"
TOKENS_PREFIX = "tokens/"

EXTRACT_JOB = "hiddenq.extract"
UPLOAD_JOB = "hiddenq.upload"
"""The only function names that a job may carry; they are looked up, never imported."""

_SHARD = re.compile(r"^(?P<batch>[0-9]{6,12})-(?P<execution>[0-9a-f]{8})\.safetensors\Z")


def batch_id(number: int) -> str:
    """`123` → `000123`."""
    return f"{number:06d}"


def new_execution() -> str:
    """A random id for one execution: 8 hexadecimal digits."""
    return secrets.token_hex(4)


def token_part_key(number: int) -> str:
    """Object key of a token part."""
    return f"{TOKENS_PREFIX}part-{number:05d}.safetensors"


def shard_file_name(batch: str, execution: str) -> str:
    """File name of a shard in a spool: `000123-9f3c2a71.safetensors`."""
    return f"{batch}-{execution}.safetensors"


def shard_key(batch: str, execution: str) -> str:
    """Object key of a shard: `states/000123-9f3c2a71.safetensors`."""
    return STATES_PREFIX + shard_file_name(batch, execution)


def parse_shard_name(name: str) -> tuple[str, str] | None:
    """Batch and execution of a shard's file name or key; None if it is not one."""
    match = _SHARD.match(name.removeprefix(STATES_PREFIX))
    return (match["batch"], match["execution"]) if match else None


def extract_queue(run: str) -> str:
    """RQ queue of a run's batches."""
    return f"hiddenq-extract-{run}"


def upload_queue(spool_id: str) -> str:
    """RQ queue of a spool's finished shards (all runs)."""
    return f"hiddenq-upload-{spool_id}"


def extract_job_id(run: str, batch: str) -> str:
    """RQ job id of a batch: one for all its executions."""
    return f"{run}-{batch}"


def upload_job_id(run: str, batch: str, execution: str) -> str:
    """RQ job id of one execution's upload."""
    return f"{run}-{batch}-{execution}"
