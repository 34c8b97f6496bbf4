"""Write an export: piece by piece, several at a time, what is there already not again.

Invariant: an object appears whole or not at all, and `hiddenq_export.json` says `complete` only after all of them; it
stands there from the start with everything the pieces depend on, so an export that was interrupted goes on exactly
where it was, and one with other settings is never mixed into it. Pieces in work hold 2 GiB at most, or a larger one.
Nothing is made of a shard, or with a target head, that is not as recorded; states that stay in the run (`link`) are not
looked at.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import numpy as np

from hiddenq.contracts.base import Versioned
from hiddenq.contracts.errors import BadMessage, DamagedShard, UsageError
from hiddenq.contracts.layers import LAYER_CONVENTION
from hiddenq.reader.budget import ByteBudget
from hiddenq.reader.exports import vocabulary
from hiddenq.reader.exports.dspark import dspark_pieces
from hiddenq.reader.exports.files import file_pieces
from hiddenq.reader.exports.piece import Piece, save
from hiddenq.reader.exports.settings import ExportSettings, check_settings, needs_final, needs_norm
from hiddenq.reader.exports.speculators import speculators_pieces
from hiddenq.reader.index import Integers
from hiddenq.reader.patience import patient_threads, patiently
from hiddenq.reader.remedies import MEND_HEAD
from hiddenq.reader.run import Run, open_run
from hiddenq.storage import ObjectStore, StoreSettings, open_store

STATEMENT = "hiddenq_export.json"
SAMPLE_IDS = "sample_ids.npy"
MAX_HELD_BYTES = 2 << 30

Progress = Callable[[int, int], None]
"""Called with samples written so far and samples in all."""


class ExportStatement(Versioned):
    """`hiddenq_export.json`: what lies beside it and by which conventions."""

    schema_version: int = 1
    run: str
    plan_digest: str
    source: str
    settings: ExportSettings
    num_rows: int
    rows_digest: str
    """blake2b-64 over the sample ids in the order of rows."""
    target_layer_ids: tuple[int, ...]
    layer_convention: str
    consumer_layer_ids: tuple[int, ...]
    """The same layers as the trainer counts them."""
    consumer_layer_convention: str
    final_state: str
    loss_mask: str = "1 where the token itself is supervised; not shifted"
    order: str
    complete: bool
    skipped_sample_ids: tuple[int, ...] = ()
    """Samples that the trainer could not load, left out."""


class ExportReport(Versioned):
    """What an export did."""

    schema_version: int = 1
    dest: str
    num_written: int
    """Objects written now."""
    num_kept: int
    """Objects that were there already."""
    num_bytes: int
    """Bytes written now."""
    num_not_there: int
    """Samples of the run that its store does not hold yet, and so the export neither."""
    statement: ExportStatement


def export(
    run: Run | str | Path,
    settings: ExportSettings,
    dest: str | Path,
    *,
    source_settings: StoreSettings | None = None,
    dest_settings: StoreSettings | None = None,
    threads: int = 8,
    progress: Progress | None = None,
) -> ExportReport:
    """Export a run for a trainer, to a folder or `s3://bucket/prefix`; goes on with one that was interrupted.

    Each shard is read whole and held against its checksum before its samples are read (not with `link`).

    Raises:
        UsageError: the format can't be made of this run, a setting has no effect, or another export lies at `dest`.
        DamagedShard: a shard, or the target's head, is not as recorded; what was made of sound shards stays.
    """
    run = run if isinstance(run, Run) else open_run(run, source_settings)
    check_settings(settings, run)
    store = open_store(dest, dest_settings)
    if f"{store.uri}/".startswith(f"{run.uri}/"):
        raise UsageError(f"--dest {store.uri}: inside the run, where only the run's own objects may lie")
    if not len(run):
        raise UsageError(f"{run.uri}: no sample is there yet")
    if needs_norm(settings):
        _check_head(run)
    if not settings.link:
        run = run.checked()
    order = row_order(run, settings.seed)
    statement = _state(run, settings, order)
    present = _begin(store, statement)
    writer = _Writer(store, present, progress, len(order))
    writer.write(pieces(run, order, settings), threads)
    done = statement.model_copy(update={"complete": True, "skipped_sample_ids": tuple(sorted(writer.skipped))})
    store.put_bytes(STATEMENT, (done.model_dump_json(indent=2) + "\n").encode())
    return ExportReport(
        dest=store.uri,
        num_written=writer.num_written,
        num_kept=writer.num_kept,
        num_bytes=writer.num_bytes,
        num_not_there=run.num_not_there,
        statement=done,
    )


def _check_head(run: Run) -> None:
    try:
        run.target_head.verify()
    except DamagedShard as error:
        raise DamagedShard(f"{error}; {MEND_HEAD}") from error


def row_order(run: Run, seed: int | None) -> Integers:
    """int64: sample ids in the order of rows; ascending, or a permutation by a seed."""
    return run.sample_ids if seed is None else np.random.default_rng(seed).permutation(run.sample_ids)


def pieces(run: Run, order: Integers, settings: ExportSettings) -> Iterator[Piece]:
    """Every object of an export but its statement."""
    if settings.format == "speculators":
        yield from speculators_pieces(run, order, settings)
    elif settings.format == "automodel-dspark":
        yield from dspark_pieces(run, order, settings)
    else:
        yield from file_pieces(run, order, settings)
    yield Piece(key=SAMPLE_IDS, build=lambda: vocabulary.npy(order))
    if settings.format == "speculators" or settings.draft_vocab_size is not None:
        counts = vocabulary.count_tokens(run)
        if settings.format != "modelopt":  # it would take any .pt for a sample
            yield Piece(key="token_freq.pt", build=lambda: vocabulary.token_freq(counts))
    if settings.draft_vocab_size is not None:
        d2t, t2d = vocabulary.draft_maps(counts, settings.draft_vocab_size)
        yield Piece(key="d2t.npy", build=lambda: vocabulary.npy(d2t))
        yield Piece(key="t2d.npy", build=lambda: vocabulary.npy(t2d))
        if settings.format == "specforge":
            yield Piece(key="vocab_mapping.pt", build=lambda: save(vocabulary.as_tensors(d2t, t2d)))


def _state(run: Run, settings: ExportSettings, order: Integers) -> ExportStatement:
    ours = run.target_layer_ids
    theirs, convention = ours, "id L is the output of decoder layer L, as ours"
    if settings.format == "speculators":
        theirs, convention = tuple(layer + 1 for layer in ours), "id k is the residual after k layers, our id plus one"
    final = "after the final norm" if needs_norm(settings) else "before the final norm"
    return ExportStatement(
        run=run.config.run,
        plan_digest=run.config.plan_digest,
        source=run.uri,
        settings=settings,
        num_rows=len(order),
        rows_digest=hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest(),
        target_layer_ids=ours,
        layer_convention=LAYER_CONVENTION,
        consumer_layer_ids=theirs,
        consumer_layer_convention=convention,
        final_state=final if needs_final(settings) else "none",
        order="ascending sample id" if settings.seed is None else f"permutation by seed {settings.seed}",
        complete=False,
    )


def _begin(store: ObjectStore, statement: ExportStatement) -> set[str]:
    """Keys that an earlier start of this very export has written."""
    if store.stat(STATEMENT) is None:
        if foreign := next(iter(store.list()), None) if _exists(store) else None:
            raise UsageError(f"--dest {store.uri}: not empty ({foreign.key} is there); name another place")
        store.put_bytes(STATEMENT, (statement.model_dump_json(indent=2) + "\n").encode())
        return set()
    try:
        found = ExportStatement.parse(store.get_bytes(STATEMENT))
    except BadMessage as error:
        raise UsageError(f"--dest {store.uri}: {STATEMENT} there can't be read; name another place") from error
    for name, asked in statement:
        if name not in ("complete", "skipped_sample_ids", "source") and getattr(found, name) != asked:
            there, asked = (_shown(value, found, statement) for value in (getattr(found, name), asked))
            raise UsageError(
                f"--dest {store.uri}: another export is there ({name}: {there} there, {asked} asked for); "
                "name another place"
            )
    return {info.key for info in store.list()}


def _shown(value: object, found: ExportStatement, asked: ExportStatement) -> str:
    """A statement's value for a person: of settings only those that differ."""
    if not isinstance(value, ExportSettings):
        return str(value)
    differing = [name for name, there in found.settings if getattr(asked.settings, name) != there]
    return ", ".join(f"{name} {getattr(value, name)}" for name in differing)


