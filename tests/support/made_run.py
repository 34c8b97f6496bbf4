"""A complete, correct run in a folder, made from the contracts alone, without any stage.

Invariant: what lies there is what the stages would have left: token parts, batch list, `run.json`, shards with their
checksums, the index, and the manifest last. So a test of the reader needs no GPU worker, and a fault planted in the
folder is the only fault in it.

Shape legend: S tokens of a sample, K target layers, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save

from hiddenq.contracts import checksum as crc
from hiddenq.contracts import names
from hiddenq.contracts.layers import LAYER_CONVENTION
from hiddenq.contracts.manifest import BatchPlan, Manifest, Rejected
from hiddenq.contracts.run import (
    DataFile,
    DatasetIdentity,
    Dtype,
    ModelIdentity,
    RunConfig,
    StorageDtype,
    TokenizerIdentity,
)
from hiddenq.contracts.shard import ShardFormat, ShardLayout, layout_shard
from hiddenq.storage.runfiles import encode_batches

States = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(sample_id, input_ids [S]) → float32 hidden [S, K, H], final [S, H]."""

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FP8_MAX = 448.0


@dataclass
class MadeSample:
    """What was put into the run for one sample."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor
    """float32 [S, K, H]"""
    final_hidden_state: torch.Tensor
    """float32 [S, H]"""


@dataclass
class MadeRun:
    """A run in a folder and what is in it."""

    folder: Path
    config: RunConfig
    batches: list[BatchPlan]
    samples: dict[int, MadeSample]
    sample_ids: list[list[int]]
    """Sample ids by batch, in plan order."""
    layouts: dict[str, ShardLayout] = field(default_factory=dict)
    """By key of the shard."""
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shard_keys(self) -> list[str]:
        """Keys of the shards, in plan order."""
        return list(self.layouts)

    def shard_of(self, sample_id: int) -> str:
        """Key of the shard that holds a sample."""
        return next(key for key, ids in zip(self.layouts, self.sample_ids, strict=True) if sample_id in ids)

    def write_shard(self, key: str) -> None:
        """Write a shard's file anew from `samples`, with the layout it has."""
        ids = self.sample_ids[self.shard_keys.index(key)]
        body = b"".join(_sample_bytes(self.samples[sample_id], self.config) for sample_id in ids)
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.layouts[key].header + body)

    def write_shards(self) -> None:
        """Write every shard anew."""
        for key in self.shard_keys:
            self.write_shard(key)

    def finish(self) -> None:
        """Write the index over the shards as they lie there now, then the manifest."""
        shard_format = ShardFormat.of_run(self.config)
        rows: list[dict[str, Any]] = []
        num_bytes = 0
        for key, ids in zip(self.shard_keys, self.sample_ids, strict=True):
            path = self.folder / key
            num_bytes += path.stat().st_size
            checksum, position = crc.of_file(path), self.layouts[key].data_offset
            for sample_id in ids:
                sample = self.samples[sample_id]
                size = len(sample.input_ids) * shard_format.bytes_per_token
                rows.append(
                    {
                        "sample_id": sample_id,
                        "shard_key": key,
                        "num_tokens": len(sample.input_ids),
                        "num_supervised": int(sample.loss_mask.sum()),
                        "byte_offset": position,
                        "num_bytes": size,
                        "data_offset": self.layouts[key].data_offset,
                        "checksum": checksum,
                    }
                )
                position += size
        write_index(self.folder / names.INDEX, rows)
        config = self.config
        manifest = Manifest(
            run=config.run,
            complete=True,
            created_at="2026-01-02T03:04:05Z",
            num_rows=config.num_rows,
            num_rejected=config.num_rejected,
            num_samples=config.num_samples,
            num_samples_committed=config.num_samples,
            num_tokens=config.num_tokens,
            num_tokens_committed=config.num_tokens,
            num_batches=config.num_batches,
            num_batches_committed=config.num_batches,
            num_bytes=num_bytes,
            index_checksum=crc.of_file(self.folder / names.INDEX),
            plan_digest=config.plan_digest,
            run_json_checksum=crc.of_file(self.folder / names.RUN_JSON),
            dead_letters=(),
            self_checks=(),
        )
        (self.folder / names.MANIFEST).write_text(manifest.to_json())


