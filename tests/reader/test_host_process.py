"""Inside somebody's training process: reading touches nothing that is the process's own, and bears what is set there.

The invariant: random states, environment and working folder are after reading what they were before; and what is read
is the same ordinary tensors in memory, whatever default device or grad mode the process has set.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiddenq.reader import HiddenStatesDataset, HiddenStatesStream, collate, open_run, verify
from hiddenq.reader.exports import ExportSettings, export
from hiddenq.reader.files import LocalFiles
from hiddenq.reader.trainers import ModelOptimizerDataset, SpeculatorsDataset
from tests.support.made_run import MadeRun

Make = Callable[..., MadeRun]


def state() -> tuple[Any, ...]:
    """What the whole process shares."""
    numpy_state = np.random.get_state(legacy=False)
    return (
        random.getstate(), repr(numpy_state), torch.get_rng_state().tolist(), dict(os.environ), os.getcwd(),
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
    )  # fmt: skip


@pytest.fixture
def default_device() -> Iterator[str]:
    """A default device that is not the CPU, as `torch.set_default_device("cuda")` sets one."""
    torch.set_default_device("meta")
    yield "meta"
    torch.set_default_device(None)


def read_all(folder: Path, local_files: LocalFiles) -> Iterator[torch.Tensor]:
    """Every tensor that the ways of reading give."""
    run = open_run(folder, local_files=local_files)
    dataset, stream = HiddenStatesDataset(run), HiddenStatesStream(run, seed=1)
    stream.set_epoch(2)
    yield from collate(dataset.__getitems__(range(len(dataset)))).values()
    for sample in (*stream, *map(run.read, run)):
        assert sample.hidden_states is not None
        yield from (sample.input_ids, sample.loss_mask, sample.hidden_states)
    yield from run.read_tokens(next(iter(run)))
    for item in (SpeculatorsDataset(run)[0], ModelOptimizerDataset(run, prenorm=True)[0]):
        yield from (value for value in item.values() if isinstance(value, torch.Tensor))


def test_reading_verifying_and_exporting_leave_the_process_as_it_was(model_run: MadeRun, tmp_path: Path) -> None:
    before = state()
    assert list(read_all(model_run.folder, "auto"))
    assert verify(model_run.folder, deep=True, recompute=1, seed=0).ok
    export(model_run.folder, ExportSettings(format="speculators", seed=3), tmp_path / "out")
    assert [old == new for old, new in zip(before, state(), strict=True)] == [True] * len(before)


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("local_files", ["auto", "read", "map"])
def test_a_default_device_of_the_process_changes_nothing_that_is_read(
    make: Make, default_device: str, local_files: LocalFiles, storage_dtype: str
) -> None:
    with torch.device("cpu"):
        made = make(storage_dtype=storage_dtype)
    assert torch.empty(1).device.type == default_device
    assert {tensor.device.type for tensor in read_all(made.folder, local_files)} == {"cpu"}


def test_what_was_made_in_inference_mode_serves_training_afterwards(model_run: MadeRun) -> None:
    run = open_run(model_run.folder, local_files="map")
    with torch.inference_mode():
        stream = HiddenStatesStream(run)
        final = run[0].final_hidden_state
        assert final is not None
        expected = run.target_head.logits(final)
    learnt = final.clone().requires_grad_()
    logits = run.target_head.logits(learnt)
    logits.sum().backward()
    assert learnt.grad is not None
    assert torch.equal(logits.detach(), expected)
    stream.set_epoch(1)
    assert stream.epoch == 1
    run.read_bytes(0).zero_()  # a private view of the map
