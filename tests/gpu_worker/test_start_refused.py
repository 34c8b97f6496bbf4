"""A worker that cannot do a run right does not start: one line says what differs, and nothing is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import WorkerSettings, serve
from hiddenq.contracts import names
from hiddenq.contracts.errors import RunMismatch, UsageError
from tests.gpu_worker.served import (
    Served,
    assert_nothing_is_held,
)
from tests.support.models import save_tiny_model


def test_another_model_under_the_same_path_is_refused(run: Served, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=7)
    with pytest.raises(RunMismatch, match=r"weights_digest is \w+ here, run run-\w+ was made with \w+; it is another"):
        serve(run.settings.model_copy(update={"model": str(other)}))
    assert_nothing_is_held(run)


def test_a_location_that_is_another_place_on_this_host_is_refused(run: Served) -> None:
    run.store.delete(names.RUN_JSON)
    with pytest.raises(RunMismatch, match=r"no run\.json here, though Redis says that run run-\w+ lies there"):
        serve(run.settings)


def test_a_drained_host_is_refused(run: Served) -> None:
    from hiddenq import telemetry

    run.client.sadd("hiddenq:drained", telemetry.host_name())  # as `drain` does with a host that Redis knows
    with pytest.raises(UsageError, match="is drained"):
        serve(run.settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line(run: Served) -> None:
    with pytest.raises(UsageError, match=r"--device cuda:0: torch .* sees no GPU"):
        serve(run.settings.model_copy(update={"device": "cuda:0"}))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"device": "gpu"}, "--device gpu: expected cpu or cuda:N"),
        ({"attention": "fast"}, "--attention fast: expected one of auto, sdpa"),
        ({"gpus_per_worker": 2}, "--gpus-per-worker: has no effect on the CPU"),
        ({"run": "r", "any_run": True}, "--any-run: has no effect with --run r"),
    ],
)
def test_settings_that_can_not_be_are_refused_in_one_line(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        WorkerSettings(spool=tmp_path, **fields)
