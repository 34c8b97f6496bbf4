"""Masks from byte lengths: those of the offsets, or none at all."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from producer.bytelevel import ByteLengths
from tests.producer.conftest import real_encoder
from tests.support.models import tiny_tokenizer
from tests.support.tokenizers import NAMES

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: tuple(sorted(pair))), max_size=2)


@functools.cache
def backend_of(name: str) -> Tokenizer:
    if name == "tiny":
        backend = tiny_tokenizer().backend_tokenizer
    else:
        chat = real_encoder(name).chat
        assert chat is not None
        backend = chat.backend
    assert isinstance(backend, Tokenizer)
    return backend


@functools.cache
def lengths_of(name: str) -> ByteLengths:
    lengths = ByteLengths.of(backend_of(name))
    assert lengths is not None
    return lengths


@pytest.mark.parametrize("name", ["tiny", *NAMES])
@settings(max_examples=80)
@given(text=st.text(max_size=40), spans=SPANS)
@example(text="a\u0301 e\u0301 \u0958 <|im_start|>x", spans=[(1, 4)])
@example(text="naïve 👋🏽 日本語 \r\n\t  ", spans=[(2, 9), (9, 12)])
def test_a_mask_from_byte_lengths_is_that_of_the_offsets(name: str, text: str, spans: list[Any]) -> None:
    backend, lengths = backend_of(name), lengths_of(name)
    ids = np.array(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)
    encoding = backend.encode(text, add_special_tokens=False)
    assert ids.tolist() == encoding.ids
    aligned = lengths.align(ids, text)
    if aligned is None:
        return
    starts = [begin for begin, _ in encoding.offsets]
    expected = [int(any(begin <= start < end for begin, end in spans)) for start in starts]
    # A token that starts within a character has that character's offset, or an empty one behind it.
    within = [number > 0 and starts[number] == starts[number - 1] for number in range(len(starts))]
    empty = [begin == end for begin, end in encoding.offsets]
    for number, bit in enumerate(aligned.mask(spans)[0].tolist()):
        assert bit == expected[number] or within[number] or empty[number] or (number and empty[number - 1])


def test_text_that_the_tokenizer_composes_takes_the_long_way() -> None:
    assert lengths_of("qwen3").align(np.array([1], np.int32), "e\u0301") is None


def test_ids_that_do_not_cover_the_text_take_the_long_way() -> None:
    backend, lengths = backend_of("tiny"), lengths_of("tiny")
    ids = np.array(backend.encode("hello there").ids, np.int32)
    assert lengths.align(ids, "hello there") is not None
    assert lengths.align(ids[:-1], "hello there") is None
    assert lengths.align(ids[:0], "") is None


def changed(**stages: Any) -> Tokenizer:
    backend = copy.deepcopy(backend_of("tiny"))
    for name, stage in stages.items():
        setattr(backend, name, stage)
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        changed(normalizer=normalizers.Lowercase()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(pre_tokenizer=pre_tokenizers.Metaspace()),
        changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])),
        changed(pre_tokenizer=None),
        Tokenizer(models.WordLevel({"a": 0}, "a")),
    ],
)
def test_other_tokenizers_are_not_read_that_way(backend: Tokenizer) -> None:
    assert ByteLengths.of(backend) is None
