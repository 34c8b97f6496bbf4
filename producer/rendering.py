"""From a conversation to one string, and which of its characters the assistant said.

Invariant: what is rendered is the whole conversation. Templates leave out what they don't know without a word (a role,
a tool call, a list of tools), so every text of the row is looked for in the render; where one is missing, the row is
refused rather than turned into another conversation.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from producer.conversation import REASONING_KEYS, Conversation, RowRejected
from producer.mask import Span, turn_span
from producer.template import Messages, Tools
from producer.tokenizer import ChatTokenizer

SPOKEN = ("content", *REASONING_KEYS)
"""Keys of a message that hold what somebody said."""
_END_OF_THINKING = "</think>"


def render_conversation(chat: ChatTokenizer, row: Conversation, repairs: Counter[str]) -> tuple[str, list[Span]]:
    """The conversation as one string, and its supervised stretches.

    By the template's generation blocks where it has them, else by the character rule of `mask`.

    Raises:
        RowRejected: `template_error` or `mask_unsure`.
    """
    messages, rendered = _render_whole(chat, row, repairs)
    if not chat.template.has_generation_block:
        return rendered, _assistant_spans(chat, rendered, messages, row, repairs)
    rendered, spans = chat.template.render_marked(messages, tools=row.tools)
    if row.supervised_from:
        _, context = chat.template.render_marked(messages[: row.supervised_from], tools=row.tools)
        spans = spans[len(context) :]
    return rendered, spans


def _render_whole(chat: ChatTokenizer, row: Conversation, repairs: Counter[str]) -> tuple[Messages, str]:
    """The render of the first form of the messages that the template takes without leaving anything out."""
    refusal: RowRejected | None = None
    for number, messages in enumerate(_forms(row.messages)):
        try:
            rendered = chat.template.render(messages, tools=row.tools)
            _check_whole(rendered, messages, row.tools)
        except RowRejected as reject:
            refusal = reject
        else:
            if number:
                repairs["tool_calls_adapted"] += 1
            unread = sum((message.get(REASONING_KEYS[0]) or "").strip() not in rendered for message in messages)
            if unread:
                repairs["reasoning_left_out"] += unread
            return messages, rendered
    assert refusal is not None
    raise refusal


def _forms(messages: Messages) -> Iterator[Messages]:
    """The messages as they are; then, where there are tool calls, in the other forms that templates expect.

    Templates differ in whether a turn that only calls tools has null or empty content, and whether a call's arguments
    are an object or JSON text.
    """
    if not any("tool_calls" in message for message in messages):
        yield messages
        return
    for convert_arguments in (False, True):
        for content in (None, ""):
            yield [_adapted(message, content, convert_arguments) for message in messages]


def _adapted(message: dict[str, Any], content: str | None, convert_arguments: bool) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if convert_arguments:
        calls = [_other_arguments(call) for call in calls]
    return {**message, "content": message.get("content") or content, "tool_calls": calls}


def _other_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _other_arguments(function)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            return {**call, "arguments": json.loads(arguments)}
        except ValueError:
            return call
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _check_whole(rendered: str, messages: Messages, tools: Tools) -> None:
    for turn, message in enumerate(messages):
        said = message.get("content") or ""
        if message["role"] == "assistant":
            said = said.rpartition(_END_OF_THINKING)[2]
        if message["role"] != "tool" and said.strip() not in rendered:  # a tool's answer may be quoted as JSON
            raise RowRejected("template_error", f"the template leaves out what turn {turn} ({message['role']}) says")
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            arguments = function.get("arguments")
            wanted = (str(function.get("name", "")), arguments.strip() if isinstance(arguments, str) else "")
            if not all(text in rendered for text in wanted):
                raise RowRejected("template_error", f"turn {turn}: the template leaves out the call of {wanted[0]}")
        if message.get("content", "") is None and rendered.count("None") > json.dumps([messages, tools]).count("None"):
            raise RowRejected("template_error", f"turn {turn}: the template prints null content as None")
    for tool in tools or ():
        name = str(tool.get("function", tool).get("name", ""))
        if name not in rendered:
            raise RowRejected("template_error", f"the template leaves out the tool {name}")


def _assistant_spans(
    chat: ChatTokenizer, rendered: str, messages: Messages, row: Conversation, repairs: Counter[str]
) -> list[Span]:
    spans: list[Span] = []
    turns = [
        turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn >= row.supervised_from
    ]
    for turn in turns:
        if any(end in (messages[turn].get(key) or "") for end in chat.end_tokens for key in SPOKEN):
            raise RowRejected("mask_unsure", f"turn {turn}: the assistant's own words hold an end-of-turn token")
        prompts = chat.prompts(messages[:turn], tools=row.tools)
        is_last = turn == len(messages) - 1
        span, num_refuted = turn_span(rendered, prompts, chat.end_tokens, turn=turn, is_last=is_last)
        if num_refuted:
            repairs["thinking_argument_left_out"] += 1
        spans.append(span)
    stops = [*(begin for begin, _ in spans[1:]), len(rendered)]
    for turn, (_, end), stop in zip(turns, spans, stops, strict=False):  # without a turn, one stop and no span
        if turn + 1 < len(messages) and not _stands_between(messages[turn + 1]["content"], rendered, end, stop):
            # The template ends this turn with no token of its own, so the first one found ends a later turn.
            raise RowRejected("mask_unsure", f"turn {turn}: its end can't be told from the next turn's")
    return spans


def _stands_between(text: str, rendered: str, begin: int, end: int) -> bool:
    """Whether a text stands in that stretch of a render, as it is or quoted as JSON."""
    text = text.strip()
    if rendered.find(text, begin, end) >= 0:
        return True
    return rendered.find(json.dumps(text, ensure_ascii=False)[1:-1], begin, end) >= 0