def write_index(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `index.parquet`, sorted by sample."""
    schema = pa.schema(
        [
            ("sample_id", pa.int64()),
            ("shard_key", pa.string()),
            ("num_tokens", pa.int32()),
            ("num_supervised", pa.int32()),
            ("byte_offset", pa.int64()),
            ("num_bytes", pa.int64()),
            ("data_offset", pa.int64()),
            ("checksum", pa.string()),
        ]
    )
    pq.write_table(pa.Table.from_pylist(sorted(rows, key=lambda row: row["sample_id"]), schema=schema), path)


def make_run(
    folder: Path,
    *,
    run: str = "made",
    num_samples: int = 12,
    samples_per_batch: int = 3,
    batches_per_part: int = 2,
    min_length: int = 3,
    max_length: int = 24,
    vocab_size: int = 97,
    num_layers: int = 6,
    target_layer_ids: tuple[int, ...] = (1, 3),
    hidden_size: int = 16,
    dtype: Dtype = "bfloat16",
    storage_dtype: StorageDtype | None = None,
    final_hidden_state: bool = True,
    rejected_rows: tuple[int, ...] = (2,),
    token_rows: Sequence[Sequence[int]] | None = None,
    states: States | None = None,
    model: str = "made/model",
    architecture: str = "MadeForCausalLM",
    seed: int = 0,
    num_committed: int | None = None,
) -> MadeRun:
    """Make a run of `num_samples` samples; sample ids step over `rejected_rows`, lengths are random.

    `states` gives each sample's states (random ones by default); `token_rows` its ids. With `num_committed` batches
    only that many shards are there, and neither index nor manifest: a run that is still going.
    """
    random = np.random.default_rng(seed)
    storage_dtype = storage_dtype or dtype
    kept = [row for row in range(num_samples + len(rejected_rows)) if row not in rejected_rows][:num_samples]
    rows = token_rows or [
        random.integers(0, vocab_size, random.integers(min_length, max_length + 1)).tolist() for _ in kept
    ]
    samples: dict[int, MadeSample] = {}
    for sample_id, ids in zip(kept, rows, strict=True):
        input_ids = torch.tensor(ids, dtype=torch.int64)
        loss_mask = torch.zeros_like(input_ids)
        loss_mask[len(ids) // 3 :] = 1
        if states is None:
            generator = torch.Generator().manual_seed(seed * 100_003 + sample_id)
            scale_K1 = torch.arange(1.0, len(target_layer_ids) + 1)[:, None]
            hidden = torch.randn(len(ids), len(target_layer_ids), hidden_size, generator=generator) * scale_K1
            final = torch.randn(len(ids), hidden_size, generator=generator) * (len(target_layer_ids) + 1)
        else:
            hidden, final = states(sample_id, input_ids)
        samples[sample_id] = MadeSample(input_ids, loss_mask, hidden.float(), final.float())

    order = sorted(kept, key=lambda sample_id: -len(samples[sample_id].input_ids))
    batch_ids = [order[first : first + samples_per_batch] for first in range(0, len(order), samples_per_batch)]
    batches, parts = _write_tokens(folder, samples, batch_ids, batches_per_part)
    rejected = b"".join(
        Rejected(row=row, reason="too_long", detail="made so").model_dump_json().encode() + b"\n"
        for row in rejected_rows
    )
    (folder / names.REJECTED).write_bytes(rejected)
    num_tokens = sum(batch.num_tokens for batch in batches)
    config = RunConfig(
        run=run,
        hiddenq_version="0.1.0",
        created_at="2026-01-02T03:04:05Z",
        model=ModelIdentity(
            model=model,
            revision=None,
            config_digest="0" * 32,
            weights_digest="1" * 32,
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_positions=None,
            dtype=dtype,
            quantization=None,
        ),
        dataset=DatasetIdentity(
            files=(DataFile(name="made.jsonl", num_bytes=1, digest="2" * 32),),
            row_schema="input_ids",
            fingerprint="3" * 32,
            limit=None,
        ),
        tokenizer=TokenizerIdentity(digest="", chat_template_digest=""),
        target_layer_ids=target_layer_ids,
        final_hidden_state=final_hidden_state,
        storage_dtype=storage_dtype,
        max_length=max_length,
        length_policy="drop",
        token_budget=max_length * samples_per_batch,
        max_shard_bytes=1 << 30,
        shuffle_seed=None,
        num_rows=len(kept) + len(rejected_rows),
        num_rejected=len(rejected_rows),
        num_samples=len(kept),
        num_tokens=num_tokens,
        num_supervised=sum(int(sample.loss_mask.sum()) for sample in samples.values()),
        num_padded_tokens=sum(batch.num_samples * batch.padded_length for batch in batches),
        num_batches=len(batches),
        num_token_parts=parts,
        plan_digest=_plan_digest(folder),
    )
    (folder / names.RUN_JSON).write_text(config.model_dump_json(indent=2))

    made = MadeRun(folder, config, batches, samples, batch_ids)
    shard_format = ShardFormat.of_run(config)
    for batch, ids in zip(batches[:num_committed], batch_ids, strict=False):
        execution = hashlib.blake2b(f"{run}/{seed}/{batch.batch_id}".encode(), digest_size=4).hexdigest()
        key = names.shard_key(batch.batch_id, execution)
        made.metadata[key] = {
            "schema_version": 1,
            "run": run,
            "batch_id": batch.batch_id,
            "execution": execution,
            "config_digest": config.model.config_digest,
            "layer_convention": LAYER_CONVENTION,
            "target_layer_ids": list(target_layer_ids),
            "model_dtype": dtype,
            "storage_dtype": storage_dtype,
        }
        made.layouts[key] = layout_shard(
            shard_format, [(sample_id, len(samples[sample_id].input_ids)) for sample_id in ids], made.metadata[key]
        )
    made.sample_ids = batch_ids[: len(made.layouts)]
    made.write_shards()
    if num_committed is None:
        made.finish()
    return made


def states_of_model(folder: Path, target_layer_ids: tuple[int, ...], **load: Any) -> States:
    """States of a model on disk (`load`: how to load it), by hooks on its layers, sample by sample in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **load).eval()
    layers = model.get_decoder().layers

    def states(_sample_id: int, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs: list[torch.Tensor] = []

        def record(_module: Any, _args: Any, output: Any) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else output)[0])

        handles = [layer.register_forward_hook(record) for layer in layers]
        with torch.no_grad():
            model.get_decoder()(input_ids[None], use_cache=False)
        for handle in handles:
            handle.remove()
        return torch.stack([outputs[layer] for layer in target_layer_ids], dim=1), outputs[-1]

    return states


