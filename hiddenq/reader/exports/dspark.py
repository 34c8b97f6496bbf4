"""NeMo Automodel's DSpark cache: shards of padded samples, a manifest, and the target's weights.

Invariant: sample i of the cache lies in shard i // shard_size at i % shard_size, as their reader computes it, so every
shard but the last is full; every sample is padded with zeros, or cut, to one length. Ids and masks are not shifted; the
last states are after the final norm; the target's weights are float32, without the norm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import torch
from safetensors.torch import save as save_safetensors

from hiddenq.contracts.errors import UsageError
from hiddenq.reader.decode import TORCH_DTYPES
from hiddenq.reader.exports.piece import Piece, read_states
from hiddenq.reader.exports.settings import ExportSettings
from hiddenq.reader.index import Integers
from hiddenq.reader.run import Run

MAX_SHARD_SIZE = 256
MAX_SHARD_BYTES = 512 << 20
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def dspark_pieces(run: Run, order: Integers, settings: ExportSettings) -> Iterator[Piece]:
    """The shards, the weights, and the manifest at the end."""
    seq_length = settings.seq_length or int(run.lengths.max())
    dtype = settings.dtype or (run.config.model.dtype if run.shard_format.has_scales else run.config.storage_dtype)
    width = (len(run.target_layer_ids) + 1) * run.config.model.hidden_size * TORCH_DTYPES[dtype].itemsize
    shard_size = max(1, min(MAX_SHARD_SIZE, len(order), MAX_SHARD_BYTES // (seq_length * width)))
    for shard, first in enumerate(range(0, len(order), shard_size)):
        ids = tuple(order[first : first + shard_size].tolist())
        yield Piece(
            key=f"shard-{shard:06d}.safetensors",
            build=partial(_shard, run, ids, seq_length, settings.model_copy(update={"dtype": dtype})),
            sample_ids=ids,
            num_bytes=2 * len(ids) * seq_length * width,
        )
    yield Piece(key="target_weights.safetensors", build=partial(_weights, run))
    hidden_size = run.config.model.hidden_size
    manifest = {
        "format_version": 1,
        "target_model": run.config.model.model,
        "target_model_type": run.target_head.head.model_type,
        "target_vocab_size": run.config.model.vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": run.config.model.num_layers,
        "seq_length": seq_length,
        "dtype": _DTYPES[dtype],
        "num_samples": len(order),
        "shard_size": shard_size,
        "target_hidden_dim": hidden_size * len(run.target_layer_ids),
        "target_last_hidden_dim": hidden_size,
        "target_layer_ids": list(run.target_layer_ids),
    }
    yield Piece(key="manifest.json", build=lambda: json.dumps(manifest, indent=2, sort_keys=True).encode())


def _shard(run: Run, sample_ids: tuple[int, ...], seq_length: int, settings: ExportSettings) -> bytes:
    shape = (len(sample_ids), seq_length)
    hidden_size, dtype = run.config.model.hidden_size, TORCH_DTYPES[settings.dtype or "bfloat16"]
    tensors = {name: torch.zeros(shape, dtype=torch.int64, device="cpu") for name in ("input_ids", "loss_mask")}
    tensors["target_hidden_states"] = torch.zeros(
        *shape, len(run.target_layer_ids) * hidden_size, dtype=dtype, device="cpu"
    )
    tensors["target_last_hidden_states"] = torch.zeros(*shape, hidden_size, dtype=dtype, device="cpu")
    for row, sample_id in enumerate(sample_ids):
        states = read_states(run, sample_id, settings, norm=True, final=True)
        assert states.final is not None
        kept = min(seq_length, len(states.input_ids))
        tensors["input_ids"][row, :kept] = states.input_ids[:kept]
        tensors["loss_mask"][row, :kept] = states.loss_mask[:kept]
        tensors["target_hidden_states"][row, :kept] = states.aux.flatten(1)[:kept]
        tensors["target_last_hidden_states"][row, :kept] = states.final[:kept]
    return save_safetensors(tensors)


def _weights(run: Run) -> bytes:
    head = run.target_head
    if head.head.logit_scale != 1.0 or head.head.logit_softcap is not None:
        raise UsageError(
            f"--to automodel-dspark: it takes lm_head's output for the logits, but {head.head.architecture} scales or "
            "caps it; this target can't be used there"
        )
    return save_safetensors(
        {"embed_tokens.weight": head.embedding.float().clone(), "lm_head.weight": head.lm_head.float().clone()}
    )
