"""Compiled code is used only if it gives what eager code gives; the compiler itself is replaced by what it might do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_worker import kernels
from gpu_worker.compilation import compile_decoder, undo
from gpu_worker.decoder import Decoder, find_decoder
from gpu_worker.extraction import Extractor
from gpu_worker.warmup import compile_and_check
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


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_experts_stay_eager(name: str) -> None:
    decoder = tiny_decoder(name)
    assert compile_decoder(decoder) == "eager (experts)"
    assert all("forward" not in layer.__dict__ for layer in decoder.layers)


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
