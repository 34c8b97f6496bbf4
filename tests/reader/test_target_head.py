"""The target's head: what is written from a checkpoint gives the model's logits, in every architecture.

The invariant: the states are the model's own, recorded before its final norm; logits made from them with the file
alone equal those of the whole model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from gpu_worker.decoder import find_decoder
from gpu_worker.head_probe import describe_head, take_layers_out
from gpu_worker.target_head import write_target_head
from hiddenq.contracts import names
from hiddenq.contracts.errors import DamagedShard, ModelError, RunMismatch, UsageError
from hiddenq.contracts.run import Dtype, RunConfig
from hiddenq.reader import open_run
from hiddenq.storage import open_store
from tests.support.made_run import MadeRun, make_run
from tests.support.models import build_model, save_tiny_model, tiny_config

Make = Callable[..., MadeRun]
TOKENS = torch.arange(3, 27)
SCALED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 20.0},
}
CASES = ["llama", "qwen3", "cohere", "cohere2", "gemma2", "gemma3_text", "granite", "nanochat", "gpt2", "gptj"]
CASES += ["minicpm3", "vaultgemma", "recurrent_gemma", "nemotron", "olmo", "olmo2", "phi", "qwen3_next", "mamba", "opt"]


def states_and_logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """(state before the final norm [S, H], logits [S, V]) of a whole causal model."""
    norm = find_decoder(model.base_model, model.config.vocab_size).norm
    assert norm is not None
    states: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _module, args: states.append(args[0][0]))
    with torch.no_grad():
        logits = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    handle.remove()
    return states[-1], logits


def config_of(folder: Path, model: str, dtype: Dtype) -> RunConfig:
    return make_run(folder, hidden_size=64, dtype=dtype, num_samples=1, rejected_rows=(), model=model).config


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_models(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path / "model", name, **SCALED.get(name, {}))
    config = config_of(tmp_path / "run", str(folder), "float32")
    store = open_store(tmp_path / "run")
    assert write_target_head(store, config)
    assert not write_target_head(store, config), "it is written once"
    model = build_model(tiny_config(name, **SCALED.get(name, {})))
    states, wanted = states_and_logits(model)
    given = open_run(tmp_path / "run").target_head.logits(states)
    assert torch.allclose(given, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_models_in_bfloat16_to_one_rounding(tmp_path: Path, name: str) -> None:
    model = build_model(tiny_config(name, **SCALED.get(name, {})))
    bare = build_model(tiny_config(name, **SCALED.get(name, {})))
    take_layers_out(bare)
    head, tensors = describe_head(bare, config_of(tmp_path / "run", name, "bfloat16"))
    states, wanted = states_and_logits(model.to(torch.bfloat16))
    normed = head.norm.apply(states, tensors.get("norm.weight"), tensors.get("norm.bias"))
    lm_head = tensors["embed_tokens.weight" if head.tied else "lm_head.weight"]
    raw = nn.functional.linear(normed.to(lm_head.dtype), lm_head, tensors.get("lm_head.bias"))
    apart = (head.finish_logits(raw).float() - wanted.float()).abs().max()
    assert apart <= 2**-7 * wanted.float().abs().max()


def test_scales_softcaps_and_offsets_are_recorded_as_the_config_states_them(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "made/model", "float32")
    heads = {}
    for name in ("granite", "cohere2", "gemma2", "llama"):
        model = build_model(tiny_config(name, **SCALED.get(name, {})))
        take_layers_out(model)
        heads[name], _ = describe_head(model, config)
    assert (heads["granite"].logit_scale, heads["granite"].embedding_scale) == (1 / 8, 12.0)
    assert heads["cohere2"].logit_scale == 0.25
    assert heads["cohere2"].norm.kind == "layer"
    assert (heads["gemma2"].logit_softcap, heads["gemma2"].norm.weight_offset) == (20.0, 1)
    assert heads["gemma2"].embedding_scale == pytest.approx(8.0)
    assert heads["gemma2"].tied
    assert (heads["llama"].logit_scale, heads["llama"].logit_softcap, heads["llama"].embedding_scale) == (1, None, 1)
    assert not heads["llama"].tied


@pytest.mark.parametrize("softcap", [2.0, 5.0, 9.0, 30.0, 50.0, 200.0])
def test_a_softcap_of_any_size_is_found(tmp_path: Path, softcap: float) -> None:
    model = build_model(tiny_config("gemma2", final_logit_softcapping=softcap))
    take_layers_out(model)
    head, _ = describe_head(model, config_of(tmp_path / "run", "made/model", "float32"))
    assert (head.logit_scale, head.logit_softcap) == (1.0, softcap)


def test_a_head_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "made/model", "float32")
    model = build_model(tiny_config("llama"))
    take_layers_out(model)
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: forward(hidden).abs()
    with pytest.raises(ModelError, match="its final norm, LlamaRMSNorm, is neither"):
        describe_head(model, config)
    model.model.norm.forward = forward
    whole = model.forward

    def bent(**arguments: object) -> object:
        output = whole(**arguments)
        output.logits = output.logits.pow(3)
        return output

    model.forward = bent
    with pytest.raises(ModelError, match="no scale and softcap turn lm_head's output into its logits"):
        describe_head(model, config)


def test_a_checkpoint_without_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    config = config_of(tmp_path / "run", str(folder), "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model.safetensors"):
        write_target_head(open_store(tmp_path / "run"), config)
    missing = config.model_copy(update={"model": config.model.model_copy(update={"model": "/nowhere"})})
    with pytest.raises(ModelError, match="--model /nowhere: no such folder on this host"):
        write_target_head(open_store(tmp_path / "run"), missing)


def test_a_run_without_a_head_says_what_to_do(make: Make) -> None:
    with pytest.raises(UsageError, match="the same `hiddenq run` command as before again, with --target-head added"):
        _ = open_run(make().folder).target_head


def test_a_damaged_or_foreign_head_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    config = config_of(tmp_path / "run", str(folder), "float32")
    write_target_head(open_store(tmp_path / "run"), config)
    path = tmp_path / "run" / names.TARGET_HEAD
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(DamagedShard, match="by its header"):
        _ = open_run(tmp_path / "run").target_head
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    with pytest.raises(DamagedShard, match="in an object of 10"):
        _ = open_run(tmp_path / "run").target_head
    path.write_bytes(good.replace(config.model.weights_digest.encode(), b"f" * 32))
    with pytest.raises(RunMismatch, match="not of the run's model"):
        _ = open_run(tmp_path / "run").target_head
