"""The payload is the file: right bytes at the right places, whatever the storage dtype; NaN and Inf are named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from gpu_worker.extraction import Extractor
from gpu_worker.gather import (
    Destination,
    columns_of,
    load_states,
    name_nonfinite,
    quantize_fp8,
    store_states,
    store_tokens,
)
from hiddenq.contracts.errors import DamagedShard
from hiddenq.contracts.shard import ShardFormat, layout_shard
from tests.gpu_worker.conftest import extract, shard_format, tiny_decoder, token_rows

LENGTHS = (5, 9, 1, 12)
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0.0, "float8_e4m3fn": 1 / 16}


def gathered(layers: ShardFormat, states: list[Tensor]) -> Destination:
    """Place made-up states of four rows."""
    begins = [sum(LENGTHS[:row]) * layers.bytes_per_token for row in range(len(LENGTHS))]
    destination = Destination(
        payload=torch.full((sum(LENGTHS) * layers.bytes_per_token,), 0xAB, dtype=torch.uint8),
        lengths_B=torch.tensor(LENGTHS, dtype=torch.int32),
        begins_B=torch.tensor(begins),
        nonfinite_CB=torch.zeros(len(columns_of(layers)), len(LENGTHS), dtype=torch.int32),
        bytes_per_token=layers.bytes_per_token,
        host_lengths=LENGTHS,
        host_begins=tuple(begins),
    )
    for index, column in enumerate(columns_of(layers)):
        store_states(column, index, states[index], destination)
    store_tokens(torch.arange(48).view(4, 12), torch.arange(48).view(4, 12).remainder(2).to(torch.uint8), destination)
    return destination


def made_up(layers: ShardFormat, seed: int = 0) -> list[Tensor]:
    """Random padded states for each column; what lies in the padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in columns_of(layers):
        states_BSH = torch.randn(len(LENGTHS), max(LENGTHS), 64, generator=generator) * 3
        for row, length in enumerate(LENGTHS):
            states_BSH[row, length:] = float("nan")
        states.append(states_BSH)
    return states


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("layers", [(1, 3, 2), (0,), ()])
def test_header_and_payload_are_a_safetensors_file(storage: str, layers: tuple[int, ...]) -> None:
    wanted = shard_format(layers, storage_dtype=storage)
    states = made_up(wanted)
    layout = layout_shard(wanted, [(7 * row, length) for row, length in enumerate(LENGTHS)], {"run": "r"})
    tensors = load_safetensors(layout.header + gathered(wanted, states).payload.numpy().tobytes())
    for row, length in enumerate(LENGTHS):
        assert tensors[f"{7 * row}.input_ids"].tolist() == list(range(12 * row, 12 * row + length))
        assert tensors[f"{7 * row}.loss_mask"].tolist() == [token % 2 for token in range(12 * row, 12 * row + length)]
        for place in range(len(layers)):
            found = tensors[f"{7 * row}.hidden_states"][:, place].float()
            if wanted.has_scales:
                found = found * tensors[f"{7 * row}.hidden_states_scale"][:, place]
            _assert_close(found, states[place][row, :length], storage)
        final = "float32" if storage == "float8_e4m3fn" else storage
        _assert_close(tensors[f"{7 * row}.final_hidden_state"].float(), states[-1][row, :length], final)


def _assert_close(found: Tensor, expected: Tensor, storage: str) -> None:
    limit = expected.abs().amax(-1, keepdim=True) * TOLERANCE[storage]
    assert bool(((found - expected).abs() <= limit).all())


@pytest.mark.parametrize("storage", DTYPES)
def test_every_byte_is_written_and_none_twice_differently(storage: str) -> None:
    wanted = shard_format((1, 3, 2), storage_dtype=storage)
    first, second = gathered(wanted, made_up(wanted)), gathered(wanted, made_up(wanted))
    second.payload.fill_(0)
    again = gathered(wanted, made_up(wanted))
    assert torch.equal(first.payload, again.payload)
    read = load_states(columns_of(wanted), first.payload, first.host_begins[1], LENGTHS[1], 64)
    assert [name for name, _ in read] == ["layer 1", "layer 3", "layer 2", "final_hidden_state"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("storage", DTYPES)
def test_a_value_that_is_not_finite_names_sample_and_layer(value: float, storage: str) -> None:
    wanted = shard_format((1, 3, 2), storage_dtype=storage)
    states = made_up(wanted)
    states[2][1, 8, 33] = value
    flags = gathered(wanted, states).nonfinite_CB
    assert name_nonfinite(columns_of(wanted), flags, lambda row: f"sample {row}") == "NaN or Inf in layer 2 of sample 1"


def test_padding_that_is_not_finite_harms_nobody() -> None:
    wanted = shard_format((0, 1))
    assert not gathered(wanted, made_up(wanted)).nonfinite_CB.any()


def test_a_value_too_large_for_the_storage_dtype_is_not_finite() -> None:
    wanted = shard_format((0,), storage_dtype="float16")
    states = made_up(wanted)
    states[0][3, 2, 1] = 70000.0
    assert gathered(wanted, states).nonfinite_CB.nonzero().tolist() == [[0, 3]]


def test_fp8_keeps_each_value_within_a_sixteenth_of_its_rows_maximum() -> None:
    states = torch.randn(200, 64) * torch.logspace(-30, 30, 200)[:, None]
    states[0] = 0.0
    values, scales = quantize_fp8(states)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (200, 1)
    _assert_close(values.float() * scales, states, "float8_e4m3fn")


def test_the_stored_dtype_is_the_runs_not_the_models() -> None:
    decoder = tiny_decoder("qwen3")
    rows = token_rows([20, 8])
    wide = extract(Extractor(decoder, shard_format([1])), rows)
    narrow = extract(Extractor(decoder, shard_format([1], storage_dtype="bfloat16")), rows)
    assert torch.equal(narrow.states[0]["layer 1"], wide.states[0]["layer 1"].bfloat16().float())


def test_rows_that_do_not_fit_their_batch_are_refused() -> None:
    extractor = Extractor(tiny_decoder("qwen3"), shard_format([1]))
    with pytest.raises(DamagedShard, match="sample 0: 20 tokens, but its batch is padded to 16"):
        extract(extractor, token_rows([20]), padded_length=16)


def test_an_id_that_the_model_does_not_have_is_refused() -> None:
    rows = token_rows([4], first_id=9)
    rows[0].input_ids[2] = 512
    with pytest.raises(DamagedShard, match="sample 9: token id 512; the model has ids 0 to 511"):
        extract(Extractor(tiny_decoder("qwen3"), shard_format([1])), rows)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_the_gpu_kernels_give_the_same_bytes() -> None:
    """In Triton's interpreter; on a GPU benchmarks/extraction.py compares stored states with the model's."""
    script = Path(__file__).with_name("interpreted_gather.py")
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
