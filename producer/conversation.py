"""From a decoded row to what it means: a conversation, plain text, or token ids.

Invariant: a row comes out whole or not at all. No turn is ever dropped, merged or moved; what can't be used is
refused by name, so a bad row never turns into another conversation. What is mended, and how, stands in `rejects`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from producer.rejects import RowRejected
from producer.settings import RowSchema
from producer.turns import check_order, kind, read_tools, read_turns

_TURN_COLUMNS = {"messages": ("messages",), "conversations": ("conversations", "conversation")}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns for the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    supervised_from: int = 0
    """Assistant turns before this one are context."""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Text that no template touches."""

    text: str
    supervised_from: int = 0
    """Characters before this one are context."""


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """A row that is tokenised already."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


Row = Conversation | PlainText | TokenIds


def detect_schema(rows: Iterable[Any]) -> tuple[RowSchema | None, list[str]]:
    """The schema that most of the rows have, None if no row has one; and the columns found."""
    votes: Counter[RowSchema] = Counter()
    columns: dict[str, None] = {}
    for row in rows:
        if isinstance(row, dict):
            columns.update(dict.fromkeys(map(str, row)))
            if schema := _schema_of(row):
                votes[schema] += 1
    return (votes.most_common(1)[0][0] if votes else None), list(columns)


def read_row(row: Any, schema: RowSchema, repairs: Counter[str]) -> Row:
    """What a row means under a schema; counts in `repairs` what it mended.

    Raises:
        RowRejected: the row can't be used.
    """
    if not isinstance(row, dict):
        raise RowRejected("not_an_object", f"expected an object, found {kind(row)}")
    if schema == "input_ids":
        return _read_ids(row)
    if schema == "text":
        return PlainText(text=_read_text(row, "text"))
    if schema == "prompt_completion":
        return _read_prompt(row, repairs)
    for column in _TURN_COLUMNS[schema]:
        if row.get(column) is not None:
            messages = read_turns(row[column], repairs)
            system = row.get("system")
            if system is not None and not isinstance(system, str):
                raise RowRejected("bad_content", f"system is {kind(system)}, not text")
            if system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
                repairs["system_column"] += 1
            elif system and messages[0]["content"].strip() != system.strip():
                raise RowRejected("bad_content", "the system column says otherwise than the system turn")
            check_order(messages)
            return Conversation(messages=messages, tools=read_tools(row.get("tools")))
    raise _wrong_schema(row, schema)


def _schema_of(row: Mapping[str, Any]) -> RowSchema | None:
    has = {name for name, value in row.items() if value is not None}
    if "messages" in has:
        return "messages"
    if has & {"conversations", "conversation"}:
        return "conversations"
    if "input_ids" in has:
        return "input_ids"
    if {"prompt", "completion"} <= has:
        return "prompt_completion"
    return "text" if "text" in has else None


def _wrong_schema(row: Mapping[str, Any], schema: RowSchema) -> RowRejected:
    return RowRejected("wrong_schema", f"no {schema} in this row; columns: {', '.join(map(str, row)) or 'none'}")


def _read_text(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise RowRejected("wrong_schema", f"no {column} in this row; columns: {', '.join(map(str, row)) or 'none'}")
    text = row[column]
    if text is None:
        raise RowRejected("null_content", f"{column} is null")
    if not isinstance(text, str):
        raise RowRejected("bad_content", f"{column} is {kind(text)}, not text")
    if not text:
        raise RowRejected("empty", f"{column} is empty")
    return text


def _read_prompt(row: Mapping[str, Any], repairs: Counter[str]) -> Row:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, (list, dict)) and isinstance(completion, (list, dict)):
        context = read_turns(prompt, repairs)
        messages = context + read_turns(completion, repairs)
        check_order(messages)
        return Conversation(messages=messages, tools=read_tools(row.get("tools")), supervised_from=len(context))
    if "prompt" not in row or "completion" not in row:
        raise _wrong_schema(row, "prompt_completion")
    if prompt == "":
        return PlainText(text=_read_text(row, "completion"))
    text = _read_text(row, "prompt")
    return PlainText(text=text + _read_text(row, "completion"), supervised_from=len(text))


def _read_ids(row: Mapping[str, Any]) -> TokenIds:
    ids = row.get("input_ids")
    if ids is None:
        raise _wrong_schema(row, "input_ids")
    if not isinstance(ids, list) or not all(type(value) is int for value in ids):
        raise RowRejected("bad_content", "input_ids is not a list of integers")
    if not ids:
        raise RowRejected("empty", "input_ids is empty")
    if min(ids) < 0 or max(ids) > np.iinfo(np.int32).max:
        raise RowRejected("token_out_of_range", f"token ids from {min(ids)} to {max(ids)}")
    mask = row.get("loss_mask")
    if mask is None:
        return TokenIds(input_ids=np.array(ids, np.int32), loss_mask=np.ones(len(ids), np.uint8))
    if not isinstance(mask, list) or len(mask) != len(ids):
        found = f"{len(mask)} values" if isinstance(mask, list) else kind(mask)
        raise RowRejected("bad_loss_mask", f"loss_mask: expected {len(ids)} values, found {found}")
    if not all(type(value) in (int, bool) and value in (0, 1) for value in mask):
        raise RowRejected("bad_loss_mask", "loss_mask holds something other than 0 and 1")
    return TokenIds(input_ids=np.array(ids, np.int32), loss_mask=np.array(mask, np.uint8))
