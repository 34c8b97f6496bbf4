"""Exports: names, shapes, dtypes, values and order of each format; resumption; what is refused.

The invariant: every value in an export follows from what was put into the run, computed here anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hiddenq.contracts.errors import DamagedShard, UsageError
from hiddenq.reader import open_run
from hiddenq.reader.exports import STATEMENT, ExportSettings, ExportStatement, export
from hiddenq.reader.exports.vocabulary import count_tokens
from tests.support.command import exit_status
from tests.support.made_run import MadeRun
from tests.support.models import build_model, tiny_config

Make = Callable[..., MadeRun]


def post_norm(states: torch.Tensor) -> torch.Tensor:
    """The tiny model's own final norm in bfloat16."""
    norm = build_model(tiny_config("llama", num_hidden_layers=6)).model.norm.to(torch.bfloat16)
    with torch.no_grad():
        result: torch.Tensor = norm(states.bfloat16())
    return result


def statement(folder: Path) -> ExportStatement:
    return ExportStatement.parse((folder / STATEMENT).read_bytes())


def load(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = torch.load(path, weights_only=True)
    return fields


def test_specforge_eagle3(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="specforge"), tmp_path)
    files = sorted(tmp_path.rglob("*.ckpt"))
    assert {path.relative_to(tmp_path).as_posix() for path in files} == {
        f"rows_0-2000/data_{row}.ckpt" for row in range(16)
    }
    for row, sample_id in enumerate(sorted(model_run.samples)):
        fields, sample = load(tmp_path / f"rows_0-2000/data_{row}.ckpt"), model_run.samples[sample_id]
        assert set(fields) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
        assert torch.equal(fields["input_ids"], sample.input_ids)
        assert torch.equal(fields["loss_mask"], sample.loss_mask)
        assert fields["input_ids"].dtype == fields["loss_mask"].dtype == torch.int64
        assert torch.equal(fields["aux_hidden_state"], sample.hidden_states.bfloat16().flatten(1)[None])
        assert torch.equal(fields["hidden_state"], post_norm(sample.final_hidden_state)[None])


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_specforge_dflash_family_leaves_out_what_it_can_not_load(
    make: Make, model_run: MadeRun, method: Any, tmp_path: Path
) -> None:
    report = export(model_run.folder, ExportSettings(format="specforge", method=method), tmp_path)
    usable = [
        sample_id
        for sample_id, sample in model_run.samples.items()
        if any(a and b for a, b in zip(sample.loss_mask[1:].tolist(), sample.loss_mask[:-1].tolist(), strict=True))
    ]
    assert len(list(tmp_path.rglob("*.ckpt"))) == len(usable)
    assert set(report.statement.skipped_sample_ids) == set(model_run.samples) - set(usable)
    order = np.load(tmp_path / "sample_ids.npy").tolist()
    row = order.index(usable[0])
    fields, sample = load(tmp_path / f"rows_0-2000/data_{row}.ckpt"), model_run.samples[usable[0]]
    assert fields["hidden_states"].shape == (len(sample.input_ids), 3 * 64)
    assert ("target_last_hidden_states" in fields) == (method == "dspark")
    if method == "dspark":
        assert torch.equal(fields["target_last_hidden_states"], post_norm(sample.final_hidden_state)[None])


def test_a_sample_that_a_method_can_not_load_is_named(make: Make, tmp_path: Path) -> None:
    made = make(min_length=1, max_length=1)
    report = export(made.folder, ExportSettings(format="specforge", method="dflash"), tmp_path / "out")
    assert report.statement.skipped_sample_ids == tuple(sorted(made.samples))
    assert statement(tmp_path / "out").skipped_sample_ids == tuple(sorted(made.samples))


@pytest.mark.parametrize("prenorm", [False, True])
def test_modelopt(model_run: MadeRun, tmp_path: Path, prenorm: bool) -> None:
    settings = ExportSettings(format="modelopt", prenorm=prenorm, draft_vocab_size=64)
    export(model_run.folder, settings, tmp_path)
    files = list(tmp_path.rglob("*.pt"))
    assert {path.stem for path in files} == {str(sample_id) for sample_id in model_run.samples}, "no stray .pt"
    for path in files:
        fields, sample = load(path), model_run.samples[int(path.stem)]
        assert fields["conversation_id"] == path.stem
        assert fields["hidden_states_prenorm"] is prenorm
        wanted = sample.final_hidden_state.bfloat16() if prenorm else post_norm(sample.final_hidden_state)
        assert torch.equal(fields["hidden_states"], wanted)
        assert torch.equal(fields["aux_hidden_states"], sample.hidden_states.bfloat16().flatten(1))
        assert torch.equal(fields["input_ids"], sample.input_ids)
        assert torch.equal(fields["loss_mask"], sample.loss_mask)
    assert statement(tmp_path).final_state == ("before the final norm" if prenorm else "after the final norm")


