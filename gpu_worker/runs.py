"""A run as this worker serves it: its configuration, its tokens, and the hooks that read its layers.

Invariant: a worker joins a run only if the `run.json` that lies at the location, as this host sees it, is the one that
Redis holds; so a path that means something else on another machine is refused before a batch is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis
import torch
import transformers

import hiddenq
from gpu_worker.extraction import Extractor
from gpu_worker.inputs import PaddedBatch, check_planned, check_rows, pad_rows
from gpu_worker.selfcheck import length_band
from hiddenq import telemetry
from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch, StoreAway, UsageError, UserError
from hiddenq.contracts.messages import BatchJob
from hiddenq.contracts.run import ModelIdentity, RunConfig
from hiddenq.contracts.shard import ShardFormat, ShardLayout, layout_shard
from hiddenq.delivery import RunRecord, live_runs, load_run, self_checks
from hiddenq.storage import ObjectStore, StoreSettings, open_store
from hiddenq.storage.runfiles import load_run_json, read_token_rows

SHARD_SCHEMA_VERSION = 1
FINAL_STATE = "the last decoder layer's output, before the final norm"


@dataclass(kw_only=True)
class Host:
    """What this worker decided on this host, for the metadata of every shard."""

    device: str
    gpu_name: str
    attention: str
    masked: bool
    compiled: str
    kernels: dict[str, str]
    quantization: str | None

    def metadata(self) -> dict[str, Any]:
        """As it stands in a shard."""
        return {
            "device": self.device,
            "gpu": self.gpu_name,
            "attention": self.attention,
            "masked": self.masked,
            "compiled": self.compiled,
            "kernels": self.kernels,
            "quantization": self.quantization,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hiddenq": hiddenq.__version__,
        }


@dataclass(kw_only=True)
class ServedRun:
    """One run that this worker takes batches of."""

    config: RunConfig
    store: ObjectStore
    shard_format: ShardFormat
    extractor: Extractor
    checked_bands: set[int] = field(default_factory=set)

    def prepare(self, job: BatchJob, *, pinned: bool) -> PaddedBatch:
        """Read a batch's tokens and pad them.

        Raises:
            BadMessage: it is no batch of this run.
            DamagedShard: the token part is not what the run wrote, or does not fit the message.
            StoreAway: the store can't be reached now.
        """
        check_planned(job, self.config)
        rows = read_token_rows(self.store, job.token_part, job.first_row, job.num_samples)
        check_rows(job, rows)
        return pad_rows(
            rows,
            self.shard_format,
            padded_length=job.padded_length,
            vocab_size=self.config.model.vocab_size,
            pinned=pinned,
        )

    def layout(self, job: BatchJob, execution: str, batch: PaddedBatch, host: Host) -> ShardLayout:
        """The shard's header and the places of its tensors: known before the forward pass."""
        config = self.config
        metadata = {
            "schema_version": SHARD_SCHEMA_VERSION,
            "run": config.run,
            "batch_id": job.batch_id,
            "execution": execution,
            "model": config.model.model,
            "config_digest": config.model.config_digest,
            "layer_convention": config.layer_convention,
            "target_layer_ids": list(config.target_layer_ids),
            "final_hidden_state": FINAL_STATE if config.final_hidden_state else None,
            "model_dtype": config.model.dtype,
            "storage_dtype": config.storage_dtype,
            "padded_length": job.padded_length,
            **host.metadata(),
        }
        samples = list(zip(batch.sample_ids, batch.lengths, strict=True))
        return layout_shard(self.shard_format, samples, metadata)

    def needs_check(self, padded_length: int) -> bool:
        """Whether no sample of the length's band was checked yet; from now on one was."""
        band = length_band(padded_length)
        if band in self.checked_bands:
            return False
        self.checked_bands.add(band)
        return True


def choose_run(client: redis.Redis, run: str | None, *, any_run: bool) -> RunRecord | None:
    """The run to serve first, with `any_run` one whose location can be opened; None if there is none yet.

    Raises:
        UsageError: the run asked for does not exist, or several are live and none was named.
        RunMismatch, StoreRefused: no live run can be opened; why the last one can't.
    """
    if run is not None:
        return load_run(client, run)
    live = live_runs(client)
    if not live:
        return None
    if len(live) > 1 and not any_run:
        raise UsageError(f"name a run with --run, or serve --any-run: live runs are {', '.join(r.run for r in live)}")
    for record in live[:-1]:
        try:
            open_location(record)
        except UserError as error:
            telemetry.logger().error("run_refused", run=record.run, error=str(error), next="another run")
            continue
        except StoreAway:
            continue
        return record
    return live[-1]


def same_model(client: redis.Redis, first: RunRecord) -> list[RunRecord]:
    """All live runs that need the model which `first` needs."""
    needed = _decisive(first.config.model)
    return [record for record in live_runs(client) if _decisive(record.config.model) == needed]


def _decisive(model: ModelIdentity) -> ModelIdentity:
    """A model without where it was found."""
    return model.model_copy(update={"model": "", "revision": None})


def open_location(record: RunRecord, *, patience_seconds: float = 0.0) -> ObjectStore:
    """Open a run's location and make sure that it is the run's; a store that is away is waited for so long.

    Raises:
        RunMismatch: the location, as this host sees it, holds no `run.json` or another one.
        StoreRefused: the location can't be read.
        StoreAway: it is away.
    """
    store = open_store(record.location, StoreSettings.model_validate(record.store))
    found = load_run_json(store.patient(patience_seconds) if patience_seconds else store)
    if found is None:
        raise RunMismatch(
            f"{record.location}: no run.json here, though Redis says that run {record.run} lies there; a local path "
            "means another place on another machine: use a shared store"
        )
    if found != record.config:
        differences = record.config.differences(found)
        what = str(differences[0]) if differences else "other names or dates"
        raise RunMismatch(f"{record.location}: run.json here is another run's ({what}); is it the same place?")
    store.anchor(names.RUN_JSON)
    return store


def serve_run(client: redis.Redis, record: RunRecord, store: ObjectStore, extractor: Extractor) -> ServedRun:
    """A run whose batches may be claimed; bands that another worker checked are not checked again."""
    return ServedRun(
        config=record.config,
        store=store,
        shard_format=extractor.shard_format,
        extractor=extractor,
        checked_bands={length_band(check.padded_length) for check in self_checks(client, record.run)},
    )
