"""Fixtures of the GPU worker's tests: everything on the CPU, with tiny models that are built once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
import transformers
from torch import Tensor

from gpu_worker import startup
from gpu_worker.decoder import Decoder, find_decoder
from gpu_worker.extraction import Extractor
from gpu_worker.gather import load_states
from gpu_worker.inputs import pad_rows
from gpu_worker.kernels import never_packed
from hiddenq.contracts.shard import ShardFormat
from hiddenq.storage.runfiles import TokenRow
from tests.gpu_worker.served import LENGTHS, Served, make_run
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE, build_base_model, save_tiny_model, tiny_config
from tests.support.redis_server import RedisServer, redis_client, redis_server, shared_redis_server

__all__ = ["redis_client", "redis_server", "shared_redis_server"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    never_packed()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3 on disk."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture
def run(tmp_path: Path, model: Path, redis_server: RedisServer, redis_client: redis.Redis) -> Served:
    """An enqueued run of that model that nobody serves yet."""
    return make_run(tmp_path, model, redis_server.url, redis_client, LENGTHS)


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Puts a hook on layer 1 of the worker's model, after it was proved."""
    handles: list[Any] = []

    def install(hook: Callable[..., Any]) -> None:
        def find_and_meddle(*arguments: Any) -> Decoder:
            decoder = find_decoder(*arguments)
            handles.append(decoder.layers[1].register_forward_hook(hook))
            return decoder

        monkeypatch.setattr(startup, "find_decoder", find_and_meddle)

    yield install
    for handle in handles:
        handle.remove()


def token_rows(lengths: Sequence[int], *, seed: int = 0, first_id: int = 0) -> list[TokenRow]:
    """Random samples of those lengths."""
    generator = np.random.default_rng(seed)
    return [
        TokenRow(
            first_id + number,
            generator.integers(3, VOCAB_SIZE - 12, length).astype(np.int32),
            generator.integers(0, 2, length).astype(np.uint8),
        )
        for number, length in enumerate(lengths)
    ]


def shard_format(
    layers: Sequence[int], *, model_dtype: str = "float32", storage_dtype: str = "", final: bool = True
) -> ShardFormat:
    """A format for tiny models."""
    return ShardFormat(
        target_layer_ids=tuple(layers),
        hidden_size=HIDDEN_SIZE,
        model_dtype=model_dtype,
        storage_dtype=storage_dtype or model_dtype,
        final_hidden_state=final,
    )


@functools.lru_cache(maxsize=128)
def tiny_decoder(name: str, **overrides: object) -> Decoder:
    """The decoder of a tiny model."""
    return find_decoder(build_base_model(tiny_config(name, **overrides)), VOCAB_SIZE)


@dataclass
class Extracted:
    """What came out of one batch."""

    payload: Tensor
    states: list[dict[str, Tensor]]
    """By sample: name → float32 [S, H]."""
    nonfinite_CB: Tensor


def extract(extractor: Extractor, rows: Sequence[TokenRow], *, padded_length: int | None = None) -> Extracted:
    """Run one batch and read its states back from the payload."""
    batch = pad_rows(
        rows,
        extractor.shard_format,
        padded_length=padded_length or max(len(row.input_ids) for row in rows),
        vocab_size=VOCAB_SIZE,
    )
    payload = torch.full((batch.num_bytes,), 0xAB, dtype=torch.uint8)
    with torch.inference_mode():
        on_device = extractor.upload(batch, payload)
        extractor.run(on_device)
    states = [
        dict(load_states(extractor.columns, payload, begin, length, HIDDEN_SIZE))
        for begin, length in zip(batch.begins, batch.lengths, strict=True)
    ]
    return Extracted(payload, states, on_device.destination.nonfinite_CB)


def difference(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest difference over all layers, relative to the layer's largest magnitude."""
    assert mine.keys() == reference.keys()
    return max(float((mine[name] - reference[name]).abs().max() / reference[name].abs().max()) for name in reference)