def test_eagle(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="eagle", dtype="float32", draft_vocab_size=8), tmp_path)
    assert {path.suffix for path in (tmp_path / "data").rglob("*")} == {".ckpt"}, "their trainer takes every file"
    for row, sample_id in enumerate(sorted(model_run.samples)):
        fields, sample = load(tmp_path / f"data/data_{row}.ckpt"), model_run.samples[sample_id]
        assert set(fields) == {"input_ids", "hidden_state", "loss_mask"}
        assert fields["hidden_state"].dtype == torch.float32
        assert torch.equal(fields["hidden_state"], post_norm(sample.final_hidden_state).float())


@pytest.mark.parametrize("seq_length", [None, 9])
def test_automodel_dspark(model_run: MadeRun, tmp_path: Path, seq_length: int | None) -> None:
    settings = ExportSettings(format="automodel-dspark", seq_length=seq_length)
    export(model_run.folder, settings, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    longest = max(len(sample.input_ids) for sample in model_run.samples.values())
    length = seq_length or longest
    assert manifest == {
        "format_version": 1,
        "target_model": model_run.config.model.model,
        "target_model_type": "llama",
        "target_vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "seq_length": length,
        "dtype": "bf16",
        "num_samples": 16,
        "shard_size": 16,
        "target_hidden_dim": 192,
        "target_last_hidden_dim": 64,
        "target_layer_ids": [1, 2, 4],
    }
    shard = load_file(tmp_path / "shard-000000.safetensors")
    assert set(shard) == {"input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"}
    assert shard["target_hidden_states"].shape == (16, length, 192)
    for row, sample_id in enumerate(sorted(model_run.samples)):
        sample = model_run.samples[sample_id]
        kept = min(length, len(sample.input_ids))
        assert torch.equal(shard["input_ids"][row, :kept], sample.input_ids[:kept])
        assert torch.equal(shard["loss_mask"][row, :kept], sample.loss_mask[:kept])
        assert torch.equal(shard["target_hidden_states"][row, :kept], sample.hidden_states.bfloat16().flatten(1)[:kept])
        assert torch.equal(shard["target_last_hidden_states"][row, :kept], post_norm(sample.final_hidden_state)[:kept])
        assert not shard["target_hidden_states"][row, kept:].any()
    weights = load_file(tmp_path / "target_weights.safetensors")
    model = build_model(tiny_config("llama", num_hidden_layers=6))
    assert set(weights) == {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight.bfloat16().float())
    assert torch.equal(weights["embed_tokens.weight"], model.model.embed_tokens.weight.bfloat16().float())


def test_speculators_files_hold_the_layers_and_the_state_before_the_norm(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="speculators"), tmp_path)
    for row, sample_id in enumerate(sorted(model_run.samples)):
        fields, sample = load_file(tmp_path / f"hidden_states/hs_{row}.safetensors"), model_run.samples[sample_id]
        assert set(fields) == {"hidden_states", "token_ids"}
        assert torch.equal(fields["token_ids"], sample.input_ids)
        assert torch.equal(fields["hidden_states"][:, :-1], sample.hidden_states.bfloat16())
        assert torch.equal(fields["hidden_states"][:, -1], sample.final_hidden_state.bfloat16())
    said = statement(tmp_path)
    assert said.target_layer_ids == (1, 2, 4)
    assert said.consumer_layer_ids == (2, 3, 5)
    assert said.final_state == "before the final norm"
    assert said.complete


def test_speculators_for_mtp_is_the_final_state_alone(make: Make, tmp_path: Path) -> None:
    made = make(target_layer_ids=())
    export(made.folder, ExportSettings(format="speculators"), tmp_path / "out")
    fields = load_file(tmp_path / "out/hidden_states/hs_0.safetensors")
    assert torch.equal(fields["hidden_states"], made.samples[0].final_hidden_state.bfloat16()[:, None])


