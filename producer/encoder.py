"""From a block of rows to token ids and loss masks.

Invariant: every row of a block ends as exactly one sample or exactly one reject, whatever it holds and whatever stands
beside it: rows are rendered and judged one by one, and only strings that are ready are tokenised together.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hiddenq.contracts.manifest import Rejected
from producer.blocks import Block, Suspect
from producer.conversation import Conversation, PlainText, RowRejected, TokenIds, read_row
from producer.mask import Span, mask_by_prefixes, mask_of_spans
from producer.rendering import SPOKEN, render_conversation
from producer.settings import RowSchema
from producer.tokenizer import ChatTokenizer, TokenizerSource

_SURROGATE = re.compile("[\ud800-\udfff]")
_SLACK_TOKENS = 64
_CHARS_PER_TOKEN = 8
"""First guess at how much of an overlong text holds `max_length` tokens; doubled until it does."""

Policy = Literal["count", "escape", "reject"]


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Everything besides a row that decides its ids and its mask."""

    row_schema: RowSchema
    tokenizer: TokenizerSource | None
    """None for rows of token ids."""
    vocab_size: int
    max_length: int
    length_policy: Literal["truncate", "drop"]
    special_tokens: Policy
    surrogates: Literal["replace", "reject"]


@dataclass(frozen=True, kw_only=True)
class EncodedBlock:
    """Samples of a block one after the other, and what became of its other rows."""

    num_rows: int
    sample_ids: npt.NDArray[np.int64]
    """int64 [N]"""
    lengths: npt.NDArray[np.int64]
    """int64 [N], in tokens; they add up to T."""
    input_ids: npt.NDArray[np.int32]
    """int32 [T]"""
    loss_mask: npt.NDArray[np.uint8]
    """uint8 [T]"""
    rejected: list[Rejected]
    """In the order of the rows."""
    repairs: Counter[str]
    """By the names of `REPAIRS`: rows or tokens mended or noticed."""


