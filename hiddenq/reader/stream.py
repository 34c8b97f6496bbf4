"""A run as a stream of samples in a seeded order, read ahead.

Invariant: the order of an epoch is one permutation of all samples, a function of seed and epoch alone; rank r of R
takes every R-th of it from the r-th on, and worker w of W every W-th of those. So the parts of all ranks and workers
are disjoint and together complete, and a position within a part is all that is needed to go on from there. The epoch
lies in memory that a stream shares with its copies in DataLoader workers, so that those of a persistent worker follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hiddenq.contracts.errors import RunMismatch, UsageError
from hiddenq.reader.ahead import read_ahead
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
        """Take a run, or its location. Samples are read by their ranges, which no checksum covers: run `hiddenq verify`
        before you train, or give it `run.checked()`.

        Args:
            seed: of the order; None for ascending sample ids.
            rank, world_size: this process's part; None for those of `torch.distributed` (one part if it is not up).
            equal: leave out up to `world_size - 1` samples of each epoch so that all ranks get as many.
            dtype: of the states; None for the stored one (the model's for fp8).
            threads: ranged reads at a time; a local disk's files are read ahead by the kernel instead.
            prefetch_bytes: stored bytes that are read ahead at most, per DataLoader worker.

        Raises:
            UsageError: a rank outside the world, no thread, or a negative number.
        """
        self.run = run if isinstance(run, Run) else open_run(run)
        up = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = rank if rank is not None else (torch.distributed.get_rank() if up else 0)
        self.world_size = world_size if world_size is not None else (torch.distributed.get_world_size() if up else 1)
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size}: ranks count from 0 to {self.world_size - 1}")
        if threads < 1 or prefetch_bytes < 0 or (seed or 0) < 0:
            raise UsageError(f"threads {threads}, prefetch_bytes {prefetch_bytes}, seed {seed}: at least 1, 0 and 0")
        self.seed = seed
        with torch.inference_mode(False):  # it is written again later, in whatever mode
            self._epoch = torch.zeros((), dtype=torch.int64, device="cpu")
        self._epoch.share_memory_()
        self._equal = equal
        self._dtype = dtype
        self._threads = threads
        self._prefetch_bytes = prefetch_bytes
        self._position = 0
        self._resumed: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch whose order the next iteration has."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it before each epoch, with the same number on every rank.

        The epoch of a state that was just loaded changes nothing: the stream goes on within it.

        Raises:
            UsageError: a negative number.
        """
        if epoch < 0:
            raise UsageError(f"epoch {epoch}: at least 0")
        if epoch != self.epoch:
            self._position, self._resumed = 0, None
        self._epoch.fill_(epoch)

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
        num_samples = len(self.run)
        if self._equal:
            num_samples -= num_samples % self.world_size
        return len(range(self.rank, num_samples, self.world_size))

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self._resumed is None:
            self._position = 0
        else:
            self._check_split(self._resumed, worker, workers)
            self._resumed = None
        samples = read_ahead(
            self.run,
            self.order()[worker::workers][self._position :],
            dtype=self._dtype,
            threads=self._threads,
            prefetch_bytes=self._prefetch_bytes,
        )
        for sample in samples:
            self._position += 1
            yield sample
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
        self.seed, self._position = state["seed"], state["position"]
        self._epoch.fill_(state["epoch"])
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