def test_speculators_takes_the_last_layer_where_no_final_state_is_stored(make: Make, tmp_path: Path) -> None:
    made = make(target_layer_ids=(1, 5), final_hidden_state=False)
    export(made.folder, ExportSettings(format="speculators"), tmp_path / "out")
    fields = load_file(tmp_path / "out/hidden_states/hs_0.safetensors")
    assert torch.equal(fields["hidden_states"], made.samples[0].hidden_states.bfloat16()[:, [0, 1, 1]])


def test_speculators_fp8_has_one_scale_a_token(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="speculators", dtype="float8_e4m3fn"), tmp_path)
    fields, sample = load_file(tmp_path / "hidden_states/hs_0.safetensors"), model_run.samples[0]
    assert fields["hidden_states"].dtype == torch.float8_e4m3fn
    assert fields["hidden_states_scales"].shape == (len(sample.input_ids), 1, 1)
    given = fields["hidden_states"].float() * fields["hidden_states_scales"]
    wanted = torch.cat([sample.hidden_states, sample.final_hidden_state[:, None]], 1).bfloat16().float()
    assert ((given - wanted).abs() <= wanted.abs().amax((1, 2), keepdim=True) / 16).all()


def test_an_fp8_run_is_exported_in_the_models_dtype(make: Make, tmp_path: Path) -> None:
    made = make(storage_dtype="float8_e4m3fn")
    export(made.folder, ExportSettings(format="speculators"), tmp_path / "out")
    assert load_file(tmp_path / "out/hidden_states/hs_0.safetensors")["hidden_states"].dtype == torch.bfloat16


def test_rows_follow_the_seed_and_never_the_lengths(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="eagle", seed=4), tmp_path / "a")
    export(model_run.folder, ExportSettings(format="eagle", seed=4), tmp_path / "b")
    export(model_run.folder, ExportSettings(format="eagle"), tmp_path / "c")
    orders = [np.load(tmp_path / name / "sample_ids.npy").tolist() for name in "abc"]
    assert orders[0] == orders[1] != orders[2] == sorted(model_run.samples)
    assert sorted(orders[0]) == orders[2]
    lengths = [len(model_run.samples[sample_id].input_ids) for sample_id in orders[0]]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))
    assert "permutation by seed 4" in statement(tmp_path / "a").order
    for row, sample_id in enumerate(orders[0]):
        assert torch.equal(
            load(tmp_path / f"a/data/data_{row}.ckpt")["input_ids"], model_run.samples[sample_id].input_ids
        )


def test_files_are_no_larger_than_their_tensors(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="specforge"), tmp_path)
    for path in tmp_path.rglob("*.ckpt"):
        size = sum(tensor.nbytes for tensor in load(path).values())
        assert path.stat().st_size < size + 4000


def test_an_interrupted_export_goes_on_where_it_was(model_run: MadeRun, tmp_path: Path) -> None:
    settings = ExportSettings(format="specforge")
    first = export(model_run.folder, settings, tmp_path)
    assert first.num_kept == 0
    files = sorted(tmp_path.rglob("*.ckpt"))
    before = {path: path.read_bytes() for path in files}
    for path in files[:5]:
        path.unlink()
    (tmp_path / STATEMENT).write_text(statement(tmp_path).model_copy(update={"complete": False}).model_dump_json())
    again = export(model_run.folder, settings, tmp_path)
    assert (again.num_written, again.num_kept) == (5, first.num_written - 5)
    assert {path: path.read_bytes() for path in files} == before
    assert export(model_run.folder, settings, tmp_path).num_written == 0


def test_an_export_that_fails_is_not_called_complete_and_leaves_no_half_file(make: Make, tmp_path: Path) -> None:
    made = make()
    path = made.folder / made.shard_keys[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedShard, match=r"damaged .*delete the object"):
        export(made.folder, ExportSettings(format="speculators"), tmp_path / "out", threads=2)
    assert not statement(tmp_path / "out").complete
    for written in (tmp_path / "out").rglob("*.safetensors"):
        load_file(written)
    path.write_bytes(whole)
    export(made.folder, ExportSettings(format="speculators"), tmp_path / "out")
    assert statement(tmp_path / "out").complete


