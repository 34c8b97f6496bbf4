"""Verify against the model itself: what no checksum can show.

The invariant: every fault here leaves checksums, tokens, index and manifest right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import FineGrainedFP8Config

from hiddenq.contracts import names
from hiddenq.contracts.errors import ModelError
from hiddenq.reader import verify
from tests.support.made_run import MadeRun, make_run, states_of_model
from tests.support.models import save_fp8_model, save_tiny_model

Make = Callable[..., MadeRun]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def real(tmp_path: Path, model_folder: Path) -> MadeRun:
    """A run whose states are those of a tiny model."""
    return make_run(
        tmp_path / "run",
        num_layers=4,
        hidden_size=64,
        dtype="float32",
        target_layer_ids=(1, 2),
        min_length=9,
        max_length=9,
        states=states_of_model(model_folder, (1, 2)),
        model=str(model_folder),
    )


def test_the_states_of_the_model_agree(real: MadeRun) -> None:
    report = verify(real.folder, recompute=5, seed=0)
    assert report.ok, report.lines()
    assert report.recomputed is not None
    assert report.recomputed.num_samples == 5
    assert 0 <= report.recomputed.worst_difference < 1e-5


def test_fp8_states_agree_within_what_fp8_costs(tmp_path: Path, model_folder: Path) -> None:
    made = make_run(
        tmp_path / "run",
        num_layers=4,
        hidden_size=64,
        dtype="float32",
        storage_dtype="float8_e4m3fn",
        target_layer_ids=(1, 2),
        states=states_of_model(model_folder, (1, 2)),
        model=str(model_folder),
    )
    report = verify(made.folder, recompute=4, seed=0)
    assert report.ok, report.lines()
    assert report.recomputed is not None
    assert 0.01 < report.recomputed.worst_difference < report.recomputed.tolerance


def test_layers_in_another_order_are_found(real: MadeRun) -> None:
    for sample in real.samples.values():
        sample.hidden_states = sample.hidden_states.flip(1)
    real.write_shards()
    real.finish()
    assert verify(real.folder).ok
    report = verify(real.folder, recompute=1)
    assert set(report.num_findings) == {"recompute"}
    assert {"layer 1", "layer 2"} == {finding.text.partition(":")[0] for finding in report.findings}


def test_states_swapped_between_two_samples_are_found(real: MadeRun) -> None:
    first, second = (real.samples[sample_id] for sample_id in real.sample_ids[0][:2])
    first.hidden_states, second.hidden_states = second.hidden_states, first.hidden_states
    first.final_hidden_state, second.final_hidden_state = second.final_hidden_state, first.final_hidden_state
    real.write_shard(real.shard_keys[0])
    real.finish()
    assert verify(real.folder).ok
    report = verify(real.folder, recompute=len(real.samples))
    assert {finding.where for finding in report.findings} == {
        f"sample {sample_id}" for sample_id in real.sample_ids[0][:2]
    }


@pytest.mark.parametrize("name", ["/nowhere/model", "nowhere"])
def test_a_model_that_is_not_there_is_one_line(name: str, make: Make) -> None:
    made = make(model=name)
    with pytest.raises(ModelError, match=f"--model {name}: no such folder on this host"):
        verify(made.folder, recompute=1)


def test_another_model_is_refused(make: Make, model_folder: Path) -> None:
    made = make(num_layers=7)
    with pytest.raises(ModelError, match="no list of 7 layers"):
        verify(made.folder, recompute=1, model=str(model_folder))


@pytest.mark.parametrize("dequantized", [True, False])
def test_a_quantised_model_is_recomputed_as_the_run_ran_it_or_not_at_all(tmp_path: Path, dequantized: bool) -> None:
    model = save_fp8_model(tmp_path / "fp8")
    plain = FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    made = make_run(
        tmp_path / "run",
        num_layers=4,
        hidden_size=128,
        dtype="float32",
        target_layer_ids=(1, 2),
        states=states_of_model(model, (1, 2), quantization_config=plain),
        model=str(model),
    )
    asked = made.config.model.model_copy(update={"quantization": "fp8", "dequantized": dequantized})
    made.config = made.config.model_copy(update={"model": asked})
    (made.folder / names.RUN_JSON).write_text(made.config.model_dump_json())
    made.finish()
    if dequantized:
        report = verify(made.folder, recompute=2)
        assert report.ok, report.lines()
        return
    with pytest.raises(ModelError, match="the run used the fp8 weights natively, which this machine can't"):
        verify(made.folder, recompute=2)
