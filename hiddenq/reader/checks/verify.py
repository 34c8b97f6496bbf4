"""The order of a verification.

Invariant: of every planned batch either the shard was read to its end and compared, or a finding names it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, HiddenqError, RunMismatch, UnknownSchema
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.wording import counted
from hiddenq.model_files import check_here
from hiddenq.reader.budget import ByteBudget
from hiddenq.reader.checks import norms
from hiddenq.reader.checks.plan import (
    check_batches,
    check_head,
    check_manifest,
    check_rows,
    check_totals,
    choose_shards,
)
from hiddenq.reader.checks.report import Findings, Recomputed, VerifyReport
from hiddenq.reader.checks.shard import ShardOutcome, check_shard
from hiddenq.reader.index import SampleIndex
from hiddenq.reader.patience import patient_threads
from hiddenq.reader.run import load_config, open_run
from hiddenq.storage import ObjectInfo, ObjectStore, StoreSettings, open_store
from hiddenq.storage.runfiles import TokenRow, read_token_rows

MAX_HELD_BYTES = 1 << 30

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""


def verify(
    uri: str | Path,
    settings: StoreSettings | None = None,
    *,
    recompute: int = 0,
    deep: bool = False,
    threads: int = 8,
    model: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a run against its plan, byte by byte; nothing is written.

    Args:
        recompute: so many random samples are computed from the model again and compared.
        deep: also compare samples with each other: layers in another order, states that stand under two ids.
        threads: shards read at a time; together they hold 1 GiB at most, or one larger sample.
        model: where the model lies here, if not where `run.json` says.
        device: torch device of the recomputation.
        seed: of the choice of samples to recompute; None for another one each time.

    Raises:
        StoreRefused: the location can't be read.
        UsageError: there is no run.
        ModelError: samples are to be recomputed, and the model is not here or not the run's.
    """
    started = time.monotonic()
    settings = settings or StoreSettings()
    store = open_store(uri, settings)
    findings = Findings()
    try:
        config = load_config(store)
    except (RunMismatch, UnknownSchema) as error:
        findings.add("run_json", names.RUN_JSON, str(error))
        return VerifyReport(uri=store.uri, run="?", findings=tuple(findings.kept), num_findings=findings.counts)
    if recompute:
        recorded = model is None and config.model.revision is None  # a folder's, maybe relative; the hub has revisions
        check_here(model or config.model.model, was_folder=recorded)  # before hours of reading
    sweep = _Sweep(store, config, findings, deep=deep, progress=progress)
    outcomes = sweep.run(threads)
    if deep:
        norms.check_norms(outcomes, config, findings)
        norms.check_repeats(outcomes, findings)
    recomputed = _recompute(uri, settings, recompute, model, device, seed, findings) if recompute else None
    return VerifyReport(
        uri=store.uri,
        run=config.run,
        findings=tuple(findings.kept),
        num_findings=findings.counts,
        foreign_objects=tuple(findings.foreign),
        num_foreign_objects=findings.num_foreign,
        num_samples=sum(outcome.num_samples for outcome in outcomes),
        num_tokens=sum(outcome.num_tokens for outcome in outcomes),
        num_shards=len(outcomes),
        num_bytes=sum(outcome.num_bytes for outcome in outcomes),
        seconds=time.monotonic() - started,
        recomputed=recomputed,
    )


_BatchOutcome = tuple[list[int], int, ShardOutcome | None]
"""Sample ids, supervised tokens, and what the batch's shard showed (None: it is not there)."""


