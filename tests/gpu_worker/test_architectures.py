"""Right padding without a mask: on every architecture a real token's states equal those of the sample run alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_worker.decoder import find_decoder
from gpu_worker.extraction import Extractor
from gpu_worker.loading import load_decoder
from gpu_worker.selfcheck import TOLERANCES
from gpu_worker.warmup import choose_mode, padding_difference
from hiddenq.contracts.errors import ModelError
from tests.gpu_worker.conftest import difference, extract, shard_format, tiny_decoder, token_rows
from tests.support.architectures import (
    ARCHITECTURES,
    ENCODER_DECODERS,
    NO_DECODER_OF_THEIR_OWN,
    NUM_LAYERS,
    REFUSED,
)
from tests.support.models import VOCAB_SIZE, build_base_model, tiny_config, write_config

KNOWN = [name for name in ARCHITECTURES if name in CONFIG_MAPPING]
LENGTHS = (5, 70, 33)
"""Below, across and above the tiny windows and chunks (16)."""


def test_most_architectures_are_known_to_every_supported_transformers() -> None:
    assert len(KNOWN) >= 120


@pytest.mark.parametrize("name", KNOWN)
def test_padded_rows_equal_the_same_rows_alone(name: str) -> None:
    decoder = tiny_decoder(name)
    layers = shard_format(range(decoder.num_layers))
    mode = choose_mode(decoder, layers, vocab_size=VOCAB_SIZE, attention="sdpa", may_change_attention=True)
    extractor = Extractor(decoder, layers, masked=mode.masked)
    rows = token_rows(LENGTHS)
    together = extract(extractor, rows, padded_length=72).states
    for place in (0, 2):
        alone = extract(extractor, rows[place : place + 1]).states[0]
        assert difference(together[place], alone) < 1e-5
    extractor.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "mamba2", "gpt_oss"])
def test_no_mask_is_needed(name: str) -> None:
    decoder = tiny_decoder(name)
    layers = shard_format(range(decoder.num_layers))
    assert padding_difference(decoder, layers, vocab_size=VOCAB_SIZE, masked=False) < 1e-5


def test_where_only_a_mask_is_right_the_mask_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder("llama")
    monkeypatch.setattr("gpu_worker.warmup.padding_difference", _leaks_unless(masked=True))
    mode = choose_mode(decoder, shard_format([0]), vocab_size=VOCAB_SIZE, attention="sdpa", may_change_attention=True)
    assert (mode.attention, mode.masked) == ("sdpa", True)


def test_a_model_that_padding_always_changes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder("llama")
    monkeypatch.setattr("gpu_worker.warmup.padding_difference", _leaks_unless(masked=None))
    with pytest.raises(ModelError, match=r"LlamaModel is not supported: padding on the right changes .*sdpa: 1.0e\+00"):
        choose_mode(decoder, shard_format([0]), vocab_size=VOCAB_SIZE, attention="sdpa", may_change_attention=False)


def test_the_tolerance_tells_leaking_padding_from_rounding() -> None:
    assert TOLERANCES["float32"] < 1e-2
    assert TOLERANCES["bfloat16"] < 0.5


@pytest.mark.parametrize("name", [name for name in REFUSED if name in CONFIG_MAPPING])
def test_what_is_not_supported_is_refused_in_one_line(name: str) -> None:
    model = build_base_model(tiny_config(name))
    with pytest.raises(ModelError, match=f"^{type(model).__name__} is not supported: .*{REFUSED[name][0]}") as refused:
        _refuse(model)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def _refuse(model: nn.Module) -> None:
    decoder = find_decoder(model, VOCAB_SIZE)
    layers = shard_format(range(NUM_LAYERS))
    choose_mode(decoder, layers, vocab_size=VOCAB_SIZE, attention="sdpa", may_change_attention=True)


def test_an_encoder_is_a_decoder_where_its_config_says_so() -> None:
    decoder = find_decoder(build_base_model(tiny_config("bert", is_decoder=True)), VOCAB_SIZE)
    layers = shard_format(range(NUM_LAYERS))
    mode = choose_mode(decoder, layers, vocab_size=VOCAB_SIZE, attention="sdpa", may_change_attention=True)
    assert not mode.masked


def test_a_decoder_that_reads_in_both_directions_by_its_config_is_refused() -> None:
    with pytest.raises(ModelError, match="Gemma3TextModel is not supported: it is not causal"):
        _refuse(build_base_model(tiny_config("gemma3_text", use_bidirectional_attention=True)))


@pytest.mark.parametrize(
    ("error", "seen"), [(torch.OutOfMemoryError, torch.OutOfMemoryError), (RuntimeError, ModelError)]
)
def test_a_device_that_fails_during_the_proof_is_not_a_trait_of_the_model(
    error: type[Exception], seen: type[Exception]
) -> None:
    model = build_base_model(tiny_config("llama"))

    def fail(*_: object) -> None:
        raise error("no more")

    model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(seen, match="no more"):
        find_decoder(model, VOCAB_SIZE)


@pytest.mark.parametrize("name", [name for name in ENCODER_DECODERS if name in CONFIG_MAPPING])
def test_an_encoder_decoder_is_refused_before_its_weights_load(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name} | ENCODER_DECODERS[name]))
    with pytest.raises(ModelError, match=f"{name} is an encoder-decoder; hiddenq reads causal decoders"):
        load_decoder(str(tmp_path), dtype=torch.float32)


def test_a_model_without_a_decoder_of_its_own_is_refused_before_its_weights_load(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", CONFIG_MAPPING["mllama"]())
    with pytest.raises(
        ModelError, match=r"Transformers [\d.]+ has no mllama_text_model without a head .*; not supported"
    ):
        load_decoder(str(folder), dtype=torch.float32)


def test_every_kind_of_causal_model_is_proved_or_refused() -> None:
    shown = {*ARCHITECTURES, *REFUSED, *ENCODER_DECODERS, *NO_DECODER_OF_THEIR_OWN}
    unknown = {
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in shown and CONFIG_MAPPING[name]().get_text_config(decoder=True).model_type not in shown
    }
    assert unknown == set(), "new in this Transformers: add them to tests/support/architectures.py"


def _leaks_unless(masked: bool | None) -> object:
    def leak(decoder: object, layers: object, *, vocab_size: int, masked: bool) -> float:
        return 0.0 if masked == wanted else 1.0

    wanted = masked
    return leak
