"""Check one shard: every byte is read once, in file order, in bounded memory.

Invariant: the checksum and all checks of content see the same bytes: one read feeds both.
Nothing in the file is believed: sizes come from the store, tokens from the token parts, the layout from the format.

Shape legend: S tokens, K target layers, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, ObjectMissing
from hiddenq.contracts.manifest import BatchPlan
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat, TensorSpec, parse_header
from hiddenq.reader.budget import ByteBudget
from hiddenq.reader.checks import values
from hiddenq.reader.checks.reading import ObjectBytes
from hiddenq.reader.checks.report import Findings
from hiddenq.reader.headers import header_size, samples_of
from hiddenq.storage import ObjectInfo, ObjectStore
from hiddenq.storage.runfiles import TokenRow

READ_BYTES = 16 << 20
"""Bytes asked for at a time, unless one sample is larger."""
MAX_ZERO_SHARE = 0.1
"""Share of a layer's vectors in a sample that may be all zeros."""


@dataclass
class ShardOutcome:
    """What a pass over a shard showed."""

    num_bytes: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """sample_id → (byte offset in the file, num_tokens), by the header."""
    data_offset: int = 0
    checksum: str = ""
    norms: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """With `deep`: sample_id → mean log2 norm of each layer, then of the final state."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """With `deep`: sample_id → digest of its states."""


def check_shard(
    store: ObjectStore,
    info: ObjectInfo,
    batch: BatchPlan,
    rows: Sequence[TokenRow],
    config: RunConfig,
    findings: Findings,
    budget: ByteBudget,
    *,
    deep: bool = False,
) -> ShardOutcome:
    """Read a shard once and add what is wrong with it to `findings`."""
    outcome = ShardOutcome()
    stream = ObjectBytes(store, info)
    try:
        _check(stream, batch, rows, config, findings, outcome, budget, deep=deep)
    except (DamagedShard, ObjectMissing) as error:
        findings.add("damaged_shard", info.key, str(error).removeprefix(f"{info.key}: "))
    outcome.num_bytes = stream.position
    return outcome


def _check(
    stream: ObjectBytes,
    batch: BatchPlan,
    rows: Sequence[TokenRow],
    config: RunConfig,
    findings: Findings,
    outcome: ShardOutcome,
    budget: ByteBudget,
    *,
    deep: bool,
) -> None:
    key, shard_format = stream.info.key, ShardFormat.of_run(config)
    prefix = bytes(stream.take(8))
    size = header_size(prefix, stream.info, shard_format, batch.num_samples)
    specs, metadata = parse_header(prefix + bytes(stream.take(size - 8)), name=key, num_bytes=stream.info.num_bytes)
    _check_metadata(key, metadata, config, findings)
    outcome.data_offset = size
    expected = {row.sample_id: row for row in rows}
    try:
        samples = samples_of(specs, shard_format, name=key)
        if {sample_id: len(row.input_ids) for sample_id, row in expected.items()} != dict(samples):
            raise DamagedShard(f"{key}: {_difference(expected, dict(samples))}")
    except DamagedShard as error:
        findings.add("layout", key, str(error).removeprefix(f"{key}: "))
        samples = ()
    for group in _groups(samples, shard_format.bytes_per_token):
        num_bytes = sum(num_tokens for _, num_tokens in group) * shard_format.bytes_per_token
        with budget.taken(num_bytes):
            begin, data = stream.position, stream.take(num_bytes)
            for sample_id, num_tokens in group:
                outcome.offsets[sample_id] = (begin, num_tokens)
                outcome.num_samples += 1
                outcome.num_tokens += num_tokens
                tensors = shard_format.sample_tensors(sample_id, num_tokens, begin - stream.position + num_bytes)
                begin += tensors[-1].end - tensors[0].begin
                _check_sample(key, data, tensors, expected[sample_id], config, findings, outcome, deep=deep)
    while stream.left:
        stream.take(min(READ_BYTES, stream.left))
    outcome.checksum = stream.crc.value


def _groups(samples: Sequence[tuple[int, int]], bytes_per_token: int) -> Iterator[list[tuple[int, int]]]:
    """Samples that follow one another, as many as one read takes, but at least one."""
    group: list[tuple[int, int]] = []
    num_tokens = 0
    for sample in samples:
        if group and (num_tokens + sample[1]) * bytes_per_token > READ_BYTES:
            yield group
            group, num_tokens = [], 0
        group.append(sample)
        num_tokens += sample[1]
    if group:
        yield group


def _check_metadata(key: str, metadata: dict[str, Any], config: RunConfig, findings: Findings) -> None:
    batch_id, execution = names.parse_shard_name(key) or ("", "")
    wanted = {
        "run": config.run,
        "batch_id": batch_id,
        "execution": execution,
        "config_digest": config.model.config_digest,
        "layer_convention": config.layer_convention,
        "target_layer_ids": list(config.target_layer_ids),
        "model_dtype": config.model.dtype,
        "storage_dtype": config.storage_dtype,
    }
    for name, value in wanted.items():
        found = metadata.get(name)
        if found != value:
            findings.add("layout", key, f"metadata {name}: expected {value!r}, found {str(found)[:80]!r}")


def _difference(expected: dict[int, TokenRow], found: dict[int, int]) -> str:
    for sample_id in sorted(expected.keys() | found.keys()):
        wanted = len(expected[sample_id].input_ids) if sample_id in expected else None
        if wanted != found.get(sample_id):
            return f"sample {sample_id}: expected {wanted or 'no'} tokens by the plan, found {found.get(sample_id)}"
    raise AssertionError("the samples do not differ")


def _check_sample(
    key: str,
    group: memoryview,
    tensors: Sequence[TensorSpec],
    row: TokenRow,
    config: RunConfig,
    findings: Findings,
    outcome: ShardOutcome,
    *,
    deep: bool,
) -> None:
    where = f"sample {row.sample_id} in {key}"
    arrays: dict[str, npt.NDArray[Any]] = {}
    dtypes = {spec.name.partition(".")[2]: spec.dtype for spec in tensors}
    digest = hashlib.blake2b(digest_size=16)
    for spec in tensors:
        name = spec.name.partition(".")[2]
        data = group[spec.begin : spec.end]
        array = np.frombuffer(data, values.WORDS[spec.dtype]).reshape(spec.shape)
        arrays[name] = array
        if name in ("input_ids", "loss_mask"):
            planned = row.input_ids if name == "input_ids" else row.loss_mask
            if not np.array_equal(array, planned):
                at = int(np.argmax(array != planned))
                findings.add(
                    "tokens", where, f"{name}[{at}]: expected {planned[at]} by the token part, found {array[at]}"
                )
            continue
        _check_magnitudes(where, name, spec.dtype, array, config, findings)
        if deep:
            digest.update(data)
    if deep:
        outcome.digests[row.sample_id] = digest.digest()
        outcome.norms[row.sample_id] = values.log_norms(arrays, dtypes)
    _check_final(where, arrays, config, findings)


def _check_magnitudes(
    where: str, name: str, dtype: str, words: npt.NDArray[Any], config: RunConfig, findings: Findings
) -> None:
    """Values that are not finite, and vectors of zeros where states should be."""
    not_finite, zero = values.odd_vectors(words, dtype)  # [S, K] or [S]
    if not_finite.any():
        token, *layer = (int(at[0]) for at in np.nonzero(not_finite))
        findings.add("non_finite", where, f"{_layer(name, layer, config)}: NaN or Inf at token {token}")
    num_zero = np.atleast_1d(zero.sum(axis=0))
    if num_zero.max() > max(1, MAX_ZERO_SHARE * len(zero)):
        layer = [int(num_zero.argmax())] if zero.ndim > 1 else []
        findings.add(
            "zero_states", where, f"{_layer(name, layer, config)}: {num_zero.max()} of {len(zero)} vectors are zero"
        )


def _layer(name: str, layer: Sequence[int], config: RunConfig) -> str:
    return f"layer {config.target_layer_ids[layer[0]]}" if layer else name


def _check_final(where: str, arrays: dict[str, npt.NDArray[Any]], config: RunConfig, findings: Findings) -> None:
    """If the last layer is a target layer, its slot and the final hidden state are one tensor."""
    last = config.model.num_layers - 1
    if last not in config.target_layer_ids or "final_hidden_state" not in arrays or "hidden_states_scale" in arrays:
        return
    slot = arrays["hidden_states"][:, config.target_layer_ids.index(last)]
    if not np.array_equal(slot, arrays["final_hidden_state"]):
        findings.add("final_state", where, f"layer {last} is the last one, but differs from final_hidden_state")
