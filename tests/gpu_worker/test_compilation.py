"""Compiled code is used only if it gives what eager code gives; the compiler itself is replaced by what it might do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_worker import kernels
from gpu_worker.compilation import compile_decoder, undo
from gpu_worker.decoder import Decoder, find_decoder
from gpu_worker.experts import implementations
from gpu_worker.extraction import Extractor
from gpu_worker.inputs import pad_rows
from gpu_worker.selfcheck import compare_alone, shortest_row
from gpu_worker.warmup import compile_and_check
from hiddenq.storage.runfiles import TokenRow
from tests.gpu_worker.conftest import extract, shard_format, tiny_decoder, token_rows
from tests.support.models import VOCAB_SIZE, build_base_model, tiny_config


@pytest.fixture
def decoder() -> Decoder:
    return find_decoder(build_base_model(tiny_config("qwen3")), VOCAB_SIZE)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    def install(compiled: Callable[..., Any]) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: compiled(function))

    return install


def run(decoder: Decoder) -> str:
    extractor = Extractor(decoder, shard_format([0, 3]))
    return compile_and_check(decoder, extractor, vocab_size=VOCAB_SIZE)


def test_compiled_layers_that_agree_are_used(decoder: Decoder, compiler: Callable[[Callable[..., Any]], None]) -> None:
    calls: list[int] = []

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(1)
            return function(*arguments, **named)

        return call

    compiler(compiled)
    assert run(decoder) == "layers"
    assert len(calls) == 2 * decoder.num_layers


def test_compiled_layers_that_differ_are_not_used(
    decoder: Decoder, compiler: Callable[[Callable[..., Any]], None]
) -> None:
    rows = token_rows([20, 7])
    extractor = Extractor(decoder, shard_format([0, 3]))
    before = extract(extractor, rows).payload
    compiler(lambda function: lambda *arguments, **named: function(*arguments, **named) * 1.01)
    assert run(decoder) == "eager (compiled code differs)"
    assert torch.equal(extract(extractor, rows).payload, before)


def test_a_compiler_that_fails_costs_only_speed(
    decoder: Decoder, compiler: Callable[[Callable[..., Any]], None]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("gcc: not found")

    rows = token_rows([20, 7])
    extractor = Extractor(decoder, shard_format([0, 3]))
    before = extract(extractor, rows).payload
    compiler(lambda function: fail)
    assert run(decoder) == "eager (compilation failed)"
    assert torch.equal(extract(extractor, rows).payload, before)


@pytest.mark.parametrize("name", ["jetmoe", "llama4_text"])
def test_experts_in_a_loop_stay_eager(name: str) -> None:
    decoder = find_decoder(build_base_model(tiny_config(name), dtype=torch.bfloat16), VOCAB_SIZE)
    assert compile_decoder(decoder) == "eager (experts)"
    assert all("forward" not in layer.__dict__ for layer in decoder.layers)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_in_grouped_products_are_compiled_where_those_need_no_wait_for_the_router(
    name: str, compiler: Callable[[Callable[..., Any]], None]
) -> None:
    compiler(lambda function: function)
    in_bfloat16 = find_decoder(build_base_model(tiny_config(name), dtype=torch.bfloat16), VOCAB_SIZE)
    assert implementations(in_bfloat16.model) == {"experts": "grouped_mm"}
    assert compile_decoder(in_bfloat16) == "layers"
    assert compile_decoder(tiny_decoder(name)) == "eager (experts)"  # float32


def test_no_batch_and_no_self_check_of_a_run_waits_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    compile_really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: compile_really(
        function, dynamic=dynamic, backend="eager"
    ))  # fmt: skip
    extractor = Extractor(decoder, shard_format([0, 3]))
    assert compile_and_check(decoder, extractor, vocab_size=VOCAB_SIZE) == "layers"
    for lengths in ((40,), (48,), (48, 48, 48)):  # as at a worker's start
        extract(extractor, token_rows(lengths))
    before = num_compiled()
    assert before > 0
    for later in ((64, 64), (61, 37, 50), (30, 11), (9,)):
        check_shortest(extractor, token_rows(later))
    assert num_compiled() == before


def check_shortest(extractor: Extractor, rows: list[TokenRow]) -> None:
    longest = max(len(row.input_ids) for row in rows)
    batch = pad_rows(rows, extractor.shard_format, padded_length=longest, vocab_size=VOCAB_SIZE)
    payload = torch.empty(batch.num_bytes, dtype=torch.uint8)
    with torch.inference_mode():
        on_device = extractor.upload(batch, payload)
        extractor.run(on_device)
        assert compare_alone(extractor, batch, on_device, shortest_row(batch)).typical() < 1e-5


def num_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_the_compiler_does_not_look_into_a_recurrence(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[[Callable[..., Any]], None]
) -> None:
    decoder = find_decoder(build_base_model(tiny_config("qwen3_5_text")), VOCAB_SIZE)
    for module, name, function in list(kernels.recurrences(decoder.model)):
        monkeypatch.setattr(module, name, function)  # so that the module is as it was after the test
    compiler(lambda function: function)
    assert compile_decoder(decoder) == "layers, recurrence left alone"
    assert not list(kernels.recurrences(decoder.model))  # all of them are behind torch.compiler.disable now
    undo(decoder)
