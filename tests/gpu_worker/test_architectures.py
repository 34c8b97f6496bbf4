"""Right padding without a mask: on every architecture a real token's states equal those of the sample run alone."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from gpu_worker.decoder import find_decoder
from gpu_worker.extraction import Extractor
from gpu_worker.selfcheck import TOLERANCES
from gpu_worker.warmup import choose_mode, padding_difference
from hiddenq.contracts.errors import ModelError
from tests.gpu_worker.conftest import difference, extract, shard_format, tiny_decoder, token_rows
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, build_base_model, tiny_config

KNOWN = [name for name in ARCHITECTURES if name in CONFIG_MAPPING]
LENGTHS = (5, 70, 33)
"""Below, across and above the tiny windows and chunks (16)."""


def test_at_least_sixty_architectures_are_known() -> None:
    assert len(KNOWN) >= 60


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


def test_several_streams_are_refused_in_one_line() -> None:
    config = tiny_config("deepseek_v4", sliding_window=16)
    with pytest.raises(
        ModelError, match=r"DeepseekV4Model is not supported: .*several streams, shape \[2, 12, 4, 64\]"
    ):
        find_decoder(build_base_model(config), VOCAB_SIZE)


def _leaks_unless(masked: bool | None) -> object:
    def leak(decoder: object, layers: object, *, vocab_size: int, masked: bool) -> float:
        return 0.0 if masked == wanted else 1.0

    wanted = masked
    return leak