def test_another_export_is_never_mixed_in(model_run: MadeRun, make: Make, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="eagle"), tmp_path / "out")
    with pytest.raises(UsageError, match=r"another export is there \(settings: seed None there, seed 1 asked for\)"):
        export(model_run.folder, ExportSettings(format="eagle", seed=1), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious.txt").write_text("x")
    with pytest.raises(UsageError, match=r"not empty \(precious.txt is there\)"):
        export(model_run.folder, ExportSettings(format="eagle"), tmp_path / "full")


def test_an_export_of_a_going_run_says_what_it_lacks(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(num_committed=2)
    command = ("export", "--out", str(made.folder), "--to", "speculators", "--dest")
    num_missing = len(made.samples) - len(made.sample_ids[0] + made.sample_ids[1])
    assert exit_status([*command, str(tmp_path / "half")]) == 1
    assert f"not complete: the store lacks {num_missing} samples of the run so far" in capsys.readouterr().out
    made = make()
    assert exit_status(["export", "--out", str(made.folder), *command[3:], str(tmp_path / "whole")]) == 0
    assert "not complete" not in capsys.readouterr().out


def test_an_unknown_trainer_is_refused_by_the_options_own_name(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(["export", "--out", "x", "--to", "vllm", "--dest", str(tmp_path / "out")]) == 2
    assert "--to vllm: expected one of speculators, " in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "export", "states/export"])
def test_an_export_into_the_run_itself_is_refused(model_run: MadeRun, below: str) -> None:
    before = sorted(model_run.folder.rglob("*"))
    with pytest.raises(UsageError, match="inside the run, where only the run's own objects may lie"):
        export(model_run.folder, ExportSettings(format="eagle"), model_run.folder / below)
    assert sorted(model_run.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"format": "eagle", "method": "dflash"}, "--method: has no effect on --to eagle"),
        ({"format": "eagle", "link": True}, "--link: has no effect"),
        ({"format": "specforge", "prenorm": True}, "--prenorm: has no effect"),
        ({"format": "specforge", "seq_length": 4}, "--seq-length: has no effect"),
        ({"format": "eagle", "dtype": "float8_e4m3fn"}, "eagle can't load it"),
        ({"format": "eagle", "draft_vocab_size": 513}, "the target's vocabulary has 512"),
    ],
)
def test_settings_without_effect_are_refused(model_run: MadeRun, tmp_path: Path, fields: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        export(model_run.folder, ExportSettings(**fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("run", "fields", "text"),
    [
        ({}, {"format": "specforge"}, "takes three target layers, this run has 2"),
        ({}, {"format": "eagle"}, "with --target-head"),
        ({"target_layer_ids": ()}, {"format": "modelopt", "prenorm": True}, "needs target layers"),
        ({"final_hidden_state": False}, {"format": "speculators"}, "needs the final hidden state, or layer 5"),
    ],
)
def test_what_a_run_can_not_give_is_said_before_anything_is_written(
    make: Make, tmp_path: Path, run: Any, fields: Any, text: str
) -> None:
    made = make(**run)
    with pytest.raises(UsageError, match=text):
        export(made.folder, ExportSettings(**fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_draft_vocabulary_is_the_most_frequent_supervised_tokens(model_run: MadeRun, tmp_path: Path) -> None:
    export(model_run.folder, ExportSettings(format="specforge", draft_vocab_size=32), tmp_path)
    counts = torch.zeros(512, dtype=torch.int64)
    for sample in model_run.samples.values():
        counts += torch.bincount(sample.input_ids[sample.loss_mask == 1], minlength=512)
    assert count_tokens(open_run(model_run.folder)).tolist() == counts.tolist()
    assert torch.load(tmp_path / "token_freq.pt", weights_only=True) == {
        token: int(count) for token, count in enumerate(counts) if count
    }
    d2t, t2d = np.load(tmp_path / "d2t.npy"), np.load(tmp_path / "t2d.npy")
    chosen = sorted(sorted(range(512), key=lambda token: (-int(counts[token]), token))[:32])
    assert (d2t + np.arange(32)).tolist() == chosen
    assert np.flatnonzero(t2d).tolist() == chosen
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    mapping = torch.load(tmp_path / "vocab_mapping.pt", weights_only=True)
    assert torch.equal(mapping["d2t"], torch.from_numpy(d2t))
    assert torch.equal(mapping["t2d"], torch.from_numpy(t2d))


def test_progress_reaches_every_sample(model_run: MadeRun, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export(model_run.folder, ExportSettings(format="eagle"), tmp_path / "out", progress=lambda *pair: seen.append(pair))
    assert seen[-1] == (16, 16)
