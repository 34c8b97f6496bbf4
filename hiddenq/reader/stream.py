"""A run as a stream of samples in a seeded order, read ahead.

Invariant: the order of an epoch is one permutation of all samples, a function of seed and epoch alone; rank r of R
takes every R-th of it from the r-th on, and worker w of W every W-th of those. So the parts of all ranks and workers
are disjoint and together complete, and a position within a part is all that is needed to go on from there. At most
`prefetch_bytes` of samples (or a single one) are read ahead, whatever the length of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hiddenq.contracts.errors import RunMismatch
from hiddenq.reader.decode import Sample
from hiddenq.reader.index import Integers
from hiddenq.reader.run import Run, open_run


class HiddenStatesStream(IterableDataset[Sample]):
    """Iterable dataset over a run: samples in random order, split over ranks and DataLoader workers."""

    def __init__(
        self,
        run: Run | str | Path,
        *,
        seed: int | None = 0,
        rank: int | None = None,
        world_size: int | None = None,
        equal: bool = False,
        dtype: torch.dtype | None = None,
        threads: int = 8,
        prefetch_bytes: int = 256 << 20,
    ) -> None:
        """Take a run, or its location.

        Args:
            seed: of the order; None for ascending sample ids.
            rank, world_size: this process's part; None for those of `torch.distributed` (one part if it is not up).
            equal: leave out up to `world_size - 1` samples of each epoch so that all ranks get as many.
            dtype: of the states; None for the stored one (the model's for fp8).
            threads: ranged reads at a time.
            prefetch_bytes: stored bytes that are read ahead at most, per DataLoader worker.
        """
        self.run = run if isinstance(run, Run) else open_run(run)
        up = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = rank if rank is not None else (torch.distributed.get_rank() if up else 0)
        self.world_size = world_size if world_size is not None else (torch.distributed.get_world_size() if up else 1)
        self.seed = seed
        self.epoch = 0
        self._equal = equal
        self._dtype = dtype
        self._threads = threads
        self._prefetch_bytes = prefetch_bytes
        self._position = 0
        self._resumed: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it before each epoch, with the same number on every rank."""
        self.epoch = epoch
        self._position = 0

    def order(self) -> Integers:
        """int64: sample ids of this epoch that this rank gets, in order, over all of its workers."""
        ids = self.run.sample_ids
        if self.seed is not None:
            ids = np.random.default_rng([self.seed, self.epoch]).permutation(ids)
        if self._equal:
            ids = ids[: len(ids) // self.world_size * self.world_size]
        part: Integers = ids[self.rank :: self.world_size]
        return part

    def __len__(self) -> int:
        """Samples of this rank's part of an epoch."""
        return len(self.order())

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self._resumed is not None:
            self._check_split(self._resumed, worker, workers)
            self._resumed = None
        ids = self.order()[worker::workers][self._position :].tolist()
        sizes = self.run.index.num_bytes[np.searchsorted(self.run.sample_ids, ids)]
        pending: deque[Future[Sample]] = deque()
        ahead_bytes = asked = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="stream") as pool:
            try:
                for taken in range(len(ids)):
                    while asked < len(ids) and (not pending or ahead_bytes + sizes[asked] <= self._prefetch_bytes):
                        pending.append(pool.submit(self.run.read, ids[asked], self._dtype))
                        ahead_bytes += int(sizes[asked])
                        asked += 1
                    sample = pending.popleft().result()
                    ahead_bytes -= int(sizes[taken])
                    self._position += 1
                    yield sample
            finally:
                for future in pending:
                    future.cancel()
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Where this worker's part of the stream is, for `load_state_dict` of a stream that is split the same way.

        Taken in the process that iterates: without DataLoader workers, or by a loader that asks its workers
        (torchdata's StatefulDataLoader does).
        """
        info = get_worker_info()
        return {
            **self._split(*((info.id, info.num_workers) if info else (0, 1))),
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; whether it fits this split is checked when iteration starts.

        Raises:
            RunMismatch: it is of another run.
        """
        if state["run"] != self.run.config.run or state["num_samples"] != len(self.run):
            raise RunMismatch(
                f"state of run {state['run']} with {state['num_samples']} samples; this is {self.run.config.run} "
                f"with {len(self.run)}"
            )
        self.seed, self.epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._resumed = state

    def _split(self, worker: int, workers: int) -> dict[str, Any]:
        return {
            "run": self.run.config.run,
            "num_samples": len(self.run),
            "rank": self.rank,
            "world_size": self.world_size,
            "equal": self._equal,
            "worker": worker,
            "workers": workers,
        }

    def _check_split(self, state: dict[str, Any], worker: int, workers: int) -> None:
        for name, value in self._split(worker, workers).items():
            if state[name] != value:
                raise RunMismatch(f"state of a stream with {name} {state[name]}, this one has {value}: split it alike")
