"""Before the first batch: proof that padding changes nothing here, compilation, and kernels tuned.

Invariant: the way a batch is run (attention, mask, compiled or not) is the first of a fixed order in which no token's
states depend on what comes after it, padding or real, on this host; if none does, the worker refuses the model. (Real
tokens count, too: with a mask, padding would not betray a model that is not causal.) Compiled code is used only after
it gave what the eager code gives.

Shape legend: B rows, S padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.compilation import compile_decoder, undo
from gpu_worker.decoder import Decoder
from gpu_worker.engine import Engine, new_event
from gpu_worker.extraction import Extractor
from gpu_worker.gather import load_states
from gpu_worker.inputs import PaddedBatch, pad_rows
from gpu_worker.selfcheck import TOLERANCES, compare_alone, token_differences
from hiddenq import telemetry
from hiddenq.contracts.errors import ModelError
from hiddenq.contracts.run import RunConfig
from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage.runfiles import TokenRow

_PROBE_LENGTHS = (7, 24)
_COMPILE_LENGTHS = (40, 33, 12)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How batches are run on this host."""

    attention: str
    masked: bool


def largest_payload(config: RunConfig, shard_format: ShardFormat) -> int:
    """Bytes of the largest batch that the run's plan may hold."""
    tokens = max(config.max_length, min(config.token_budget, config.max_shard_bytes // shard_format.bytes_per_token))
    return tokens * shard_format.bytes_per_token


def choose_mode(
    decoder: Decoder, shard_format: ShardFormat, *, vocab_size: int, attention: str, may_change_attention: bool
) -> Mode:
    """The first way in which what comes after a token leaves it alone: unmasked, masked, then both in eager attention.

    Raises:
        ModelError: the model is not causal, or padding changes real tokens whatever is tried.
    """
    tolerance, tried, is_causal = TOLERANCES[shard_format.model_dtype], [], False
    attentions = [attention] + (["eager"] if may_change_attention and attention != "eager" else [])
    for name in attentions:
        if name != attention:
            decoder.model.set_attn_implementation(name)  # type: ignore[operator]
        for masked in (False, True):
            future = future_difference(decoder, shard_format, vocab_size=vocab_size, masked=masked)
            padding = padding_difference(decoder, shard_format, vocab_size=vocab_size, masked=masked)
            if future <= tolerance and padding <= tolerance:
                return Mode(attention=name, masked=masked)
            is_causal |= future <= tolerance
            tried.append(f"{name}{' with a mask' if masked else ''}: {padding if is_causal else future:.1e}")
    cause = (
        "padding on the right changes the states of real tokens"
        if is_causal
        else "it is not causal, a token's states change with the tokens after it"
    )
    raise ModelError(
        f"{type(decoder.model).__name__} is not supported: {cause} (relative difference by {'; '.join(tried)})"
    )


def future_difference(decoder: Decoder, shard_format: ShardFormat, *, vocab_size: int, masked: bool) -> float:
    """How much a row's states differ from those of a longer row that begins with it: median token, worst layer."""
    extractor = Extractor(decoder, shard_format, masked=masked)
    try:
        short, long = _random_rows(vocab_size, _PROBE_LENGTHS)
        length, columns = len(short.input_ids), len(extractor.columns)
        short.input_ids[:] = long.input_ids[:length]
        states = _states(extractor, _pad([short, long], shard_format, vocab_size, decoder.device))
        return _typical(states[:columns], [values[:length] for values in states[columns:]])
    finally:
        extractor.close()


def padding_difference(decoder: Decoder, shard_format: ShardFormat, *, vocab_size: int, masked: bool) -> float:
    """How much a short row's states change beside a longer one: the median token's relative difference, worst layer."""
    extractor = Extractor(decoder, shard_format, masked=masked)
    try:
        batch = _random_batch(shard_format, vocab_size, _PROBE_LENGTHS, decoder.device)
        with torch.inference_mode():
            payload = torch.empty(batch.num_bytes, dtype=torch.uint8, device=decoder.device)
            on_device = extractor.upload(batch, payload)
            extractor.run(on_device)
            return compare_alone(extractor, batch, on_device, row=0).typical()
    finally:
        extractor.close()


def compile_and_check(decoder: Decoder, extractor: Extractor, *, vocab_size: int) -> str:
    """Compile, compare with eager, and go back to eager if that fails; returns what runs now."""
    batches = [
        _random_batch(extractor.shard_format, vocab_size, lengths, decoder.device)
        for lengths in (_COMPILE_LENGTHS, _COMPILE_LENGTHS[:1])  # one row is a shape of its own for the compiler
    ]
    eager = [_states(extractor, batch) for batch in batches]
    done = compile_decoder(decoder)
    if done.startswith("eager"):
        return done
    try:
        compiled = [_states(extractor, batch) for batch in batches]
    except Exception as error:
        undo(decoder)
        telemetry.logger().warning("compile_failed", error=f"{type(error).__name__}: {error}"[:500], next="eager")
        return "eager (compilation failed)"
    difference = max(_typical(mine, reference) for mine, reference in zip(compiled, eager, strict=True))
    telemetry.logger().info("compiled", what=done, difference_from_eager=difference)
    if not difference <= TOLERANCES[extractor.shard_format.model_dtype]:
        undo(decoder)
        telemetry.logger().warning("compile_differs", difference=difference, next="eager")
        return "eager (compiled code differs)"
    return done


def warm_up(engine: Engine, extractor: Extractor, config: RunConfig) -> None:
    """Run the run's extreme shapes once: kernels tuned, memory found.

    Triton compiles a kernel anew for sizes that are 1, multiples of 16, and others: small batches of each come first.
    """
    tokens = largest_payload(config, extractor.shard_format) // extractor.shard_format.bytes_per_token
    shapes = [(rows, length) for rows in (1, 3, 16) for length in (40, 48)]
    shapes += [
        (max(1, tokens // length), length) for length in sorted({config.max_length, min(config.max_length, 512)})
    ]
    payload = torch.empty(0, dtype=torch.uint8, device=engine.device)
    for rows, length in shapes:
        batch = _random_batch(extractor.shard_format, config.model.vocab_size, (length,) * rows, engine.device)
        if payload.numel() < batch.num_bytes:
            payload = torch.empty(batch.num_bytes, dtype=torch.uint8, device=engine.device)
        engine.run_into(extractor, batch, payload)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
        torch.cuda.empty_cache()


def matrix_ceiling(device: torch.device, dtype: torch.dtype, *, size: int = 8192, rounds: int = 10) -> float:
    """Operations a second that this device reaches in one large matrix product; 0 on the CPU."""
    if device.type != "cuda":
        return 0.0
    left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    begin, end = new_event(timed=True), new_event(timed=True)
    begin.record()
    for _ in range(rounds):
        left @ right
    end.record()
    end.synchronize()
    seconds = float(begin.elapsed_time(end)) / 1000
    return rounds * 2 * size**3 / seconds


def _states(extractor: Extractor, batch: PaddedBatch) -> list[Tensor]:
    with torch.inference_mode():
        payload = torch.empty(batch.num_bytes, dtype=torch.uint8, device=extractor.decoder.device)
        extractor.run(extractor.upload(batch, payload))
        hidden = extractor.decoder.hidden_size
        return [
            values
            for begin, length in zip(batch.begins, batch.lengths, strict=True)
            for _, values in load_states(extractor.columns, payload, begin, length, hidden)
        ]


def _typical(mine: list[Tensor], reference: list[Tensor]) -> float:
    """The median token's relative difference, over the worst of the tensors."""
    return max(
        float(token_differences(values, expected).median()) for values, expected in zip(mine, reference, strict=True)
    )


def _random_batch(
    shard_format: ShardFormat, vocab_size: int, lengths: tuple[int, ...], device: torch.device
) -> PaddedBatch:
    return _pad(_random_rows(vocab_size, lengths), shard_format, vocab_size, device)


def _random_rows(vocab_size: int, lengths: tuple[int, ...]) -> list[TokenRow]:
    generator = np.random.default_rng(0)
    return [
        TokenRow(row, generator.integers(0, vocab_size, length, dtype=np.int32), np.ones(length, dtype=np.uint8))
        for row, length in enumerate(lengths)
    ]


def _pad(rows: list[TokenRow], shard_format: ShardFormat, vocab_size: int, device: torch.device) -> PaddedBatch:
    padded_length = max(len(row.input_ids) for row in rows)
    return pad_rows(
        rows, shard_format, padded_length=padded_length, vocab_size=vocab_size, pinned=device.type == "cuda"
    )
