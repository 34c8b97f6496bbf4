"""Check what describes a run: `run.json`, the plan, the rejects, the manifest, and which objects lie there.

Invariant: the token parts and `run.json` were there before the first shard, so they are what everything else is held
against; index and manifest are held against them, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.errors import BadMessage, DamagedShard, ObjectMissing, RunMismatch, UnknownSchema
from hiddenq.contracts.manifest import BatchPlan, Manifest
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.wording import counted
from hiddenq.reader.checks.report import Findings
from hiddenq.reader.checks.tokens import HeldObject, Plan
from hiddenq.reader.index import SampleIndex, index_limit, read_index
from hiddenq.reader.target_head import HeadWeights
from hiddenq.storage import ObjectInfo, ObjectStore
from hiddenq.storage.runfiles import load_manifest, load_rejected


def check_batches(store: ObjectStore, config: RunConfig, findings: Findings) -> Plan | None:
    """The plan, held against the totals of `run.json`; None if it can't be read."""
    try:
        plan = Plan(store, config, findings)
    except (BadMessage, ObjectMissing) as error:
        findings.add("plan", names.BATCHES, str(error))
        return None
    batches = plan.batches
    totals = {
        "num_batches": (config.num_batches, len(batches)),
        "num_samples": (config.num_samples, sum(batch.num_samples for batch in batches)),
        "num_tokens": (config.num_tokens, sum(batch.num_tokens for batch in batches)),
        "num_token_parts": (config.num_token_parts, len({batch.token_part for batch in batches})),
    }
    for name, (expected, found) in totals.items():
        if expected != found:
            findings.add("plan", names.BATCHES, f"{name}: expected {expected} by run.json, found {found}")
    if len({batch.batch_id for batch in batches}) != len(batches):
        findings.add("plan", names.BATCHES, "a batch id stands there twice")
    return plan


def check_rows(
    store: ObjectStore, config: RunConfig, kept: npt.NDArray[np.int64], num_supervised: int, findings: Findings
) -> None:
    """Every input row is kept once or rejected once."""
    try:
        rejected = np.array([line.row for line in load_rejected(store)], np.int64)
    except (BadMessage, ObjectMissing) as error:
        findings.add("rejected", names.REJECTED, str(error))
        rejected = np.zeros(0, np.int64)
    if len(rejected) != config.num_rejected:
        findings.add(
            "rejected", names.REJECTED, f"expected {config.num_rejected} rows by run.json, found {len(rejected)}"
        )
    rows = np.concatenate([kept, rejected])
    if ((rows < 0) | (rows >= config.num_rows)).any():
        findings.add("plan", names.TOKENS_PREFIX, f"a row number outside 0…{config.num_rows - 1}")
        return
    found, times = np.unique(rows, return_counts=True)  # in memory of what is there, whatever run.json says
    again = found[times > 1]
    if len(again):
        text = f"row {again[0]} stands in the plan or the rejects more than once ({len(again)} such rows)"
        findings.add("plan", names.TOKENS_PREFIX, text)
    if (num_missing := config.num_rows - len(found)) > 0:
        first = int(np.append(found != np.arange(len(found)), True).argmax())
        findings.add("plan", names.TOKENS_PREFIX, f"row {first} is nowhere ({num_missing} such rows)")
    if num_supervised != config.num_supervised:
        findings.add(
            "plan",
            names.TOKENS_PREFIX,
            f"supervised tokens: expected {config.num_supervised} by run.json, found {num_supervised}",
        )


def check_manifest(
    store: ObjectStore, config: RunConfig, objects: dict[str, ObjectInfo], findings: Findings
) -> tuple[Manifest | None, SampleIndex | None]:
    """Manifest and index, held against `run.json`; None for what is missing or can't be used."""
    try:
        manifest = load_manifest(store)
    except (BadMessage, UnknownSchema) as error:
        findings.add("manifest", names.MANIFEST, str(error))
        return None, None
    if manifest is None:
        if names.INDEX in objects:
            findings.add("unfinished", names.INDEX, "there without a manifest.json: an end that was interrupted")
        return None, None
    wanted: dict[str, object] = {
        "run": config.run,
        "plan_digest": config.plan_digest,
        "num_rows": config.num_rows,
        "num_rejected": config.num_rejected,
        "num_samples": config.num_samples,
        "num_tokens": config.num_tokens,
        "num_batches": config.num_batches,
    }
    for name, expected in wanted.items():
        found = getattr(manifest, name)
        if found != expected:
            findings.add("manifest", names.MANIFEST, f"{name}: expected {expected} by run.json, found {found}")
    found = crc.of_bytes(store.get_bytes(names.RUN_JSON))
    if manifest.run_json_checksum and manifest.run_json_checksum != found:
        text = f"checksum: expected {manifest.run_json_checksum} by the manifest, found {found}"
        findings.add("run_json", names.RUN_JSON, text)
    for batch_id in manifest.dead_letters:
        findings.add("dead_letter", f"batch {batch_id}", "set aside after its last attempt: its samples are missing")
    if names.INDEX not in objects:
        findings.add("index", names.INDEX, "missing, though manifest.json is there")
        return manifest, None
    try:
        data = HeldObject(store, names.INDEX, index_limit(config)).data
    except DamagedShard as error:
        findings.add("index", names.INDEX, str(error).removeprefix(f"{names.INDEX}: "))
        return manifest, None
    if (found := crc.of_bytes(data)) != manifest.index_checksum:
        findings.add(
            "index", names.INDEX, f"checksum: expected {manifest.index_checksum} by the manifest, found {found}"
        )
    try:
        return manifest, read_index(data, config)
    except DamagedShard as error:
        findings.add("index", names.INDEX, str(error).removeprefix(f"{names.INDEX}: "))
        return manifest, None


