"""From a block of rows to token ids and loss masks.

Invariant: every row of a block ends as exactly one sample or exactly one reject, whatever it holds and whatever stands
beside it: rows are rendered and judged one by one, and only strings that are ready are tokenised together.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hiddenq.contracts.manifest import Rejected
from producer.blocks import Block, Suspect
from producer.conversation import Conversation, PlainText, TokenIds, read_row
from producer.mask import Span, mask_by_prefixes, mask_of_spans, num_chars_covered
from producer.policies import SpecialTokens, Surrogates, with_special_tokens, without_surrogates
from producer.rejects import RowRejected
from producer.rendering import SPOKEN, render_conversation
from producer.samples import EncodedBlock, SampleArrays, collect
from producer.settings import RowSchema
from producer.tokenizer import ChatTokenizer, TokenizerSource

_SLACK_TOKENS = 64
_CHARS_PER_TOKEN = 8
"""First guess at how much of an overlong text holds `max_length` tokens; doubled until it does."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Everything besides a row that decides its ids and its mask."""

    row_schema: RowSchema
    tokenizer: TokenizerSource | None
    """None for rows of token ids."""
    vocab_size: int
    max_length: int
    length_policy: Literal["truncate", "drop"]
    special_tokens: SpecialTokens
    surrogates: Surrogates


@dataclass(kw_only=True)
class _Text:
    """A string to be tokenised, and which of its characters are supervised."""

    text: str
    spans: Callable[[int], list[Span]]
    """Supervised stretches that begin before a character, asked for when it is known how far the kept part goes."""
    add_special_tokens: bool = False


