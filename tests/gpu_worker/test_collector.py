"""A fault of ours between the device and the spool ends the worker with it, and does not leave it waiting."""

from __future__ import annotations

import pytest

from gpu_worker.report import WorkerStatus
from gpu_worker.service import serve
from tests.gpu_worker.served import Served, queue_state


@pytest.mark.timeout(120)
def test_a_fault_beside_a_batch_that_the_device_has_ended_ends_the_worker(
    run: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(_status: WorkerStatus, _seconds: float) -> None:
        raise ArithmeticError("a fault of ours")

    monkeypatch.setattr(WorkerStatus, "busy", break_down)
    with pytest.raises(ArithmeticError, match="a fault of ours"):
        serve(run.settings)
    assert queue_state(run).num_started == 0