def _exists(store: ObjectStore) -> bool:
    folder = store.open_local("")
    return folder is None or folder.is_dir()


class _Writer:
    """Builds and writes pieces, a bounded number at a time."""

    def __init__(self, store: ObjectStore, present: set[str], progress: Progress | None, num_samples: int) -> None:
        self._store, self._present, self._progress, self._num_samples = store, present, progress, num_samples
        self._lock = threading.Lock()
        self._budget = ByteBudget(MAX_HELD_BYTES)
        self.num_written = self.num_kept = self.num_bytes = self._num_done = 0
        self.skipped: list[int] = []

    def write(self, pieces: Iterable[Piece], threads: int) -> None:
        """Write all pieces; the first error ends it, what is written stays."""
        pending: set[Future[None]] = set()
        with patient_threads(threads, "export") as pool:
            for piece in pieces:
                if piece.key in self._present:
                    self._count(piece, kept=True)
                    continue
                pending.add(pool.submit(self._write, piece))
                if len(pending) >= 2 * threads:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            for future in pending:
                future.result()

    def _write(self, piece: Piece) -> None:
        with self._budget.taken(piece.num_bytes):
            data = piece.build()
            if data is None:
                with self._lock:
                    self.skipped.extend(piece.sample_ids)
            else:
                patiently()(self._store.put_bytes, piece.key, data)
        self._count(piece, num_bytes=len(data or b""))

    def _count(self, piece: Piece, *, kept: bool = False, num_bytes: int = 0) -> None:
        with self._lock:
            self.num_kept += kept
            self.num_written += bool(num_bytes)
            self.num_bytes += num_bytes
            self._num_done += len(piece.sample_ids)
            if self._progress and piece.sample_ids:
                self._progress(self._num_done, self._num_samples)
