"""Only the language decoder is loaded, all of it, in the numbers asked for; anything else is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForImageTextToText, PreTrainedConfig

from gpu_worker.decoder import count_layers, find_decoder
from gpu_worker.kernels import choose_attention
from gpu_worker.loading import load_decoder
from hiddenq.contracts.errors import ModelError
from tests.support.architectures import MORE_WRAPPERS, WRAPPERS
from tests.support.models import (
    VOCAB_SIZE,
    add_quantization,
    build_base_model,
    save_fp8_model,
    save_tiny_model,
    tiny_config,
    write_config,
)

_SAVED = [(name, tied) for name in WRAPPERS for tied in (False, True)] + [(name, False) for name in MORE_WRAPPERS]
_TINY_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "embed_dim": 32, "num_heads": 2, "out_hidden_size": 64, "image_size": 28, "patch_size": 14, "in_channels": 3,
    "num_position_embeddings": 16, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip


def wrapper_config(name: str, *, tied: bool) -> PreTrainedConfig:
    """A tiny vision wrapper around a tiny decoder."""
    decoder = tiny_config((WRAPPERS | MORE_WRAPPERS)[name], tie_word_embeddings=tied).to_dict()
    parts: dict[str, Any] = {"text_config": decoder}
    for part, fields in CONFIG_MAPPING[name]().to_dict().items():
        if isinstance(fields, dict) and part.endswith("_config") and part != "text_config":
            parts[part] = {key: _TINY_VISION.get(key, value) for key, value in fields.items()}
    if name == "internvl":
        parts["vision_config"] |= {"image_size": [28, 28], "patch_size": [14, 14]}
    return CONFIG_MAPPING[name](**parts, tie_word_embeddings=tied)


@pytest.mark.parametrize(("name", "tied"), [(name, tied) for name, tied in _SAVED if name in CONFIG_MAPPING])
def test_a_wrappers_decoder_is_loaded_whole_and_alone(name: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = AutoModelForImageTextToText.from_config(wrapper_config(name, tied=tied))
    whole.save_pretrained(tmp_path)
    loaded = load_decoder(str(tmp_path), dtype=torch.float32)
    [inside] = [module for module in whole.modules() if type(module) is type(loaded.model)]
    expected, found = inside.state_dict(), loaded.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert find_decoder(loaded.model, VOCAB_SIZE).num_layers == 4


def test_a_checkpoint_without_one_of_the_decoders_weights_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the decoder's 38 weights: layers.2.mlp.up_proj.weight"):
        load_decoder(str(folder), dtype=torch.float32)


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has another shape for 1 of .*norm\.weight"):
        load_decoder(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("change", [lambda weight: None, lambda weight: weight[:, :-2].contiguous()])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_one_experts_weight_that_is_missing_or_of_another_shape_is_named(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None], tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", name)
    weights = load_file(folder / "model.safetensors")
    expert = next(key for key in weights if "layers.2." in key and ".experts.1." in key)
    changed = change(weights.pop(expert))
    save_file(weights | ({} if changed is None else {expert: changed}), folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"checkpoint.* layers\.2\.mlp\.experts\.(gate_up|down)_proj") as refused:
        load_decoder(str(folder), dtype=torch.float32)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_size": "big"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "swoosh"}, "no model can be built of its config: KeyError: 'swoosh'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "built of its config: KeyError: 'spiral'"),
    ],
)
def test_a_config_that_no_model_can_be_built_of_is_refused_in_one_line(
    fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", tiny_config("llama"), **fields)
    with pytest.raises(ModelError, match=f"--model {folder}: .*{text}") as refused:
        load_decoder(str(folder), dtype=torch.float32)
    assert "\n" not in str(refused.value)


class Marker:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_a_checkpoint_of_pickles_is_refused_in_one_line_and_never_opened(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "mark"
    pickled = folder / "pytorch_model-00001-of-00001.bin" if name.endswith(".json") else folder / name
    torch.save({"model.norm.weight": Marker(mark)}, pickled)
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps({"weight_map": {"model.norm.weight": pickled.name}}))
    with pytest.raises(ModelError, match="its weights are no safetensors") as caught:
        load_decoder(str(folder), dtype=torch.float32)
    assert len(str(caught.value).splitlines()) == 1
    assert not mark.exists()


def test_pickles_beside_safetensors_are_left_alone_and_nothing_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    mark = tmp_path / "mark"
    torch.save({"model.norm.weight": Marker(mark)}, folder / "pytorch_model.bin")
    load_decoder(str(folder), dtype=torch.float32)
    assert not mark.exists()
    asked: list[Any] = []

    def from_pretrained(path: str, **arguments: Any) -> Any:
        asked.append(arguments["use_safetensors"])
        raise OSError("no")

    monkeypatch.setattr(AutoModel, "from_pretrained", from_pretrained)
    with pytest.raises(ModelError, match="no"):
        load_decoder(str(folder), dtype=torch.float32)
    assert asked == [True], "of a hub model, too, whose files are not here to be looked at"


def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    with pytest.raises(ModelError, match=f"--model {folder}: ") as caught:
        load_decoder(str(folder), dtype=torch.float32)
    assert len(str(caught.value).splitlines()) == 1


def test_layer_ids_are_checked_before_any_weight_is_read(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "no-weights", tiny_config("llama"))
    with pytest.raises(ModelError, match="layer 7 does not exist; this model has 4 layers, ids 0 to 3"):
        load_decoder(str(folder), dtype=torch.float32, target_layer_ids=(1, 7))


@pytest.mark.parametrize("name", ["longcat_flash", "llama", "jamba", "mamba2", "opt"])
def test_layers_are_counted_without_weights(name: str) -> None:
    """Not believed: longcat_flash's config counts two for each element of its list in some versions."""
    config = tiny_config(name)
    with torch.device("meta"):
        counted = count_layers(AutoModel.from_config(config))
    assert counted == find_decoder(build_base_model(config), VOCAB_SIZE).num_layers