class _Sweep:
    """One pass over the objects of a location."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        findings: Findings,
        *,
        deep: bool,
        progress: Progress | None,
    ) -> None:
        self.store, self.config, self.findings, self.deep = store, config, findings, deep
        self.objects = {info.key: info for info in store.list()}
        self.plan = check_batches(store, config, findings)
        self.batches = self.plan.batches if self.plan else []
        self.manifest, self.index = check_manifest(store, config, self.objects, findings)
        self.chosen = choose_shards(
            self.batches, self.index, self.objects, finished=self.manifest is not None, findings=findings
        )
        self._numbers = {key: number for number, key in enumerate(self.index.shard_keys)} if self.index else {}
        self._budget = ByteBudget(MAX_HELD_BYTES)
        self._progress, self._done, self._lock = progress, 0, threading.Lock()
        self._total = sum(self.objects[key].num_bytes for key in self.chosen.values() if key in self.objects)

    def run(self, threads: int) -> list[ShardOutcome]:
        """Check every batch; returns what the shards showed."""
        check_head(self.store, self.config, self.objects, self.findings)
        results = list(self._check_batches(threads))
        kept = np.array([sample_id for sample_ids, _, _ in results for sample_id in sample_ids], np.int64)
        check_rows(self.store, self.config, kept, sum(count for _, count, _ in results), self.findings)
        if self.manifest is None:
            self._unfinished(sum(outcome is not None for _, _, outcome in results))
        if self.index is not None:
            self._check_index_rows(kept)
            if self.manifest is not None:
                sizes = [self.objects[key].num_bytes for key in self.index.shard_keys if key in self.objects]
                check_totals(self.manifest, self.index, sum(sizes), self.findings)
        return [outcome for _, _, outcome in results if outcome is not None]

    def _check_batches(self, threads: int) -> Iterator[_BatchOutcome]:
        """What each batch showed, in plan order; the tokens of a few batches are held at a time."""
        pending: deque[Future[_BatchOutcome]] = deque()
        with patient_threads(threads, "verify") as pool:
            for batches, part in self.plan.parts() if self.plan else ():
                for batch in batches:
                    pending.append(pool.submit(self._check_batch, batch, part))
                    if len(pending) > 2 * threads:
                        yield pending.popleft().result()
            yield from (future.result() for future in pending)

    def _check_batch(self, batch: BatchPlan, part: ObjectStore | None) -> _BatchOutcome:
        rows: list[TokenRow] = []
        if part is not None:
            try:
                rows = read_token_rows(part, batch.token_part, batch.first_row, batch.num_samples)
            except DamagedShard as error:
                self.findings.add("plan", f"batch {batch.batch_id}", str(error))
        outcome = self._check_shard(batch, rows)
        return [row.sample_id for row in rows], sum(int(row.loss_mask.sum()) for row in rows), outcome

    def _check_shard(self, batch: BatchPlan, rows: Sequence[TokenRow]) -> ShardOutcome | None:
        key = self.chosen.get(batch.batch_id)
        info = self.objects.get(key) if key else None
        if key is None or info is None:
            dead = self.manifest is not None and batch.batch_id in self.manifest.dead_letters
            if self.manifest is not None and not dead:
                self.findings.add(
                    "missing_shard", f"batch {batch.batch_id}", f"{key or 'its shard'} is not there ({_samples(rows)})"
                )
            return None
        outcome = check_shard(self.store, info, batch, rows, self.config, self.findings, self._budget, deep=self.deep)
        if outcome.checksum:
            self._compare(info, rows, outcome)
        outcome.offsets.clear()  # a million of them would be most of what is held
        with self._lock:
            self._done += info.num_bytes
            if self._progress:
                self._progress(self._done, self._total)
        return outcome

    def _compare(self, info: ObjectInfo, rows: Sequence[TokenRow], outcome: ShardOutcome) -> None:
        """The shard as read, held against the index, or against what the store says of it."""
        if self.index is None:
            stat = None if info.checksum else self.store.stat(info.key)
            recorded = info.checksum or (stat.checksum if stat else None)
        else:
            number = self._numbers[info.key]
            recorded = self.index.checksums[number]
            if self.index.data_offsets[number] != outcome.data_offset:
                text = f"header of {self.index.data_offsets[number]} bytes by the index, found {outcome.data_offset}"
                self.findings.add("index", info.key, text)
            supervised = {row.sample_id: int(row.loss_mask.sum()) for row in rows}
            for sample_id, (offset, num_tokens) in outcome.offsets.items():
                self._compare_row(self.index, info.key, sample_id, (num_tokens, supervised[sample_id], offset))
        if recorded and recorded != outcome.checksum:
            self.findings.add("damaged_shard", info.key, f"checksum: expected {recorded}, found {outcome.checksum}")

    def _compare_row(self, index: SampleIndex, key: str, sample_id: int, found: tuple[int, int, int]) -> None:
        try:
            at = index.position(sample_id)
        except KeyError:
            self.findings.add("index", f"sample {sample_id}", f"not in the index, though in {key}")
            return
        assert index.num_supervised is not None
        says = (int(index.num_tokens[at]), int(index.num_supervised[at]), int(index.byte_offset[at]))
        if index.shard_keys[index.shard[at]] != key:
            self.findings.add(
                "index", f"sample {sample_id}", f"expected in {key}, found {index.shard_keys[index.shard[at]]}"
            )
        elif says != found:
            text = f"tokens, supervised tokens and offset: {says} by the index, found {found} in {key}"
            self.findings.add("index", f"sample {sample_id}", text)

    def _check_index_rows(self, kept: npt.NDArray[np.int64]) -> None:
        assert self.index is not None
        foreign = np.setdiff1d(self.index.sample_ids, kept)
        if len(foreign):
            self.findings.add("index", names.INDEX, f"{counted(len(foreign), 'sample')} too many, first {foreign[0]}")
        missing = len(np.setdiff1d(kept, self.index.sample_ids))
        if missing and self.manifest and self.manifest.complete:
            self.findings.add("index", names.INDEX, f"it lacks {counted(missing, 'planned sample')}")

    def _unfinished(self, num_shards: int) -> None:
        text = f"{num_shards} of {counted(len(self.batches), 'batch')} there and no manifest.json"
        self.findings.add("unfinished", self.config.run, text)


def _samples(rows: Sequence[TokenRow]) -> str:
    ids = ", ".join(str(row.sample_id) for row in rows[:5])
    return f"samples {ids}{', …' if len(rows) > 5 else ''}"


def _recompute(
    uri: str | Path,
    settings: StoreSettings,
    number: int,
    model: str | None,
    device: str,
    seed: int | None,
    findings: Findings,
) -> Recomputed | None:
    from hiddenq.reader.checks.recompute import recompute_samples  # it imports Transformers

    try:
        run = open_run(uri, settings)
    except HiddenqError as error:
        findings.add("recompute", "run", f"can't be opened for recomputing: {error}")
        return None
    return recompute_samples(run, number, model=model, device=device, seed=seed, findings=findings)