@dataclass(kw_only=True)
class _Pending:
    """A string to be tokenised, and which of its characters are supervised."""

    text: str
    spans: list[Span]
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
        repairs: Counter[str] = Counter()
        rejected: list[Rejected] = []
        pending: list[tuple[int, _Pending | TokenIds]] = []
        for number, value in enumerate(block.decode(), start=block.first_row):
            try:
                pending.append((number, self._prepare(value, repairs)))
            except RowRejected as reject:
                rejected.append(Rejected(row=number, reason=reject.reason, detail=reject.detail))
        encodings = self._tokenize([item for _, item in pending if isinstance(item, _Pending)])
        sample_ids, all_ids, all_masks = [], [], []
        for number, item in pending:
            try:
                ids, mask = (
                    (item.input_ids, item.loss_mask)
                    if isinstance(item, TokenIds)
                    else self._align(item, next(encodings), repairs)
                )
                ids, mask = self._fit(ids, mask, repairs)
            except RowRejected as reject:
                rejected.append(Rejected(row=number, reason=reject.reason, detail=reject.detail))
            else:
                sample_ids.append(number)
                all_ids.append(ids)
                all_masks.append(mask)
        return EncodedBlock(
            num_rows=block.num_rows,
            sample_ids=np.array(sample_ids, np.int64),
            lengths=np.array([len(ids) for ids in all_ids], np.int64),
            input_ids=np.concatenate([np.empty(0, np.int32), *all_ids]),
            loss_mask=np.concatenate([np.empty(0, np.uint8), *all_masks]),
            rejected=sorted(rejected, key=lambda reject: reject.row),
            repairs=repairs,
        )

    def _prepare(self, value: Any, repairs: Counter[str]) -> _Pending | TokenIds:
        if isinstance(value, RowRejected):
            raise value
        mended: Counter[str] = Counter()
        if isinstance(value, Suspect):
            value = self._without_surrogates(value, mended)
        row = read_row(value, self._settings.row_schema, mended)
        if isinstance(row, TokenIds):
            result: _Pending | TokenIds = row
        elif isinstance(row, PlainText):
            result = self._prepare_text(row, mended)
        else:
            result = self._prepare_conversation(row, mended)
        repairs.update(mended)
        return result

    def _prepare_text(self, row: PlainText, repairs: Counter[str]) -> _Pending:
        context, said = row.text[: row.supervised_from], row.text[row.supervised_from :]
        if context:
            context = self._special_tokens(context, self._settings.special_tokens, repairs)
            said = self._special_tokens(said, "count", repairs)
        else:
            said = self._special_tokens(said, self._settings.special_tokens, repairs)
        span = (len(context), len(context) + len(said))
        return _Pending(text=context + said, spans=[span], add_special_tokens=True)

    def _prepare_conversation(self, row: Conversation, repairs: Counter[str]) -> _Pending:
        assert self.chat is not None
        for message in row.messages:
            policy: Policy = "count" if message["role"] == "assistant" else self._settings.special_tokens
            for key in SPOKEN:
                if key in message:
                    message[key] = self._special_tokens(message[key], policy, repairs)
        rendered, spans = render_conversation(self.chat, row, repairs)
        return _Pending(text=rendered, spans=spans)

    def _without_surrogates(self, suspect: Suspect, repairs: Counter[str]) -> Any:
        try:
            replaced = _replace_surrogates(suspect.value)
        except RecursionError:
            raise RowRejected("not_json", "nested too deeply") from None
        if replaced is not suspect.value:
            if self._settings.surrogates == "reject":
                raise RowRejected("bad_text", "an unpaired surrogate")
            repairs["surrogates_replaced"] += 1
        return replaced

    def _special_tokens(self, text: str, policy: Policy, repairs: Counter[str]) -> str:
        assert self.chat is not None
        match = self.chat.special_tokens.search(text)
        if match is None:
            return text
        if policy == "reject":
            raise RowRejected("special_token", f"the text spells {match[0]}")
        if policy == "escape":
            repairs["special_tokens_escaped"] += 1
            return self.chat.special_tokens.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)
        repairs["special_tokens_found"] += 1
        return text

    def _tokenize(self, pending: list[_Pending]) -> Iterator[Any]:
        """An encoding for each, in order."""
        if not pending:
            return iter(())
        assert self.chat is not None
        longest = self._settings.max_length * _CHARS_PER_TOKEN * 2
        short = [item for item in pending if len(item.text) <= longest]
        encodings = iter(
            self.chat.encode(
                [item.text for item in short],
                add_special_tokens=pending[0].add_special_tokens,
                with_offsets=self.chat.byte_lengths is None or pending[0].add_special_tokens,
            )
        )
        return (next(encodings) if len(item.text) <= longest else self._tokenize_long(item) for item in pending)

    def _tokenize_long(self, item: _Pending) -> Any:
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

    def _align(
        self, item: _Pending, encoding: Any, repairs: Counter[str]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        assert self.chat is not None
        ids = np.array(encoding.ids, np.int32)
        by_bytes = None if item.add_special_tokens else self.chat.byte_lengths
        found = by_bytes.mask(ids, item.text, item.spans) if by_bytes is not None else None
        if found is not None:
            mask, num_straddling = found
        elif self.chat.backend is not None:
            if by_bytes is not None:
                encoding = self.chat.encode([item.text])[0]
            mask, num_straddling = mask_of_spans(encoding, item.spans, len(item.text))
        else:
            num_straddling = 0
            mask = mask_by_prefixes(encoding.ids, lambda text: self._prefix_ids(text, item), item.text, item.spans)
        if item.add_special_tokens:
            mask[np.array(encoding.special_tokens_mask, bool)] = 0
        if num_straddling:
            repairs["straddling_tokens"] += num_straddling
        return ids, mask

    def _prefix_ids(self, text: str, item: _Pending) -> list[int]:
        """Ids of a text's beginning, without what stands only at the end of a whole text."""
        assert self.chat is not None
        encoding = self.chat.encode([text], add_special_tokens=item.add_special_tokens)[0]
        ids, special = list(encoding.ids), list(encoding.special_tokens_mask)
        while item.add_special_tokens and ids and special[-1]:
            ids.pop(), special.pop()
        return ids

    def _fit(
        self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8], repairs: Counter[str]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        settings = self._settings
        if not len(ids):
            raise RowRejected("empty", "no tokens")
        if int(ids.max()) >= settings.vocab_size:
            raise RowRejected(
                "token_out_of_range", f"token id {ids.max()}; the model knows 0 to {settings.vocab_size - 1}"
            )
        if is_cut := len(ids) > settings.max_length:
            if settings.length_policy == "drop":
                raise RowRejected("too_long", f"more than {settings.max_length} tokens")
            ids, mask = ids[: settings.max_length], mask[: settings.max_length]
        if not mask.any():
            among = f"the first {settings.max_length} tokens" if is_cut else "its tokens"
            raise RowRejected("nothing_supervised", f"none of {among} is supervised")
        if is_cut:
            repairs["truncated"] += 1
        return ids, mask


def _replace_surrogates(value: Any) -> Any:
    """A value without unpaired surrogates; the value itself if it has none."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value) if _SURROGATE.search(value) else value
    if isinstance(value, list):
        items = [_replace_surrogates(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        fields = {_replace_surrogates(name): _replace_surrogates(field) for name, field in value.items()}
        kept = all(a is b and x is y for (a, x), (b, y) in zip(fields.items(), value.items(), strict=False))
        return value if kept and len(fields) == len(value) else fields
    return value
