"""Token parts and the batch list, written in plan order.

Invariant: a batch is a slice of one part, and the bytes of parts and list follow from the samples and the plan alone;
so a part written twice is the same part, and the plan's digest proves it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from hiddenq.contracts import checksum, names
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.storage import ObjectStore
from hiddenq.storage.runfiles import encode_batches, forget_token_parts
from producer.batching import BatchLimits, cut_batches
from producer.order import Keys, iterate_lengths, iterate_samples
from producer.spill import Sample, Spill, needing_room

PART_TOKENS = 8 << 20
"""A part ends with the batch that brings it to so many tokens: some 40 MiB."""
_READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class WrittenPlan:
    """What was written."""

    num_batches: int
    num_padded_tokens: int
    num_parts: int
    digest: str
    """blake2b-128 over the parts and the batch list."""


def write_plan(
    store: ObjectStore,
    spill: Spill,
    chunks: Iterator[Keys],
    limits: BatchLimits,
    scratch: Path,
    progress: Callable[[int], None],
) -> WrittenPlan:
    """Write samples in the order of their keys, cut into batches; `progress` hears of samples written so far."""
    digest = hashlib.blake2b(digest_size=16)
    samples: list[Sample] = []
    num_written = num_tokens = num_parts = num_batches = num_padded_tokens = 0
    listed = scratch / "batches.jsonl"

    def end_part() -> None:
        nonlocal num_tokens, num_parts
        data = _encode_part(samples)
        digest.update(data)
        _put(store, names.token_part_key(num_parts), data, scratch)
        samples.clear()
        num_tokens, num_parts = 0, num_parts + 1
        progress(num_written)

    forget_token_parts(store)
    to_cut, to_write = itertools.tee(chunks)
    places = iterate_samples(to_write)
    with listed.open("wb") as lines:
        for batch in cut_batches(iterate_lengths(to_cut), limits):
            planned = BatchPlan(
                batch_id=names.batch_id(num_batches),
                token_part=num_parts,
                first_row=len(samples),
                num_samples=batch.num_samples,
                num_tokens=batch.num_tokens,
                padded_length=batch.padded_length,
            )
            with needing_room(scratch):
                lines.write(encode_batches([planned]))
            samples += (spill.read(place, length) for place, length in itertools.islice(places, batch.num_samples))
            num_batches += 1
            num_padded_tokens += batch.num_samples * batch.padded_length
            num_written += batch.num_samples
            num_tokens += batch.num_tokens
            if num_tokens >= PART_TOKENS:
                end_part()
        if samples:
            end_part()
        with needing_room(scratch):
            lines.flush()
    with listed.open("rb") as whole:
        while piece := whole.read(_READ_BYTES):
            digest.update(piece)
    put_file(store, names.BATCHES, listed)
    return WrittenPlan(
        num_batches=num_batches, num_padded_tokens=num_padded_tokens, num_parts=num_parts, digest=digest.hexdigest()
    )


def remove_other_parts(store: ObjectStore, num_parts: int) -> None:
    """Remove parts that a producer which was interrupted left behind the last one."""
    kept = {names.token_part_key(number) for number in range(num_parts)} | {names.BATCHES}
    for info in list(store.list(names.TOKENS_PREFIX)):
        if info.key not in kept:
            store.delete(info.key)


def put_file(store: ObjectStore, key: str, path: Path) -> None:
    """Store a whole file, proved by its checksum."""
    store.put_file(key, path, checksum=checksum.of_file(path), num_bytes=path.stat().st_size)


def _encode_part(samples: list[Sample]) -> bytes:
    lengths = [len(sample.input_ids) for sample in samples]
    return save(
        {
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "sample_ids": np.array([sample.sample_id for sample in samples], np.int64),
            "input_ids": np.concatenate([sample.input_ids for sample in samples]),
            "loss_mask": np.concatenate([sample.loss_mask for sample in samples]),
        }
    )


def _put(store: ObjectStore, key: str, data: bytes, scratch: Path) -> None:
    path = scratch / "part.safetensors"
    with needing_room(scratch):
        path.write_bytes(data)
    try:
        put_file(store, key, path)
    finally:
        path.unlink(missing_ok=True)
