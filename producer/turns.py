"""Turns of a conversation, as a row holds them, and as a chat template takes them.

Invariant: turns come out all and in their order, or the row is refused by name: none is dropped, merged or moved.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson

from producer.rejects import RowRejected

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

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names that reasoning goes by; templates know one or the other, so each of them is given."""
_TEXT_KEYS = (*REASONING_KEYS, "name", "tool_call_id")


def read_turns(turns: Any, repairs: Counter[str]) -> list[dict[str, Any]]:
    """Turns of a row as messages with role, content and whatever else templates read.

    Raises:
        RowRejected: one of them can't be used.
    """
    if isinstance(turns, dict):
        turns = _by_row(turns)
        repairs["columns_of_turns"] += 1
    if not isinstance(turns, list):
        raise RowRejected("wrong_schema", f"expected a list of turns, found {kind(turns)}")
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
        raise RowRejected("wrong_schema", f"turn {number}: expected an object, found {kind(turn)}")
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
        if not _are_functions(tool_calls):
            raise RowRejected("bad_content", f"turn {number}: tool_calls is not a list of objects, each of a function")
        message["tool_calls"] = tool_calls
    for key in _TEXT_KEYS:
        value = turn.get(key)
        if isinstance(value, str):
            message[key] = value
        elif value is not None:
            raise RowRejected("bad_content", f"turn {number}: {key} is {kind(value)}, not text")
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = dict.fromkeys(REASONING_KEYS, reasoning) | message
    return message


def _read_content(number: int, content: Any, repairs: Counter[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected("bad_content", f"turn {number}: content is {kind(content)}, neither text nor a list of parts")
    texts = []
    for part in content:
        part_kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if part_kind != "text" and isinstance(part_kind, str):
            raise RowRejected("multimodal", f"turn {number}: a part of type {part_kind!r}; hiddenq reads text only")
        if not isinstance(text, str):
            raise RowRejected("bad_content", f"turn {number}: a text part holds {kind(text)}")
        texts.append(text)
    repairs["text_parts_joined"] += 1
    return "".join(texts)


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools that a row offers, as objects or as JSON text; None if it offers none.

    Raises:
        RowRejected: they are something else.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = orjson.loads(tools)
        except ValueError as error:
            raise RowRejected("bad_content", f"tools: not JSON: {error}") from None
    if not tools:
        return None
    if not _are_functions(tools):
        raise RowRejected("bad_content", "tools: expected a list of objects, each of a function")
    return tools  # type: ignore[no-any-return]


def _are_functions(value: Any) -> bool:
    """Whether it is a list of objects that describe or call a function, in a field of that name or in their own."""
    return isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("function", item), dict) for item in value
    )


def check_order(messages: list[dict[str, Any]]) -> None:
    """An optional system turn, then a user; nobody speaks twice in a row; tools answer an assistant or each other.

    Raises:
        RowRejected: `role_order`, if that is not so.
    """
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


def kind(value: Any) -> str:
    """The type of a value, in a word, for a person."""
    return "null" if value is None else type(value).__name__
