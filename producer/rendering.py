"""From a conversation to one string, and which of its characters the assistant said.

Invariant: what is rendered is the whole conversation. Templates leave out what they don't know without a word (a role,
a tool call, a list of tools), so every text of the row is looked for in the render; where one is missing, the row is
refused rather than turned into another conversation.

What is said where is asked for the kept part of a render only: each turn's start takes a render of all that precedes
it, which for the turns that a length limit cuts off would be work without end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from producer.conversation import Conversation
from producer.mask import Span, turn_end, turn_start
from producer.policies import has_surrogates
from producer.rejects import RowRejected
from producer.template import Messages, Tools
from producer.tokenizer import ChatTokenizer
from producer.turns import REASONING_KEYS

SPOKEN = ("content", *REASONING_KEYS)
"""Keys of a message that hold what somebody said."""
_END_OF_THINKING = "</think>"
_GAP = 64 << 10
"""Characters that a template may write between one turn and the next one's reasoning."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as one string."""

    text: str
    messages: Messages
    """In the form that the template took."""
    tools: Tools
    supervised_from: int
    marked: list[Span] | None
    """Stretches inside the template's generation blocks; None where it has none."""

    def spans(self, chat: ChatTokenizer, until: int, repairs: Counter[str]) -> list[Span]:
        """Supervised stretches that begin before the character `until`.

        By the template's generation blocks where it has them, else by the character rule of `mask`.

        Raises:
            RowRejected: `mask_unsure`, or `template_error` if the template raises.
        """
        return self.marked if self.marked is not None else _assistant_spans(chat, self, until, repairs)


def render_conversation(chat: ChatTokenizer, row: Conversation, repairs: Counter[str]) -> Rendered:
    """The first form of the conversation that the template takes without leaving anything out.

    Raises:
        RowRejected: `template_error`.
    """
    refusal: RowRejected | None = None
    for number, messages in enumerate(_forms(row.messages)):
        try:
            text = chat.template.render(messages, tools=row.tools)
            num_unread = _check_whole(text, messages, row.tools)
        except RowRejected as reject:
            refusal = reject
            continue
        if row.tools and _ignores_tools(chat, messages, text):
            raise RowRejected("template_error", "the template leaves out the list of tools")
        if number:
            repairs["tool_calls_adapted"] += 1
        if num_unread:
            repairs["reasoning_left_out"] += num_unread
        marked = None
        if chat.template.has_generation_block:
            text, marked = chat.template.render_marked(messages, tools=row.tools)
            if row.supervised_from:
                _, context = chat.template.render_marked(messages[: row.supervised_from], tools=row.tools)
                marked = marked[len(context) :]
        return Rendered(
            text=text, messages=messages, tools=row.tools, supervised_from=row.supervised_from, marked=marked
        )
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
    """A call with its arguments as an object instead of JSON text, or the other way round; as it is if that can't be.

    Raises:
        RowRejected: `bad_text`, if the JSON text escapes an unpaired surrogate, which no tokenizer takes.
    """
    if "function" in call:
        return {**call, "function": _other_arguments(call["function"])}
    arguments = call.get("arguments")
    try:
        if not isinstance(arguments, str):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        read = json.loads(arguments)
        if has_surrogates(read):
            raise RowRejected("bad_text", "an unpaired surrogate in the arguments of a tool call")
        return {**call, "arguments": read}
    except (ValueError, TypeError, RecursionError):  # not JSON, not what JSON can say, or nested too deeply
        return call


class _Search:
    """Looks for texts in a render, behind the one found last and only then anywhere: turns stand in their order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def holds(self, wanted: str) -> bool:
        found = self._text.find(wanted, self._place)
        if found >= 0:
            self._place = found + len(wanted)
        return found >= 0 or wanted in self._text

    def holds_next(self, wanted: str) -> bool:
        """Whether it stands in what comes next, without going on to it."""
        return self._text.find(wanted, self._place, self._place + len(wanted) + _GAP) >= 0


def _check_whole(rendered: str, messages: Messages, tools: Tools) -> int:
    """Refuse a render that leaves out something said or called; the number of turns whose reasoning it leaves out."""
    search = _Search(rendered)
    num_unread = 0
    for turn, message in enumerate(messages):
        if reasoning := message.get(REASONING_KEYS[0]):
            num_unread += not search.holds_next(reasoning.strip())
        role, said = message["role"], message.get("content") or ""
        if role == "assistant":
            said = said.rpartition(_END_OF_THINKING)[2]
        said = said.strip()
        if not search.holds(said):
            if role != "tool":  # a tool's answer may be quoted as JSON
                raise RowRejected("template_error", f"the template leaves out what turn {turn} ({role}) says")
            search.holds(_quoted(said))
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            arguments = function.get("arguments")
            wanted = (str(function.get("name", "")), arguments.strip() if isinstance(arguments, str) else "")
            if not all(text in rendered for text in wanted):
                raise RowRejected("template_error", f"turn {turn}: the template leaves out the call of {wanted[0]}")
    silent = next((turn for turn, message in enumerate(messages) if message.get("content", "") is None), None)
    if silent is not None and rendered.count("None") > json.dumps([messages, tools], default=str).count("None"):
        raise RowRejected("template_error", f"turn {silent}: the template prints null content as None")
    for tool in tools or ():
        name = str(tool.get("function", tool).get("name", ""))
        if name not in rendered:
            raise RowRejected("template_error", f"the template leaves out the tool {name}")
    return num_unread


def _ignores_tools(chat: ChatTokenizer, messages: Messages, rendered: str) -> bool:
    """Whether a render with tools is that without: a call alone would show a tool's name, too."""
    try:
        return chat.template.render(messages) == rendered
    except RowRejected:
        return False


def _assistant_spans(chat: ChatTokenizer, row: Rendered, until: int, repairs: Counter[str]) -> list[Span]:
    spans: list[Span] = []
    turns: list[int] = []
    stops: list[int] = []
    for turn, message in enumerate(row.messages):
        if message["role"] != "assistant" or turn < row.supervised_from:
            continue
        if any(end in (message.get(key) or "") for end in chat.end_tokens for key in SPOKEN):
            raise RowRejected("mask_unsure", f"turn {turn}: the assistant's own words hold an end-of-turn token")
        begin, num_refuted = turn_start(row.text, chat.prompts(row.messages[:turn], tools=row.tools), turn=turn)
        stops.append(begin)
        if begin >= until:
            break
        if num_refuted:
            repairs["thinking_argument_left_out"] += 1
        is_last = turn == len(row.messages) - 1
        spans.append((begin, turn_end(row.text, chat.end_tokens, begin, until, turn=turn, is_last=is_last)))
        turns.append(turn)
    stops.append(len(row.text))
    for turn, (_, end), stop in zip(turns, spans, stops[1:], strict=False):
        if turn + 1 < len(row.messages) and not _stands_between(row.messages[turn + 1]["content"], row.text, end, stop):
            # The template ends this turn with no token of its own, so the first one found ends a later turn.
            raise RowRejected("mask_unsure", f"turn {turn}: its end can't be told from the next turn's")
    return spans


def _stands_between(text: str, rendered: str, begin: int, end: int) -> bool:
    """Whether a text stands in that stretch of a render, as it is or quoted as JSON."""
    text = text.strip()
    return rendered.find(text, begin, end) >= 0 or rendered.find(_quoted(text), begin, end) >= 0


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
