"""Stored states are the model's: the right layers, before the final norm, as exact as plain Transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from gpu_worker.decoder import find_decoder
from gpu_worker.extraction import Extractor
from gpu_worker.gather import WrongStates
from gpu_worker.inputs import pad_rows
from gpu_worker.selfcheck import TOLERANCES, PendingCheck, compare_alone, report_check, shortest_row, token_differences
from hiddenq.contracts.errors import ModelError, RedisAway
from hiddenq.contracts.manifest import SelfCheck
from tests.delivery.conftest import record
from tests.gpu_worker.conftest import difference, extract, shard_format, tiny_decoder, token_rows
from tests.support.logs import logged
from tests.support.models import VOCAB_SIZE, build_model, tiny_config

FAMILIES = ["llama", "qwen3", "qwen3_5_text"]


def base_of(whole: PreTrainedModel) -> nn.Module:
    """The decoder of a whole model, which keeps its weights."""
    base: nn.Module = whole.base_model
    return base


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_equals_a_plain_forward_of_one_sample(name: str) -> None:
    whole = build_model(tiny_config(name))
    extractor = Extractor(find_decoder(base_of(whole), VOCAB_SIZE), shard_format(range(4)))
    rows = token_rows([40, 7, 25])
    for row, mine in zip(rows, extract(extractor, rows).states, strict=True):
        with torch.inference_mode():
            plain = whole(input_ids=torch.from_numpy(row.input_ids).long()[None], output_hidden_states=True)
        reference = {f"layer {layer}": plain.hidden_states[layer + 1][0] for layer in range(3)}
        assert difference({name: mine[name] for name in reference}, reference) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_head_of_the_norm_of_the_final_state_is_the_logits(name: str) -> None:
    whole = build_model(tiny_config(name))
    decoder = find_decoder(base_of(whole), VOCAB_SIZE)
    row = token_rows([30])[0]
    final = extract(Extractor(decoder, shard_format([])), [row]).states[0]["final_hidden_state"]
    assert decoder.norm is not None
    with torch.inference_mode():
        expected = whole(input_ids=torch.from_numpy(row.input_ids).long()[None]).logits[0]
        found = whole.get_output_embeddings()(decoder.norm(final))
    assert float((found - expected).abs().max()) < 1e-4


def test_the_final_state_is_the_last_layers_output_before_the_norm() -> None:
    states = extract(Extractor(tiny_decoder("llama"), shard_format([3])), token_rows([20]))
    assert torch.equal(states.states[0]["final_hidden_state"], states.states[0]["layer 3"])


def test_layer_ids_count_layers_from_zero() -> None:
    decoder = tiny_decoder("llama", num_hidden_layers=5)
    handles = [
        layer.register_forward_hook(lambda _m, _i, _o, k=k: torch.full((1, 9, 64), float(k)))
        for k, layer in enumerate(decoder.layers)
    ]
    found = extract(Extractor(decoder, shard_format([3, 0, 4])), token_rows([9])).states[0]
    for handle in handles:
        handle.remove()
    assert {name: float(states.mean()) for name, states in found.items()} == {
        "layer 3": 3.0, "layer 0": 0.0, "layer 4": 4.0, "final_hidden_state": 4.0,
    }  # fmt: skip


def test_layers_above_the_last_one_needed_are_not_run() -> None:
    decoder = tiny_decoder("qwen3", num_hidden_layers=6)
    ran: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda _m, _a, k=k: ran.append(k)) for k, layer in enumerate(decoder.layers)
    ]
    extract(Extractor(decoder, shard_format([2, 1], final=False)), token_rows([9]))
    for handle in handles:
        handle.remove()
    assert ran == [0, 1, 2]


def test_bf16_error_is_no_larger_than_plain_transformers() -> None:
    config = tiny_config("qwen3", num_hidden_layers=8)
    exact = build_model(config).base_model
    half = AutoModel.from_config(config).eval()
    half.load_state_dict(exact.state_dict())
    half.to(torch.bfloat16)
    layers = list(range(7))
    extractor = Extractor(find_decoder(half, VOCAB_SIZE), shard_format(layers, model_dtype="bfloat16", final=False))
    rows = token_rows([64, 50, 33, 17, 9])
    ours = theirs = 0.0
    for row, mine in zip(rows, extract(extractor, rows, padded_length=72).states, strict=True):
        reference, plain = _plain(exact, row.input_ids), _plain(half, row.input_ids)
        for layer in layers:
            ours += float(token_differences(mine[f"layer {layer}"], reference[layer]).mean())
            theirs += float(token_differences(plain[layer], reference[layer]).mean())
    assert 0 < ours <= 1.05 * theirs


@torch.inference_mode()
def _plain(model: nn.Module, ids: object) -> list[Tensor]:
    states = model(input_ids=torch.tensor(ids).long()[None], output_hidden_states=True, use_cache=False).hidden_states
    return [layer[0].float() for layer in states[1:]]


def test_a_self_check_runs_the_shortest_row_alone_and_finds_nothing() -> None:
    extractor = Extractor(tiny_decoder("qwen3"), shard_format([0, 3]))
    check = _self_check(extractor, [40, 6, 30])
    assert (check.sample_id, check.num_tokens, check.padded_length) == (1, 6, 40)
    worst, layer = check.worst([column.name for column in extractor.columns])
    assert worst < 1e-5
    assert layer in {"layer 0", "layer 3", "final_hidden_state"}


def test_a_self_check_sees_padding_that_leaks() -> None:
    decoder = tiny_decoder("qwen3")

    def leak(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output + output.mean(dim=1, keepdim=True)

    handle = decoder.layers[1].register_forward_hook(leak)
    check = _self_check(Extractor(decoder, shard_format([0, 3])), [40, 6, 30])
    handle.remove()
    assert check.typical() > 1e-2


def test_a_self_check_that_differs_is_said_and_recorded_and_is_forgone_without_redis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = SelfCheck(
        batch_id="000000", sample_id=1, num_tokens=6, padded_length=40, worker="w",
        max_relative_difference=0.5, worst_layer="layer 3",
    )  # fmt: skip
    recorded: list[tuple[str, SelfCheck]] = []
    config = record().config
    for typical in (TOLERANCES["float32"], 2 * TOLERANCES["float32"]):
        report_check(check, typical, config, lambda run, found: recorded.append((run, found)))
    [said] = logged(caplog, "self_check_differs")
    assert (said["batch"], said["sample"], said["layer"], said["largest"]) == ("000000", 1, "layer 3", 0.5)
    assert recorded == [(config.run, check)] * 2

    def away(_run: str, _found: SelfCheck) -> None:
        raise RedisAway("no answer")

    report_check(check, 0.0, config, away)
    assert logged(caplog, "self_check_not_recorded")


def _self_check(extractor: Extractor, lengths: list[int]) -> PendingCheck:
    batch = pad_rows(token_rows(lengths), extractor.shard_format, padded_length=40, vocab_size=VOCAB_SIZE)
    payload = torch.empty(batch.num_bytes, dtype=torch.uint8)
    with torch.inference_mode():
        on_device = extractor.upload(batch, payload)
        extractor.run(on_device)
        return compare_alone(extractor, batch, on_device, shortest_row(batch))


def test_a_layer_of_another_shape_is_never_stored() -> None:
    decoder = tiny_decoder("llama")
    handle = decoder.layers[1].register_forward_hook(lambda _m, _i, output: output[:, :-1])
    with pytest.raises(WrongStates, match=r"layer 1: expected states of shape \(1, 9, 64\), found \(1, 8, 64\)"):
        extract(Extractor(decoder, shard_format([1], final=False)), token_rows([9]))
    handle.remove()


def test_fewer_states_than_asked_for_are_never_stored() -> None:
    extractor = Extractor(tiny_decoder("llama"), shard_format([0, 1]))
    extractor.close()
    with pytest.raises(WrongStates, match=r"expected stored columns \[0, 1, 2\], found \[\]"):
        extract(extractor, token_rows([9]))


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="layer 4 does not exist; this model has 4 layers, ids 0 to 3"):
        Extractor(tiny_decoder("llama"), shard_format([1, 4]))
