"""From settings to a run that exists in its output location.

Invariant: `run.json` is written last, so a run exists only with all its tokens; and a second start over an existing
run either is that run, and tokenises nothing, or is refused with every field in which it differs.
"""

from __future__ import annotations

import datetime
import re
import secrets
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenq import __version__
from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch
from hiddenq.contracts.run import DatasetIdentity, RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage import ObjectStore
from hiddenq.storage.runfiles import load_run_json, write_run_json
from hiddenq.telemetry import logger
from producer.batching import BatchLimits
from producer.job import Job, Progress, no_progress
from producer.order import SampleOrder
from producer.parts import put_file, remove_other_parts, write_plan
from producer.settings import ProducerSettings
from producer.spill import Spill


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that exists; its batches are listed in its location."""

    config: RunConfig
    reused: bool
    """Whether it was there before."""


def prepare(settings: ProducerSettings, store: ObjectStore, progress: Progress = no_progress) -> Prepared:
    """Make the run exist at the store's location, or find that it does.

    Raises:
        RunMismatch: another run is there; the text names each field that differs, with both values.
        DatasetError: input that can't be read, or more rejects than allowed: nothing is queued or computed.
        UserError: anything else of the user's to mend.
    """
    existing = load_run_json(store)
    with Job(settings, progress) as job:
        if existing is not None:
            _check_same(store, existing, job)
            return Prepared(config=existing, reused=True)
        if next(iter(store.list(names.STATES_PREFIX)), None) is not None:
            raise RunMismatch(f"{store.uri}: it holds shards of a run whose run.json is gone; use another location")
        return _write(job, store, progress)


def _check_same(store: ObjectStore, existing: RunConfig, job: Job) -> None:
    decided = _decided(job, job.dataset())
    if _has_default_length(existing, job):
        del decided["max_length"]  # then it differs only because a budget does, which is named
    requested = existing.model_copy(update=decided)
    differences = existing.differences(requested)
    if differences:
        raise RunMismatch(
            f"{store.uri}: holds another run ({existing.run}): {'; '.join(map(str, differences))}; "
            "use another location, or the settings and inputs of that run"
        )


def _has_default_length(run: RunConfig, job: Job) -> bool:
    """Whether a run's `max_length` only follows from its budgets, and the job asks for none of its own."""
    limits = BatchLimits.of(
        token_budget=run.token_budget,
        max_shard_bytes=run.max_shard_bytes,
        shard=ShardFormat.of_run(run),
        rotary=job.limits.rotary,
    )
    bounds = (run.model.max_positions, limits.max_sample_tokens)
    return job.settings.max_length is None and run.max_length == min(bound for bound in bounds if bound is not None)


def _write(job: Job, store: ObjectStore, progress: Progress) -> Prepared:
    dataset = job.dataset()
    order, reasons, repairs = SampleOrder(job.scratch), Counter[str](), Counter[str]()
    num_rows = 0
    rejected = job.scratch() / "rejected.jsonl"
    spill = Spill(job.scratch())
    try:
        with rejected.open("wb") as lines:
            for block in job.encode():
                num_rows += block.num_rows
                repairs += block.repairs
                reasons.update(reject.reason for reject in block.rejected)
                lines.writelines(reject.model_dump_json().encode() + b"\n" for reject in block.rejected)
                order.append(block)
                spill.append(block)
        spill.flush()
        logger().info(
            "tokenised", num_rows=num_rows, num_samples=len(order), rejected=dict(reasons), repairs=dict(repairs)
        )
        job.check_rejects(num_rows, reasons)
        plan = write_plan(
            store,
            spill,
            order.chunks(job.settings.shuffle_seed, job.limits.rotary),
            job.limits,
            job.scratch(),
            lambda done: progress("writing tokens", done, len(order)),
        )
    finally:
        spill.close()
    put_file(store, names.REJECTED, rejected)
    remove_other_parts(store, plan.num_parts)
    config = RunConfig(
        run=_run_id(job.settings.run or Path(store.uri).name),
        hiddenq_version=__version__,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_rows=num_rows,
        num_rejected=reasons.total(),
        num_samples=len(order),
        num_tokens=order.num_tokens,
        num_supervised=order.num_supervised,
        num_padded_tokens=plan.num_padded_tokens,
        num_batches=plan.num_batches,
        num_token_parts=plan.num_parts,
        plan_digest=plan.digest,
        **_decided(job, dataset),
    )
    _warn_if_short_of_room(store, config.num_tokens * job.shard.bytes_per_token)
    write_run_json(store, config)
    return Prepared(config=config, reused=False)


def _warn_if_short_of_room(store: ObjectStore, needed_bytes: int) -> None:
    """Say so before hours of work if a folder can't hold what they will give."""
    path = store.open_local(names.RUN_JSON)
    if path is None:
        return
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        logger().warning(
            "output_short_of_room",
            location=store.uri,
            free_bytes=free_bytes,
            needed_bytes=needed_bytes,
            next="make room, or store fewer layers or a narrower dtype: hiddenq plan shows the choices",
        )


def _decided(job: Job, dataset: DatasetIdentity) -> dict[str, Any]:
    """The fields of `run.json` that settings and inputs decide before a row is read."""
    settings = job.settings
    return {
        "model": job.target.identity,
        "dataset": dataset,
        "tokenizer": job.tokenizer,
        "target_layer_ids": job.target_layer_ids,
        "final_hidden_state": settings.final_hidden_state,
        "storage_dtype": job.shard.storage_dtype,
        "max_length": job.max_length,
        "length_policy": settings.length_policy,
        "token_budget": settings.token_budget,
        "max_shard_bytes": settings.max_shard_bytes,
        "shuffle_seed": settings.shuffle_seed,
    }


def _run_id(name: str) -> str:
    """A name as a run id: small letters, digits and hyphens, and six random digits that make it one of a kind."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "run"
    return f"{slug}-{secrets.token_hex(3)}"
