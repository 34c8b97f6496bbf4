"""Samples in a given order, read before they are asked for.

Invariant: what comes out is `run.read` of each id in turn, whatever was read ahead, in how many threads, and whether a
read failed on the way: what is wrong with a sample comes at that sample, after all before it. What is read ahead is
bounded in bytes, however long the order is.

Where reading waits (for a bucket, a network disk) or computes (fp8, another dtype), threads read. A local disk's files
need none: the kernel reads ahead into its page cache, and whoever asks copies out of it, at the speed of memory. There
threads only added the price of handing over, up to half of the throughput on a machine that had other work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from hiddenq.contracts.errors import PermanentError
from hiddenq.reader.decode import Sample
from hiddenq.reader.index import Integers
from hiddenq.reader.patience import patient_threads
from hiddenq.reader.run import Run

GROUP_BYTES = 1 << 20
"""Samples that follow one another are read in one turn of a thread up to this size: a turn costs as much as 0.2 MB."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Samples that are read in one turn."""

    sample_ids: tuple[int, ...]
    num_bytes: int


def read_ahead(
    run: Run, sample_ids: Integers, *, dtype: torch.dtype | None, threads: int, prefetch_bytes: int
) -> Iterator[Sample]:
    """The samples of a run in the order of `sample_ids`.

    Args:
        dtype: of the states; None for the stored one (the model's for fp8).
        threads: groups of samples read at a time.
        prefetch_bytes: stored bytes that are read ahead at most, but always one group.
    """
    if run.is_local and dtype is None and not run.shard_format.has_scales:
        yield from _from_page_cache(run, sample_ids, prefetch_bytes)
        return

    def read(group: _Group) -> list[Sample]:
        return [run.read(sample_id, dtype) for sample_id in group.sample_ids]

    pending: deque[tuple[_Group, Future[list[Sample]]]] = deque()
    ahead_bytes = 0
    groups = _groups(run, sample_ids)
    upcoming = next(groups, None)
    with patient_threads(threads, "ahead") as pool:
        while pending or upcoming:
            while upcoming and (not pending or ahead_bytes + upcoming.num_bytes <= prefetch_bytes):
                pending.append((upcoming, pool.submit(read, upcoming)))
                ahead_bytes += upcoming.num_bytes
                upcoming = next(groups, None)
            group, future = pending.popleft()
            ahead_bytes -= group.num_bytes
            yield from _result(future) or (run.read(sample_id, dtype) for sample_id in group.sample_ids)


def _result(future: Future[list[Sample]]) -> list[Sample] | None:
    """What a thread read; None if it could not or has not begun: the samples are then read here, one by one."""
    try:
        return None if future.cancel() else future.result()
    except PermanentError:
        return None


def _from_page_cache(run: Run, sample_ids: Integers, prefetch_bytes: int) -> Iterator[Sample]:
    sizes = _sizes(run, sample_ids)
    asked = ahead_bytes = 0
    for taken, sample_id in enumerate(map(int, sample_ids)):
        while asked < len(sizes) and (asked <= taken or ahead_bytes + sizes[asked] <= prefetch_bytes):
            run.fetch(int(sample_ids[asked]))
            ahead_bytes += int(sizes[asked])
            asked += 1
        ahead_bytes -= int(sizes[taken])
        yield run.read(sample_id)


def _sizes(run: Run, sample_ids: Integers) -> Integers:
    sizes: Integers = run.index.num_bytes[np.searchsorted(run.sample_ids, sample_ids)]
    return sizes


def _groups(run: Run, sample_ids: Integers) -> Iterator[_Group]:
    group: list[int] = []
    num_bytes = 0
    for sample_id, size in zip(map(int, sample_ids), map(int, _sizes(run, sample_ids)), strict=True):
        if group and num_bytes + size > GROUP_BYTES:
            yield _Group(sample_ids=tuple(group), num_bytes=num_bytes)
            group, num_bytes = [], 0
        group.append(sample_id)
        num_bytes += size
    if group:
        yield _Group(sample_ids=tuple(group), num_bytes=num_bytes)
