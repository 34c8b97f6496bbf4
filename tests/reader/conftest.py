"""Fixtures of the reader's tests: one thread of torch, and made runs in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.target_head import write_target_head
from hiddenq.reader import VerifyReport
from hiddenq.storage import open_store
from tests.support.made_run import MadeRun, make_run, states_of_model
from tests.support.models import save_tiny_model
from tests.support.trainers import trainers

__all__ = ["kinds", "trainers"]


def kinds(report: VerifyReport) -> set[str]:
    """The kinds of findings in a report."""
    return set(report.num_findings)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., MadeRun]:
    """Makes a run in a folder of the test's own, named by its first argument."""

    def made(name: str = "run", **fields: Any) -> MadeRun:
        return make_run(tmp_path / name, **fields)

    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of 6 layers, hidden 64."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="session")
def model_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> MadeRun:
    """A run of that model in bfloat16 with its target head: 16 samples, three target layers; never to be changed."""
    folder = tmp_path_factory.mktemp("model-run")
    layers = (1, 2, 4)
    made = make_run(
        folder,
        num_samples=16,
        vocab_size=512,
        num_layers=6,
        hidden_size=64,
        target_layer_ids=layers,
        states=states_of_model(model_folder, layers),
        model=str(model_folder),
        architecture="LlamaForCausalLM",
    )
    write_target_head(open_store(folder), made.config)
    return made
