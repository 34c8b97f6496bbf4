"""Where tokens of a byte-level tokenizer lie, from their ids alone.

Invariant: a byte-level token says how many bytes it stands for, so token boundaries are the running sum of those
lengths; and a row is only read that way if its sum is the length of its text, in bytes, to the byte. Then no offsets
need to be computed, which is the larger part of what a mask costs. Any other row takes the long way.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from producer.mask import Span


class ByteLengths:
    """Bytes that each token of a tokenizer stands for."""

    def __init__(self, lengths: npt.NDArray[np.int64], *, composes: bool) -> None:
        self._lengths = lengths
        self._composes = composes

    @classmethod
    def of(cls, backend: Any) -> Self | None:
        """The lengths of a `tokenizers.Tokenizer`; None if it is not a plain byte-level one.

        Plain is: no normaliser but NFC, byte-level pre-tokens without a space put in front, a BPE model.
        """
        fields = json.loads(backend.to_str())
        steps = _steps(fields["pre_tokenizer"], "pretokenizers")
        byte_level = [step for step in steps if step["type"] == "ByteLevel"]
        normalizers = _steps(fields["normalizer"], "normalizers")
        if (
            fields["model"]["type"] != "BPE"
            or not byte_level
            or any(step.get("add_prefix_space") for step in byte_level)
            or any(step["type"] not in ("ByteLevel", "Split", "Digits") for step in steps)
            or any(step.get("behavior") == "Removed" for step in steps)
            or any(step["type"] != "NFC" for step in normalizers)
        ):
            return None
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
        added = backend.get_added_tokens_decoder()
        lengths = np.zeros(max([*vocabulary.values(), *added]) + 1, np.int64)
        for text, token in vocabulary.items():
            lengths[token] = len(text)  # in a byte-level vocabulary, each character stands for a byte
        for token, content in added.items():
            lengths[token] = len(content.content.encode())
        return cls(lengths, composes=bool(normalizers))

    def align(self, ids: npt.NDArray[np.int32], text: str) -> ByteAlignment | None:
        """Where the tokens of a text lie; None if they do not cover it byte by byte."""
        is_ascii = text.isascii()
        if not is_ascii and self._composes and not unicodedata.is_normalized("NFC", text):
            return None
        lengths = self._lengths[ids]
        ends = lengths.cumsum()
        if not len(ids) or ends[-1] != (len(text) if is_ascii else len(text.encode())):
            return None
        return ByteAlignment(ends - lengths, ends, text, is_ascii=is_ascii)


class ByteAlignment:
    """Where tokens lie in a text that they cover byte by byte."""

    def __init__(
        self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], text: str, *, is_ascii: bool
    ) -> None:
        self._starts = starts
        self._ends = ends
        self._text = text
        self._is_ascii = is_ascii

    def num_chars(self, num_tokens: int) -> int:
        """Characters that the first so many tokens cover, the last one whole or in part."""
        num_bytes = int(self._ends[num_tokens - 1])
        return num_bytes if self._is_ascii else len(self._text.encode()[:num_bytes].decode(errors="replace"))

    def mask(self, spans: Iterable[Span]) -> tuple[npt.NDArray[np.uint8], int]:
        """Mask uint8 [S] of the tokens that start inside a span, and how many straddle a span's start."""
        mask = np.zeros(len(self._ends), np.uint8)
        num_straddling = 0
        for span in spans:
            begin, end = span if self._is_ascii else (len(self._text[:edge].encode()) for edge in span)
            first, last = np.searchsorted(self._starts, (begin, end))
            mask[first:last] = 1
            num_straddling += bool(first and self._ends[first - 1] > begin)
        return mask, num_straddling


def _steps(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """The steps of a stage of a tokenizer, a sequence taken apart."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for member in step[members] for inner in _steps(member, members)]
    return [step]