class Encoder:
    """Turns blocks into samples; one a process."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Load the tokenizer, if rows need one.

        Raises:
            ModelError: it can't be loaded.
            UsageError: conversations without a usable chat template.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are the parallelism here
        self._settings = settings
        self.chat = ChatTokenizer(settings.tokenizer) if settings.tokenizer is not None else None
        if self.chat is not None and settings.row_schema in ("messages", "conversations"):
            self.chat.check_template()

    def encode(self, block: Block) -> EncodedBlock:
        """All rows of a block."""
        rejected: list[Rejected] = []
        pending: list[tuple[int, _Text | TokenIds, Counter[str]]] = []

        def refuse(number: int, reject: RowRejected) -> None:
            line = block.places[number - block.first_row]
            rejected.append(
                Rejected(row=number, reason=reject.reason, detail=reject.detail, file=block.file, line=line)
            )

        for number, value in enumerate(block.decode(), start=block.first_row):
            repairs: Counter[str] = Counter()
            try:
                pending.append((number, self._prepare(value, repairs), repairs))
            except RowRejected as reject:
                refuse(number, reject)
        encodings = self._tokenize([item for _, item, _ in pending if isinstance(item, _Text)])
        samples: list[tuple[int, SampleArrays]] = []
        all_repairs: Counter[str] = Counter()
        for number, item, repairs in pending:
            encoding = next(encodings) if isinstance(item, _Text) else None
            try:
                samples.append((number, self._sample(item, encoding, repairs)))
            except RowRejected as reject:
                refuse(number, reject)
            else:
                all_repairs.update(repairs)
        rejected.sort(key=lambda reject: reject.row)
        return collect(block.num_rows, samples, rejected, all_repairs)

    def _prepare(self, value: Any, repairs: Counter[str]) -> _Text | TokenIds:
        if isinstance(value, RowRejected):
            raise value
        if isinstance(value, Suspect):
            value = without_surrogates(value, self._settings.surrogates, repairs)
        row = read_row(value, self._settings.row_schema, repairs)
        if isinstance(row, TokenIds):
            return row
        return self._plain(row, repairs) if isinstance(row, PlainText) else self._conversation(row, repairs)

    def _plain(self, row: PlainText, repairs: Counter[str]) -> _Text:
        context, said = row.text[: row.supervised_from], row.text[row.supervised_from :]
        if context:
            context = self._mended(context, self._settings.special_tokens, repairs)
            said = self._mended(said, "count", repairs)
        else:
            said = self._mended(said, self._settings.special_tokens, repairs)
        span = (len(context), len(context) + len(said))
        return _Text(text=context + said, spans=lambda until: [span], add_special_tokens=True)

    def _conversation(self, row: Conversation, repairs: Counter[str]) -> _Text:
        chat = self.chat
        assert chat is not None
        for message in row.messages:
            policy: SpecialTokens = "count" if message["role"] == "assistant" else self._settings.special_tokens
            for key in SPOKEN:
                if key in message:
                    message[key] = self._mended(message[key], policy, repairs)
        rendered = render_conversation(chat, row, repairs)
        return _Text(text=rendered.text, spans=lambda until: rendered.spans(chat, until, repairs))

    def _mended(self, text: str, policy: SpecialTokens, repairs: Counter[str]) -> str:
        assert self.chat is not None
        return with_special_tokens(text, self.chat.special_tokens, policy, repairs)

    def _tokenize(self, pending: list[_Text]) -> Iterator[Any]:
        """An encoding for each, in order; those with special tokens and those without are tokenised apart."""
        longest = self._settings.max_length * _CHARS_PER_TOKEN * 2
        encodings: dict[bool, Iterator[Any]] = {}
        for special in (False, True):
            texts = [item.text for item in pending if item.add_special_tokens == special and len(item.text) <= longest]
            if texts:
                assert self.chat is not None
                with_offsets = special or self.chat.byte_lengths is None
                encoded = self.chat.encode(texts, add_special_tokens=special, with_offsets=with_offsets)
                encodings[special] = iter(encoded)
        return (
            next(encodings[item.add_special_tokens]) if len(item.text) <= longest else self._tokenize_long(item)
            for item in pending
        )

    def _tokenize_long(self, item: _Text) -> Any:
        """An encoding of as much of a huge text as shows its first `max_length` tokens, and that it has more."""
        assert self.chat is not None
        enough = self._settings.max_length + _SLACK_TOKENS
        num_chars = self._settings.max_length * _CHARS_PER_TOKEN
        while True:
            encoding = self.chat.encode([item.text[:num_chars]], add_special_tokens=item.add_special_tokens)[0]
            if len(encoding) >= enough or num_chars >= len(item.text):
                item.text = item.text[:num_chars]
                return encoding
            num_chars *= 2

    def _sample(self, item: _Text | TokenIds, encoding: Any, repairs: Counter[str]) -> SampleArrays:
        """What is kept of a row, and its mask.

        Raises:
            RowRejected: nothing of it can be.
        """
        settings = self._settings
        ids = item.input_ids if isinstance(item, TokenIds) else np.array(encoding.ids, np.int32)
        if not len(ids):
            raise RowRejected("empty", "no tokens")
        if int(ids.max()) >= settings.vocab_size:
            raise RowRejected(
                "token_out_of_range", f"token id {ids.max()}; the model knows 0 to {settings.vocab_size - 1}"
            )
        is_cut = len(ids) > settings.max_length
        if is_cut and settings.length_policy == "drop":
            raise RowRejected("too_long", f"more than {settings.max_length} tokens")
        mask = item.loss_mask if isinstance(item, TokenIds) else self._mask(item, ids, encoding, repairs)
        if is_cut:
            ids, mask = ids[: settings.max_length], mask[: settings.max_length]
            repairs["truncated"] += 1
        if not mask.any():
            among = f"the first {settings.max_length} tokens" if is_cut else "its tokens"
            raise RowRejected("nothing_supervised", f"none of {among} is supervised")
        return ids, mask

    def _mask(
        self, item: _Text, ids: npt.NDArray[np.int32], encoding: Any, repairs: Counter[str]
    ) -> npt.NDArray[np.uint8]:
        """Mask uint8 [S] of all ids, sure as far as those that are kept."""
        assert self.chat is not None
        num_chars, num_kept = len(item.text), min(len(ids), self._settings.max_length)
        by_bytes = None if item.add_special_tokens else self.chat.byte_lengths
        aligned = by_bytes.align(ids, item.text) if by_bytes is not None else None
        if aligned is not None:
            until = aligned.num_chars(num_kept) if num_kept < len(ids) else num_chars
            mask, num_straddling = aligned.mask(item.spans(until))
        elif self.chat.backend is not None:
            if by_bytes is not None:
                encoding = self.chat.encode([item.text])[0]
            until = num_chars_covered(encoding, num_kept, num_chars) if num_kept < len(ids) else num_chars
            mask, num_straddling = mask_of_spans(encoding, item.spans(until), num_chars)
        else:
            num_straddling = 0
            spans = item.spans(num_chars)
            mask = mask_by_prefixes(encoding.ids, lambda text: self._prefix_ids(text, item), item.text, spans)
        if item.add_special_tokens:
            mask[np.array(encoding.special_tokens_mask, bool)] = 0
        if num_straddling:
            repairs["straddling_tokens"] += num_straddling
        return mask

    def _prefix_ids(self, text: str, item: _Text) -> list[int]:
        """Ids of a text's beginning, without what stands only at the end of a whole text."""
        assert self.chat is not None
        encoding = self.chat.encode([text], add_special_tokens=item.add_special_tokens)[0]
        ids, special = list(encoding.ids), list(encoding.special_tokens_mask)
        while item.add_special_tokens and ids and special[-1]:
            ids.pop(), special.pop()
        return ids
