"""`hiddenq sample`: what a person sees."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hiddenq.reader import open_run, show_sample
from hiddenq.reader.show import CLOSE, OPEN, layer_norms
from tests.support.command import exit_status
from tests.support.made_run import MadeRun
from tests.support.models import tiny_tokenizer

Make = Callable[..., MadeRun]


def printed(renderable: object, *, colour: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=110, force_terminal=colour, color_system="standard" if colour else None)
    console.print(renderable)
    return file.getvalue()


def test_a_sample_shows_its_text_its_mask_by_colour_and_its_norms_by_layer(model_run: MadeRun) -> None:
    run = open_run(model_run.folder)
    sample_id = max(model_run.samples, key=lambda each: len(model_run.samples[each].input_ids))
    sample = model_run.samples[sample_id]
    shown = printed(show_sample(run, sample_id))
    assert f"sample {sample_id} of run made: {len(sample.input_ids)} tokens" in shown
    assert model_run.shard_of(sample_id) in shown
    for layer, slot in ((1, 0), (2, 1), (4, 2)):
        median = float(sample.hidden_states[:, slot].bfloat16().float().norm(dim=-1).median())
        assert any(f"layer {layer}" in line and f"{median:.3g}" in line for line in shown.splitlines())
    assert "final" in shown
    tokenizer = tiny_tokenizer()
    visible = [piece for piece in map(tokenizer.decode, sample.input_ids.tolist()) if piece.isalnum()]
    assert visible
    assert all(piece in shown for piece in visible)
    supervised = [token for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True) if mask]
    marked = "".join(shown.split())
    marked = marked[marked.index(OPEN) + 1 : marked.index(CLOSE)]
    wanted = [char for char in tokenizer.decode(supervised) if char.isalnum()]
    assert [char for char in marked if char.isalnum()] == wanted, "marked where there are no colours"
    coloured = printed(show_sample(run, sample_id), colour=True)
    assert OPEN not in coloured
    assert "\x1b[1;32m" in coloured
    assert "\x1b[2m" in coloured


def test_without_a_tokenizer_ids_stand_for_the_text_and_a_long_one_is_cut(make: Make) -> None:
    made = make(model="/nowhere/model", min_length=20, max_length=20)
    shown = printed(show_sample(open_run(made.folder), 0, max_tokens=5))
    assert " ".join(str(token) for token in made.samples[0].input_ids[:5].tolist()) in shown
    assert "and 15 more tokens" in shown


def test_a_character_of_several_tokens_is_shown_whole(make: Make, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("plain 日本 🙂 text")
    assert any("\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token]) for token in ids)
    tokenizer.save_pretrained(tmp_path / "model")
    made = make(
        model=str(tmp_path / "model"), token_rows=[ids], num_samples=1, rejected_rows=(), vocab_size=512, max_length=40
    )
    made.samples[0].loss_mask[:] = 0
    made.write_shards()
    assert "plain 日本 🙂 text" in printed(show_sample(open_run(made.folder), 0))


def test_ids_that_no_vocabulary_has_are_shown_as_numbers(make: Make, model_folder: Path) -> None:
    made = make(model=str(model_folder), num_samples=1, rejected_rows=(), min_length=8)
    made.samples[0].input_ids[-1] = -5
    made.samples[0].loss_mask[:] = 0
    made.write_shards()
    assert " -5" in printed(show_sample(open_run(made.folder), 0))


def test_control_characters_do_not_reach_the_terminal(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    monkeypatch.setattr("hiddenq.reader.show.load_decoder", lambda _model: lambda ids: "\x1b[2J\x07\u202e" * len(ids))
    shown = printed(show_sample(open_run(made.folder), 0))
    assert "\N{REPLACEMENT CHARACTER}" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_a_sample_that_is_not_there_is_a_key_error(make: Make) -> None:
    with pytest.raises(KeyError, match="sample 2 is not in run made"):
        show_sample(open_run(make().folder), 2)


def test_a_sample_that_is_not_there_yet_is_told_from_one_that_never_will_be(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(num_committed=2)
    run = open_run(made.folder)
    missing = next(sample_id for sample_id in made.samples if sample_id not in run)
    text = f"{run.num_not_there}"
    assert run.num_not_there == len(made.samples) - len(run) > 0
    with pytest.raises(KeyError, match=f"{text} not there yet"):
        show_sample(run, missing)
    assert exit_status(["sample", str(missing), "--out", str(made.folder)]) == 2
    assert f"({text} of its samples are not there yet)" in capsys.readouterr().err


def test_norms_are_those_of_the_states(make: Make) -> None:
    made = make(dtype="float32")
    norms = layer_norms(open_run(made.folder)[0], (1, 3))
    assert list(norms) == ["layer 1", "layer 3", "final"]
    assert torch.allclose(norms["layer 3"], made.samples[0].hidden_states[:, 1].norm(dim=-1))
