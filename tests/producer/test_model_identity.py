"""A model's identity: what it is made of, and what changes it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from hiddenq.contracts.errors import ModelError, UsageError
from hiddenq.contracts.run import ModelIdentity
from hiddenq.model_identity import identify_model
from tests.support.models import tiny_config


def save(folder: Path, config: Any, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | fields))
    (folder / "model.safetensors").write_bytes(b"weights" * 10_000)
    return folder


def index(folder: Path, *files: str) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {f"layer.{number}": file for number, file in enumerate(files)}}))
    return path


def identify(folder: Path, **options: Any) -> ModelIdentity:
    return identify_model(str(folder), **options).identity


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    identity = identify(save(tmp_path, tiny_config("qwen3", max_position_embeddings=777)))
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size) == (4, 64, 512)
    assert (identity.max_positions, identity.revision, identity.quantization) == (777, None, None)


@pytest.mark.parametrize("name", ["Gemma3Config", "Qwen3VLConfig", "Mistral3Config", "LlavaConfig"])
def test_a_wrapped_decoder_gives_its_own_sizes(tmp_path: Path, name: str) -> None:
    config = getattr(transformers, name)()
    text = config.get_text_config(decoder=True)
    identity = identify(save(tmp_path, config))
    assert (identity.num_layers, identity.hidden_size) == (text.num_hidden_layers, text.hidden_size)


def test_names_of_older_architectures_are_understood(tmp_path: Path) -> None:
    identity = identify(save(tmp_path, tiny_config("gpt2")))
    assert (identity.num_layers, identity.hidden_size, identity.max_positions) == (4, 64, 512)


def test_layers_are_counted_as_the_model_lists_them(tmp_path: Path) -> None:
    config = transformers.LongcatFlashConfig(num_layers=3)
    assert config.num_hidden_layers != 3
    assert identify(save(tmp_path, config)).num_layers == 3


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("float16", "auto", "float16"), ("float32", "auto", "float32"), (None, "auto", "bfloat16"),
        ("float8_e4m3fn", "auto", "bfloat16"), ("float32", "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_auto_is_the_configs_dtype(tmp_path: Path, stored: str | None, asked: Any, expected: str) -> None:
    config = tiny_config("llama").to_dict() | {"dtype": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"w")
    assert identify(tmp_path, dtype=asked).dtype == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 1024),
    ],
)
def test_the_limit_counts_what_rotary_scaling_adds(tmp_path: Path, rope: dict[str, Any], expected: int) -> None:
    assert identify(save(tmp_path, tiny_config("llama"), rope_parameters=rope)).max_positions == expected


def test_a_model_without_positions_has_no_limit(tmp_path: Path) -> None:
    assert identify(save(tmp_path, tiny_config("mamba"))).max_positions is None


def test_the_config_digest_is_blind_to_what_leaves_the_states_alone(tmp_path: Path) -> None:
    config = tiny_config("llama")
    base = identify(save(tmp_path, config)).config_digest
    for harmless in ({"transformers_version": "9"}, {"use_cache": False}, {"dtype": "float16"}):
        assert identify(save(tmp_path, config, **harmless)).config_digest == base
    assert identify(save(tmp_path, config, rms_norm_eps=1e-3)).config_digest != base


def test_the_weights_digest_changes_with_size_name_and_bytes(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_config("llama"))
    weights = folder / "model.safetensors"
    digests = [identify(folder).weights_digest]
    weights.write_bytes(b"Weights" + b"weights" * 9_999)
    digests.append(identify(folder).weights_digest)
    weights.write_bytes(b"weights" * 10_001)
    digests.append(identify(folder).weights_digest)
    weights.rename(folder / "other.safetensors")
    digests.append(identify(folder).weights_digest)
    assert len(set(digests)) == 4
    (folder / "optimizer.pt").write_bytes(b"x")
    assert identify(folder).weights_digest == digests[-1]


def test_quantisation_is_recorded(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_config("llama"), quantization_config={"quant_method": "fp8"})
    assert identify(folder).quantization == "fp8"


def test_running_a_quantised_model_natively_or_not_are_two_models(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_config("llama"), quantization_config={"quant_method": "fp8"})
    assert (identify(folder).dequantized, identify(folder, dequantize=True).dequantized) == (False, True)


def test_dequantising_what_is_not_quantised_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_config("llama"))
    with pytest.raises(UsageError, match=r"--dequantize: has no effect, .* is not quantised; leave it out"):
        identify(folder, dequantize=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.write_text("{}"), "a file; name the folder of a transformers checkpoint"),
        (lambda folder: folder.mkdir(), "the folder holds no config.json"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")), "its config.json can't be used"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text('{"model_type": "no such"}')),
         "its config.json can't be used"),
        (lambda folder: (save(folder, tiny_config("llama")), (folder / "model.safetensors").unlink()),
         "the folder holds no weights"),
        (lambda folder: (save(folder, tiny_config("llama")),
                         (folder / "model.safetensors").rename(folder / "pytorch_model.bin")),
         r"its weights are no safetensors \(found pytorch_model\.bin\), and nothing else is ever loaded, because"),
        (lambda folder: (save(folder, tiny_config("llama")), (folder / "model.safetensors").unlink(),
                         (folder / "model.safetensors").symlink_to("/nowhere")),
         "model.safetensors can't be read: No such file"),
        (lambda folder: (save(folder, tiny_config("llama")), (folder / "second.safetensors").mkdir()),
         "second.safetensors can't be read: Is a directory"),
        (lambda folder: (folder.mkdir(), (folder / "model-Q4.gguf").write_bytes(b"GGUF")),
         r"no config\.json \(found model-Q4\.gguf, which is never loaded\); name a transformers checkpoint"),
        (lambda folder: (save(folder, tiny_config("llama")), (folder / "adapter_config.json").write_text("{}")),
         r"holds an adapter \(adapter_config\.json\), not a whole model; merge it into its base model"),
        (lambda folder: (save(folder, tiny_config("llama")),
                         (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
                         index(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")),
         r"index\.json names what is not there: model-00002-of-00002\.safetensors; the copy is not whole"),
        (lambda folder: (save(folder, tiny_config("llama")),
                         (folder / "model.safetensors").rename(folder / "m.safetensors"),
                         (folder / "model.safetensors.index.json").write_text("[]")),
         r"index\.json can't be used \(TypeError\); copy the checkpoint again"),
        (lambda folder: (save(folder, tiny_config("llama")), (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")),
         r"model\.safetensors is a pointer of Git LFS; run `git lfs pull`"),
        (lambda folder: save(folder, transformers.T5Config()), "t5 is an encoder-decoder; hiddenq reads decoders only"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_used_is_one_line(tmp_path: Path, make: Any, text: str) -> None:
    folder = tmp_path / "model"
    make(folder)
    with pytest.raises(ModelError, match=text) as refused:
        identify(folder)
    assert "\n" not in str(refused.value)


def test_a_url_is_no_model_and_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a folder or a hub id, found a URL") as refused:
        identify_model("https://me:planted@host/model")
    assert "planted" not in str(refused.value)


def test_a_hub_out_of_reach_is_found_out_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:21002")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    begin = time.monotonic()
    with pytest.raises(ModelError, match="the hub can't be reached from here"):
        identify_model("owner/no-such-model")
    assert time.monotonic() - begin < 5