@pytest.mark.parametrize("name", ["gpt_oss", "mamba2", "mimo_v2_flash"])
def test_models_without_sdpa_load_with_what_they_have(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", name)
    loaded = load_decoder(str(folder), dtype=torch.float32)
    assert loaded.attention == "eager"
    find_decoder(loaded.model, VOCAB_SIZE)


def test_the_fastest_attention_that_a_model_supports_is_tried_first() -> None:
    class Everything:
        _supports_sdpa = _supports_flash_attn = True

    class OnlyFlash:
        _supports_flash_attn = True

    flash = ["flash_attention_2"]
    assert choose_attention(Everything, "auto", on_gpu=True, available=flash) == ["sdpa", "flash_attention_2", "eager"]
    assert choose_attention(OnlyFlash, "auto", on_gpu=True, available=flash) == ["flash_attention_2", "eager"]
    assert choose_attention(OnlyFlash, "auto", on_gpu=False, available=flash) == ["eager"]
    assert choose_attention(Everything, "eager", on_gpu=True, available=flash) == ["eager"]


def test_an_attention_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"FlashAttention2 .*doesn't seem to be installed") as refusal:
        load_decoder(str(folder), dtype=torch.float32, attention="flash_attention_2")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("name", "text"), [("t5", "encoder-decoder"), ("missing", "no such folder")])
def test_what_is_no_causal_decoder_is_refused(name: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    if name == "t5":
        write_config(folder, CONFIG_MAPPING["t5"]())
    with pytest.raises(ModelError, match=text):
        load_decoder(str(folder), dtype=torch.float32)


def test_remote_code_is_not_run_unless_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "brought", "auto_map": {"AutoConfig": "brought.Config", "AutoModel": "brought.Model"}}
        )
    )
    (folder / "brought.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="which is not run unless you give --trust-remote-code"):
        load_decoder(str(folder), dtype=torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
         r"quantised \(fp8\) and can't run so here .*--dequantize"),
        ({"quant_method": "mxfp4"}, r"quantised \(mxfp4\) and can't run so here .*--dequantize"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "awq needs a package: .*gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
         "gptq needs a package: .*(optimum|gptqmodel|GPTQ)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes needs a package: .*bitsandbytes"),
        ({"quant_method": "marvellous"}, r"quantised by marvellous, which Transformers [\d.]+ does not know"),
        ({"bits": 4}, "quantised by unknown, which can't run here: .*no `quant_method`"),
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU, and what is installed for it, may run these")
def test_a_quantised_checkpoint_that_cannot_run_here_is_refused_before_its_weights_load(
    fields: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    add_quantization(folder, fields)
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("its weights were read"))
    with pytest.raises(ModelError, match=text) as refused:
        load_decoder(str(folder), dtype=torch.float32)
    assert "\n" not in str(refused.value)


def test_what_was_dequantised_in_silence_is_refused_once_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.quantization.check_runs_here", lambda *_: None)
    with pytest.raises(ModelError, match=r"quantised \(fp8\) and can't run so here .*--dequantize"):
        load_decoder(str(save_fp8_model(tmp_path / "model")), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_checkpoint_is_dequantised_when_asked_and_says_so(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load_decoder(str(save_fp8_model(tmp_path / "model")), dtype=dtype, dequantize=True)
    assert loaded.quantization == "fp8 (dequantized)"
    assert {weight.dtype for weight in loaded.model.parameters()} == {dtype}
    find_decoder(loaded.model, VOCAB_SIZE)


def test_a_model_that_does_not_fit_says_how_to_spread_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")

    folder = save_tiny_model(tmp_path / "model")
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"does not fit into GPU memory: .*64.00 GiB.; --gpus-per-worker N"):
        load_decoder(str(folder), dtype=torch.float32)


def test_only_matrix_weights_count_as_operations(tmp_path: Path) -> None:
    loaded = load_decoder(str(save_tiny_model(tmp_path / "model")), dtype=torch.float32)
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    assert loaded.num_parameters == 4 * layer


def test_experts_that_a_token_is_not_sent_to_do_not_count_as_operations(tmp_path: Path) -> None:
    dense = load_decoder(str(save_tiny_model(tmp_path / "dense", "qwen3")), dtype=torch.float32)
    mixture = load_decoder(str(save_tiny_model(tmp_path / "mixture", "qwen3_moe")), dtype=torch.float32)
    experts = [part for part in mixture.model.modules() if type(part).__name__ == "Qwen3MoeExperts"]
    stored = sum(weight.numel() for part in experts for weight in part.parameters())
    router = len(experts) * 4 * 64
    attention = dense.num_parameters - 4 * 3 * 64 * 96
    assert mixture.num_parameters == attention + router + stored * 2 // 4
