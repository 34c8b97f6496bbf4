"""Open a run and read single samples from it.

Invariant: a `Run` holds the index and no open connection that another process could share: store and files are opened
anew in each process that uses it, so it can be pickled, forked into DataLoader workers and used from many threads.
A sample costs one ranged read of exactly its bytes; what is damaged in them shows only in a run that is `checked`,
since checksums are over whole shards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, ObjectMissing, RunMismatch, UsageError
from hiddenq.contracts.manifest import BatchPlan, Manifest
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.reader.decode import Sample, decode_sample
from hiddenq.reader.files import LocalFiles, ProcessFiles
from hiddenq.reader.index import Integers, SampleIndex, load_index, scan_shards
from hiddenq.reader.patience import WAIT_SECONDS
from hiddenq.reader.target_head import HeadWeights
from hiddenq.reader.whole import ShardChecks
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from hiddenq.storage.runfiles import load_batches, load_manifest, load_run_json, read_token_rows

_TOKEN_BYTES = 16
"""A token's id and mask, int64 each: the last two tensors of a sample."""


def open_run(
    uri: str | Path,
    settings: StoreSettings | None = None,
    *,
    threads: int = 16,
    local_files: LocalFiles = "auto",
    wait_seconds: float = WAIT_SECONDS,
) -> Run:
    """Open the run at a folder or `s3://bucket/prefix`, finished or still going.

    A finished run is described by its index. Of one that is still going the shards' headers are read, `threads` at a
    time; it then holds the samples that were there at that moment.

    Args:
        local_files: how a local run's shards are read: `read` into new memory by system calls; `map` gives views of the
            page cache without a copy (changes to them are private; clone what you save or send to another process);
            `auto` also copies out of a map, but only on a local disk: on a network disk a map may kill the process.
        wait_seconds: how long a sample's read waits for a bucket that does not answer.

    Raises:
        StoreRefused: the location can't be read.
        UsageError: there is no run, or an argument can't be.
        UnknownSchema: the run was written by a newer hiddenq.
        DamagedShard: the index or a header contradicts `run.json`; `hiddenq verify` says more.
    """
    if local_files not in get_args(LocalFiles):
        raise UsageError(f"local_files: {local_files!r} is none of {', '.join(get_args(LocalFiles))}")
    if threads < 1:
        raise UsageError(f"threads {threads}: at least 1")
    settings = settings or StoreSettings()
    store = open_store(uri, settings)
    config = load_config(store)
    manifest, index_info = load_manifest(store), store.stat(names.INDEX)
    if manifest is not None and manifest.run != config.run:
        raise RunMismatch(f"{store.uri}: manifest.json is of run {manifest.run}, run.json of {config.run}")
    if manifest is not None and index_info is not None:
        index = load_index(store, index_info, config)
    else:
        index = scan_shards(store, config, load_batches(store), threads=threads)
    return Run(store.uri, settings, config, index, manifest, local_files=local_files, wait_seconds=wait_seconds)


def load_config(store: ObjectStore) -> RunConfig:
    """`run.json` of a location.

    Raises:
        StoreRefused: the location can't be read.
        UsageError: there is no run.
    """
    store.check_readable()
    config = load_run_json(store)
    if config is None:
        raise UsageError(f"{store.uri}: no run there (run.json is missing); is the location right?")
    return config


