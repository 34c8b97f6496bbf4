"""Fixtures of the reader's tests: one thread of torch, and made runs in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.made_run import MadeRun, make_run


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