def _write_tokens(
    folder: Path, samples: dict[int, MadeSample], batch_ids: list[list[int]], batches_per_part: int
) -> tuple[list[BatchPlan], int]:
    batches: list[BatchPlan] = []
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    for part, first in enumerate(range(0, len(batch_ids), batches_per_part)):
        ids_of_part: list[int] = []
        for ids in batch_ids[first : first + batches_per_part]:
            lengths = [len(samples[sample_id].input_ids) for sample_id in ids]
            batches.append(
                BatchPlan(
                    batch_id=names.batch_id(len(batches)),
                    token_part=part,
                    first_row=len(ids_of_part),
                    num_samples=len(ids),
                    num_tokens=sum(lengths),
                    padded_length=max(lengths),
                )
            )
            ids_of_part += ids
        offsets = np.cumsum([0, *(len(samples[sample_id].input_ids) for sample_id in ids_of_part)])
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "offsets": offsets.astype(np.int64),
            "sample_ids": np.array(ids_of_part, np.int64),
            "input_ids": torch.cat([samples[i].input_ids for i in ids_of_part]).numpy().astype(np.int32),
            "loss_mask": torch.cat([samples[i].loss_mask for i in ids_of_part]).numpy().astype(np.uint8),
        }
        (folder / names.token_part_key(part)).write_bytes(save(tensors))
    (folder / names.BATCHES).write_bytes(encode_batches(batches))
    return batches, batches[-1].token_part + 1


def _plan_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in [*sorted((folder / names.TOKENS_PREFIX).glob("part-*")), folder / names.BATCHES]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sample_bytes(sample: MadeSample, config: RunConfig) -> bytes:
    storage, model_dtype = TORCH_DTYPES[config.storage_dtype], TORCH_DTYPES[config.model.dtype]
    parts: list[torch.Tensor] = []
    if config.target_layer_ids:
        hidden = sample.hidden_states
        if config.storage_dtype == "float8_e4m3fn":
            scale_SK1 = hidden.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
            parts += [(hidden / scale_SK1).to(storage), scale_SK1]
        else:
            parts.append(hidden.to(storage))
    if config.final_hidden_state:
        parts.append(sample.final_hidden_state.to(model_dtype if config.storage_dtype == "float8_e4m3fn" else storage))
    parts += [sample.input_ids, sample.loss_mask]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
