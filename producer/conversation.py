"""From a decoded row to what it means: a conversation, plain text, or token ids.

Invariant: a row comes out whole or not at all. No turn is ever dropped, merged or moved; what can't be used is
refused by name, so a bad row never turns into another conversation. What is mended, and how, stands in `REPAIRS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from hiddenq.contracts.manifest import RejectReason
from producer.settings import RowSchema

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role names found in datasets, in small letters, and the role that a chat template knows."""

REPAIRS = {
    "text_parts_joined": "content given as text parts was joined in order",
    "system_column": "a system text in a column of its own became the first turn",
    "columns_of_turns": "turns stored column by column were put together again",
    "tool_calls_adapted": "tool calls were put into the form that the chat template takes",
    "reasoning_left_out": "turns whose reasoning the chat template leaves out",
    "surrogates_replaced": "unpaired surrogates became U+FFFD",
    "special_tokens_found": "text spells special tokens of the tokenizer; they count as such",
    "special_tokens_escaped": "special tokens spelled in text were broken by a zero-width space",
    "truncated": "samples were cut at the length limit",
    "straddling_tokens": "tokens that straddle the start of what is supervised are not",
    "thinking_argument_left_out": "turns whose start was found without the thinking argument",
}
"""What may be mended or noticed in a row that is kept, and what each means."""

_TURN_COLUMNS = {"messages": ("messages",), "conversations": ("conversations", "conversation")}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names that reasoning goes by; templates know one or the other, so each of them is given."""
_TEXT_KEYS = (*REASONING_KEYS, "name", "tool_call_id")
_MAX_DETAIL = 200


class RowRejected(Exception):
    """This row can't be used."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: RejectReason = reason
        self.detail = detail if len(detail) <= _MAX_DETAIL else detail[: _MAX_DETAIL - 1] + "…"


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
        raise RowRejected("not_an_object", f"expected an object, found {_kind(row)}")
    if schema == "input_ids":
        return _read_ids(row)
    if schema == "text":
        return PlainText(text=_read_text(row, "text"))
    if schema == "prompt_completion":
        return _read_prompt(row, repairs)
    for column in _TURN_COLUMNS[schema]:
        if row.get(column) is not None:
            messages = _read_turns(row[column], repairs)
            system = row.get("system")
            if isinstance(system, str) and system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
                repairs["system_column"] += 1
            _check_order(messages)
            return Conversation(messages=messages, tools=_read_tools(row.get("tools")))
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


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _read_turns(turns: Any, repairs: Counter[str]) -> list[dict[str, Any]]:
    if isinstance(turns, dict):
        turns = _by_row(turns)
        repairs["columns_of_turns"] += 1
    if not isinstance(turns, list):
        raise RowRejected("wrong_schema", f"expected a list of turns, found {_kind(turns)}")
    if not turns:
        raise RowRejected("empty", "the conversation has no turns")
    return [_read_turn(number, turn, repairs) for number, turn in enumerate(turns)]


def _by_row(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns from a mapping of columns, as some Arrow files keep a sequence of structures."""
    if not columns or not all(isinstance(values, list) for values in columns.values()):
        raise RowRejected("wrong_schema", f"expected a list of turns, found an object with {', '.join(columns)}")
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise RowRejected("wrong_schema", "turns stored column by column, but the columns differ in length")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _read_turn(number: int, turn: Any, repairs: Counter[str]) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowRejected("wrong_schema", f"turn {number}: expected an object, found {_kind(turn)}")
    role_name = turn.get("role", turn.get("from"))
    if not isinstance(role_name, str):
        raise RowRejected("unknown_role", f"turn {number}: no role; keys: {', '.join(map(str, turn))}")
    role = ROLES.get(role_name.strip().lower())
    if role is None:
        raise RowRejected("unknown_role", f"turn {number}: role {role_name!r}")
    message: dict[str, Any] = {"role": role}
    content = turn["content"] if "content" in turn else turn.get("value")
    tool_calls = turn.get("tool_calls") or None
    if content is None:
        if role != "assistant" or tool_calls is None:
            raise RowRejected("null_content", f"turn {number} ({role}): no content")
    else:
        message["content"] = _read_content(number, content, repairs)
    if tool_calls is not None:
        if not isinstance(tool_calls, list) or not all(isinstance(call, dict) for call in tool_calls):
            raise RowRejected("bad_content", f"turn {number}: tool_calls is not a list of objects")
        message["tool_calls"] = tool_calls
    for key in _TEXT_KEYS:
        value = turn.get(key)
        if isinstance(value, str):
            message[key] = value
        elif value is not None:
            raise RowRejected("bad_content", f"turn {number}: {key} is {_kind(value)}, not text")
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = dict.fromkeys(REASONING_KEYS, reasoning) | message
    return message


def _read_content(number: int, content: Any, repairs: Counter[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected(
            "bad_content", f"turn {number}: content is {_kind(content)}, neither text nor a list of parts"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text" and isinstance(kind, str):
            raise RowRejected("multimodal", f"turn {number}: a part of type {kind!r}; hiddenq reads text only")
        if not isinstance(text, str):
            raise RowRejected("bad_content", f"turn {number}: a text part holds {_kind(text)}")
        texts.append(text)
    repairs["text_parts_joined"] += 1
    return "".join(texts)


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = orjson.loads(tools)
        except ValueError as error:
            raise RowRejected("bad_content", f"tools: not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRejected("bad_content", "tools: expected a list of objects")
    return tools


def _check_order(messages: list[dict[str, Any]]) -> None:
    """An optional system turn, then a user; nobody speaks twice in a row; tools answer an assistant or each other."""
    previous = None
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            fits = number == 0
        elif role == "user":
            fits = previous != "user"
        elif role == "assistant":
            fits = previous in ("user", "tool")
        else:
            fits = previous in ("assistant", "tool")
        if not fits:
            raise RowRejected("role_order", f"turn {number}: {role} after {previous or 'nothing'}")
        previous = role


def _read_text(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise RowRejected("wrong_schema", f"no {column} in this row; columns: {', '.join(map(str, row)) or 'none'}")
    text = row[column]
    if text is None:
        raise RowRejected("null_content", f"{column} is null")
    if not isinstance(text, str):
        raise RowRejected("bad_content", f"{column} is {_kind(text)}, not text")
    if not text:
        raise RowRejected("empty", f"{column} is empty")
    return text


def _read_prompt(row: Mapping[str, Any], repairs: Counter[str]) -> Row:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, (list, dict)) and isinstance(completion, (list, dict)):
        context = _read_turns(prompt, repairs)
        messages = context + _read_turns(completion, repairs)
        _check_order(messages)
        return Conversation(messages=messages, tools=_read_tools(row.get("tools")), supervised_from=len(context))
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
        found = f"{len(mask)} values" if isinstance(mask, list) else _kind(mask)
        raise RowRejected("bad_loss_mask", f"loss_mask: expected {len(ids)} values, found {found}")
    if not all(type(value) in (int, bool) and value in (0, 1) for value in mask):
        raise RowRejected("bad_loss_mask", "loss_mask holds something other than 0 and 1")
    return TokenIds(input_ids=np.array(ids, np.int32), loss_mask=np.array(mask, np.uint8))
