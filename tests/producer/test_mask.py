"""The loss mask: spans that are proved, tokens that start inside them, and refusals where nothing is sure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.mask import mask_by_prefixes, mask_of_spans, turn_end, turn_start
from producer.rejects import RowRejected
from tests.producer.conftest import chat, encode_rows, make_encoder, make_model, split_samples
from tests.support.models import tiny_tokenizer

BACKEND = tiny_tokenizer().backend_tokenizer


def test_a_turn_runs_from_its_prompt_to_the_first_end_token() -> None:
    text = "<u>hi<a>yes<e>\n<u>"
    assert turn_start(text, ["<u>hi<a>"], turn=1) == (8, 0)
    assert turn_end(text, ["<e>"], 8, len(text), turn=1, is_last=False) == 14


def test_a_prompt_that_is_no_prefix_is_never_used() -> None:
    with pytest.raises(RowRejected, match="the prompt before it is not a prefix") as refused:
        turn_start("<u>hi<a>yes<e>", ["<u>HI<a>"], turn=1)
    assert refused.value.reason == "mask_unsure"


def test_the_second_prompt_counts_where_the_first_is_refuted() -> None:
    assert turn_start("<a>yes<e>", ["<a><think>", "<a>"], turn=1) == (3, 1)


def test_a_turn_without_an_end_is_refused_unless_it_is_the_last() -> None:
    with pytest.raises(RowRejected, match="turn 1: no end-of-turn token after it"):
        turn_end("<a>yes", ["<e>"], 3, 6, turn=1, is_last=False)
    assert turn_end("<a>yes", ["<e>"], 3, 6, turn=1, is_last=True) == 6


def test_a_turn_that_the_length_limit_cuts_ends_there() -> None:
    assert turn_end("<a>yes<e>\n<u>no<e>", ["<e>"], 3, 5, turn=1, is_last=False) == 5


@given(st.text(max_size=60), st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=3))
def test_supervised_are_exactly_the_tokens_that_start_inside_a_span(text: str, pairs: list[tuple[int, int]]) -> None:
    encoding = BACKEND.encode(text, add_special_tokens=False)
    spans = [(min(pair), max(pair)) for pair in pairs]
    mask, num_straddling = mask_of_spans(encoding, spans, len(text))
    assert len(mask) == len(encoding.ids)
    starts = [start for start, _ in encoding.offsets]
    assert mask.tolist() == [int(any(begin <= start < end for begin, end in spans)) for start in starts]
    assert num_straddling <= sum(start < begin < end for start, end in encoding.offsets for begin, _ in spans)


def test_a_token_that_straddles_the_start_is_not_supervised_and_counted() -> None:
    encoding = BACKEND.encode("The capital", add_special_tokens=False)
    number = next(place for place, (start, end) in enumerate(encoding.offsets) if end - start > 1)
    start, _ = encoding.offsets[number]
    mask, num_straddling = mask_of_spans(encoding, [(start + 1, 11)], 11)
    assert mask[number] == 0
    assert mask[number + 1 :].all()
    assert num_straddling == 1


def test_without_offsets_the_text_before_a_turn_must_be_a_prefix_in_tokens() -> None:
    assert mask_by_prefixes([1, 2, 3], lambda text: [1, 2, 3][: len(text)], "abc", [(1, 2)]).tolist() == [0, 1, 0]
    with pytest.raises(RowRejected, match="no token ends at character 1"):
        mask_by_prefixes([7, 3], lambda text: [1, 2, 3][: len(text)], "abc", [(1, 3)])


def test_a_tokenizer_without_offsets_gives_the_same_mask(tmp_path: Any) -> None:
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    slow.chat_template = tiny_tokenizer().chat_template.replace("<|im_end|>", "</s>")
    slow.save_pretrained(tmp_path)
    block = encode_rows(make_encoder(tmp_path), [chat("hi", "ho", "why", "so")])
    ids, mask = split_samples(block)[0]
    said = bytes(token - 3 for token, bit in zip(ids, mask, strict=True) if bit and token >= 3)
    assert (said, ids.count(1), sum(mask)) == (b"hoso", 4, 6)


def test_a_template_without_any_end_of_turn_supervises_the_last_turn_only_if_it_is_the_only_one(tmp_path: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encoder = make_encoder(make_model(tmp_path, template=template))
    block = encode_rows(encoder, [chat("a", "b"), chat("a", "b", "c", "d")])
    assert list(split_samples(block)) == [0]
    assert [(reject.row, reject.reason) for reject in block.rejected] == [(1, "mask_unsure")]


def test_a_first_end_token_that_ends_a_later_turn_is_not_taken_for_this_ones(tmp_path: Any) -> None:
    template = (  # calls of tools end without a token, so the next one found lies behind the tool's answer
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.name }}"
        "{% endfor %}{% if not m.tool_calls %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": [
        {"role": "user", "content": "weather"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "grey"}, {"role": "assistant", "content": "It is grey."},
    ]}]  # fmt: skip
    block = encode_rows(make_encoder(make_model(tmp_path, template=template)), rows)
    assert [(reject.reason, reject.detail) for reject in block.rejected] == [
        ("mask_unsure", "turn 1: its end can't be told from the next turn's")
    ]


def test_words_of_a_user_alone_are_never_supervised(tmp_path: Any) -> None:
    block = encode_rows(make_encoder(make_model(tmp_path)), [chat("a question"), chat("a", "b", "another question")])
    assert [(reject.row, reject.reason) for reject in block.rejected] == [(0, "nothing_supervised")]
    _, mask = split_samples(block)[1]
    assert mask[0] == mask[-1] == 0
    assert "".join(map(str, mask)).strip("0").strip("1") == ""