def check_head(store: ObjectStore, config: RunConfig, objects: dict[str, ObjectInfo], findings: Findings) -> None:
    """The target's head, if there is one: of this model, and every byte as it was written."""
    if names.TARGET_HEAD in objects:
        try:
            HeadWeights(store, config).verify()
        except (BadMessage, DamagedShard, RunMismatch, UnknownSchema) as error:
            findings.add("target_head", names.TARGET_HEAD, str(error).removeprefix(f"{names.TARGET_HEAD}: "))


def check_totals(manifest: Manifest, index: SampleIndex, num_bytes: int, findings: Findings) -> None:
    """The manifest's sums, held against index and shards."""
    totals = {
        "num_samples_committed": len(index.sample_ids),
        "num_tokens_committed": int(index.num_tokens.sum()),
        "num_batches_committed": len(index.shard_keys),
        "num_bytes": num_bytes,
    }
    for name, found in totals.items():
        if getattr(manifest, name) != found:
            findings.add("manifest", names.MANIFEST, f"{name}: it says {getattr(manifest, name)}, found {found}")
    if manifest.complete and (manifest.dead_letters or manifest.num_samples_committed != manifest.num_samples):
        findings.add(
            "manifest",
            names.MANIFEST,
            f"says complete with {manifest.num_samples_committed} of {counted(manifest.num_samples, 'sample')} "
            f"and {counted(len(manifest.dead_letters), 'dead letter')}",
        )
    if not manifest.complete and not manifest.dead_letters and len(index.sample_ids) == manifest.num_samples:
        findings.add("manifest", names.MANIFEST, "says that the run is not complete, though every sample is there")


def choose_shards(
    batches: Sequence[BatchPlan],
    index: SampleIndex | None,
    objects: dict[str, ObjectInfo],
    *,
    finished: bool,
    findings: Findings,
) -> dict[str, str]:
    """batch_id → key of its shard: by the index, or else the first that lies there.

    A stray object in a folder of the run's is a finding, since its readers look there; beside them it is only noted.
    """
    planned = {batch.batch_id for batch in batches}
    chosen: dict[str, str] = {}
    for key in index.shard_keys if index else (key for key in objects if key.startswith(names.STATES_PREFIX)):
        parsed = names.parse_shard_name(key)
        if parsed is None or key != names.shard_key(*parsed) or parsed[0] not in planned:
            if index:
                findings.add("index", names.INDEX, f"{key}: no batch of this run")
        elif parsed[0] not in chosen:
            chosen[parsed[0]] = key
        elif index:
            findings.add("index", names.INDEX, f"batch {parsed[0]} in two shards: {chosen[parsed[0]]} and {key}")
    for key in stray_objects(objects, batches, set(chosen.values())):
        parsed = names.parse_shard_name(key)
        if not key.startswith((names.STATES_PREFIX, names.TOKENS_PREFIX)):
            findings.note_foreign(key)
        elif parsed is None or parsed[0] not in planned:
            findings.add("stray_object", key, "no object of this run")
        elif finished:
            findings.add(
                "stray_object", key, f"a second shard of batch {parsed[0]}; the run's is {chosen.get(parsed[0])}"
            )
    return chosen


def stray_objects(objects: Iterable[str], batches: Sequence[BatchPlan], shards: set[str]) -> list[str]:
    """Keys that a run with these batches and shards has no use for."""
    known = {
        names.RUN_JSON,
        names.BATCHES,
        names.REJECTED,
        names.DEAD_LETTERS,
        names.INDEX,
        names.MANIFEST,
        names.TARGET_HEAD,
        names.OWNER,
        *(names.token_part_key(part) for part in {batch.token_part for batch in batches}),
        *shards,
    }
    return [key for key in objects if key not in known]
