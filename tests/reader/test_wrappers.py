"""Runs over the language decoder of a vision model: recomputed from, and with the head of, the whole checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from gpu_worker.target_head import write_target_head
from hiddenq.reader import open_run, verify
from hiddenq.storage import open_store
from tests.gpu_worker.test_loading import wrapper_config
from tests.support.made_run import make_run


@pytest.mark.parametrize(("name", "tied"), [("gemma3", True), ("qwen3_vl", False), ("qwen3_5", True)])
def test_states_agree_with_the_whole_model_and_so_do_its_logits(name: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = AutoModelForImageTextToText.from_config(wrapper_config(name, tied=tied)).eval()
    whole.save_pretrained(tmp_path / "model")
    layers = whole.get_decoder().layers

    def states(_sample_id: int, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs: list[torch.Tensor] = []
        handles = [
            layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
            for layer in layers
        ]
        with torch.no_grad():
            whole.get_decoder()(input_ids=input_ids[None], use_cache=False)
        for handle in handles:
            handle.remove()
        return torch.stack([outputs[1][0], outputs[2][0]], dim=1), outputs[-1][0]

    made = make_run(
        tmp_path / "run",
        num_samples=4,
        vocab_size=512,
        num_layers=4,
        hidden_size=64,
        dtype="float32",
        target_layer_ids=(1, 2),
        states=states,
        model=str(tmp_path / "model"),
    )
    report = verify(made.folder, recompute=4)
    assert report.ok, report.lines()
    assert report.recomputed is not None
    assert report.recomputed.worst_difference < 1e-5

    write_target_head(open_store(made.folder), made.config)
    run = open_run(made.folder)
    sample = run[0]
    assert sample.final_hidden_state is not None
    with torch.no_grad():
        wanted = whole(input_ids=sample.input_ids[None]).logits[0]
    assert torch.allclose(run.target_head.logits(sample.final_hidden_state), wanted, rtol=1e-5, atol=1e-6)