class Run:
    """One run, sample by sample: `run[sample_id]`."""

    def __init__(
        self,
        uri: str,
        settings: StoreSettings,
        config: RunConfig,
        index: SampleIndex,
        manifest: Manifest | None,
        *,
        local_files: LocalFiles = "auto",
        wait_seconds: float = 0.0,
        checks: ShardChecks | None = None,
    ) -> None:
        self.uri = uri
        self.config = config
        self.manifest = manifest
        """None while the run is going."""
        self.index = index
        self.shard_format = ShardFormat.of_run(config)
        self._local_files: LocalFiles = local_files
        self._settings = settings
        self._wait_seconds = wait_seconds
        self._local = ProcessFiles(local_files, wait_seconds)
        self._checks = checks

    def checked(self) -> Run:
        """This run, with each shard held against its recorded checksum before the first sample of it is read.

        Costs reading every shard in question whole, once in each process that reads from it (a DataLoader worker is
        one); `hiddenq verify` once before training costs less. Of a run that is still going a shard is held against
        what the store says of it, if that says anything.
        """
        return Run(
            self.uri,
            self._settings,
            self.config,
            self.index,
            self.manifest,
            local_files=self._local_files,
            wait_seconds=self._wait_seconds,
            checks=self._checks or ShardChecks(self._wait_seconds),
        )

    def __len__(self) -> int:
        return len(self.index.sample_ids)

    def __contains__(self, sample_id: object) -> bool:
        try:
            return isinstance(sample_id, (int, np.integer)) and self.index.position(int(sample_id)) >= 0
        except KeyError:
            return False

    def __iter__(self) -> Iterator[int]:
        return iter(self.index.sample_ids.tolist())

    def __getitem__(self, sample_id: int) -> Sample:
        return self.read(sample_id)

    @property
    def sample_ids(self) -> Integers:
        """int64 [N], ascending: row numbers of the input dataset."""
        return self.index.sample_ids

    @property
    def lengths(self) -> Integers:
        """int64 [N]: tokens of each sample, in the order of `sample_ids`."""
        return self.index.num_tokens

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers along K, in the order asked: id L is the output of decoder layer L."""
        return self.config.target_layer_ids

    @property
    def store(self) -> ObjectStore:
        """This process's store."""
        return self._local.store(self.uri, self._settings)

    @property
    def num_not_there(self) -> int:
        """Samples of the plan that the store did not hold when the run was opened."""
        return max(0, self.config.num_samples - len(self))

    @property
    def is_local(self) -> bool:
        """Whether the shards lie on a local disk, so that the kernel can read ahead."""
        return self._local.are_local(self.store)

    def read(self, sample_id: int, dtype: torch.dtype | None = None) -> Sample:
        """Read one sample by one byte range, its states in `dtype`.

        Its bytes are believed unless the run is `checked`: run `hiddenq verify` before you train.

        Args:
            dtype: None for the stored dtype; fp8 then comes out in the model's.

        Raises:
            KeyError: the run has no such sample (it was rejected, or isn't there yet).
            DamagedShard: the store holds fewer bytes than the index says; or a `checked` run's shard is damaged.
        """
        return decode_sample(self.read_bytes(sample_id), self.shard_format, sample_id, dtype)

    def read_tokens(self, sample_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, loss_mask) of a sample, int64 [S] each, without its states: they are the end of its range."""
        at = self._position(sample_id)
        num_tokens, num_bytes = int(self.index.num_tokens[at]), int(self.index.num_bytes[at])
        ids, mask = self._range(at, num_bytes - num_tokens * _TOKEN_BYTES, num_bytes).view(torch.int64).chunk(2)
        return ids, mask

    def read_bytes(self, sample_id: int) -> torch.Tensor:
        """The sample's byte range as it is stored, uint8 [num_bytes]."""
        at = self._position(sample_id)
        return self._range(at, 0, int(self.index.num_bytes[at]))

    def fetch(self, sample_id: int) -> None:
        """Have the kernel read a local sample into its page cache; nothing is returned or held."""
        at = self._position(sample_id)
        key = self.index.shard_keys[self.index.shard[at]]
        self._local.fetch(self.store, key, int(self.index.byte_offset[at]), int(self.index.num_bytes[at]))

    def _position(self, sample_id: int) -> int:
        try:
            return self.index.position(sample_id)
        except KeyError:
            missing = f", {self.num_not_there} not there yet" if self.num_not_there else ""
            raise KeyError(
                f"sample {sample_id} is not in run {self.config.run} ({len(self)} samples{missing})"
            ) from None

    def _range(self, at: int, begin: int, end: int) -> torch.Tensor:
        """Bytes `begin` to `end` of the sample at a position of the index."""
        shard = int(self.index.shard[at])
        key, offset = self.index.shard_keys[shard], int(self.index.byte_offset[at]) + begin
        try:
            if self._checks is not None:
                self._checks.check(self.store, key, self.index.checksums[shard])
            buffer = self._local.read(self.store, key, offset, end - begin)
        except ObjectMissing as error:
            if self.manifest is not None:
                raise
            raise ObjectMissing(f"{error}; the run was going on when it was opened: open it again") from error
        if len(buffer) != end - begin:
            raise DamagedShard(
                f"{key}: sample {self.sample_ids[at]}: expected {end - begin} bytes at {offset}, found {len(buffer)}; "
                f"run `hiddenq verify --out {self.uri}`"
            )
        return buffer

    def num_supervised(self) -> Integers:
        """int64 [N]: supervised tokens of each sample; read from the token parts while the run is going."""
        if self.index.num_supervised is not None:
            return self.index.num_supervised
        counts: dict[int, int] = {}
        for batch in load_batches(self.store):
            rows = read_token_rows(self.store, batch.token_part, batch.first_row, batch.num_samples)
            counts.update((row.sample_id, int(row.loss_mask.sum())) for row in rows)
        return np.array([counts[sample_id] for sample_id in self.index.sample_ids.tolist()], np.int64)

    @functools.cached_property
    def target_head(self) -> HeadWeights:
        """Norm, lm_head and embedding of the target: `run.target_head.logits(sample.final_hidden_state)`.

        Raises:
            UsageError: the run was made without `--target-head`.
        """
        return HeadWeights(self.store, self.config)

    def batches(self) -> list[BatchPlan]:
        """The batches of the plan, in plan order."""
        return load_batches(self.store)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_local", "target_head")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = ProcessFiles(self._local_files, self._wait_seconds)

    def __repr__(self) -> str:
        state = "finished" if self.manifest else "still going"
        return f"<Run {self.config.run} at {self.uri}: {len(self)} samples, layers {self.target_layer_ids}, {state}>"
