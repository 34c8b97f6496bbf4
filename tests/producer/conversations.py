"""Conversations of every kind that goldens are made of."""

from __future__ import annotations

from typing import Any

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
_TEXT_CALL = {**_CALL, "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}

ROWS: dict[str, dict[str, Any]] = {
    "one_turn": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "4."},
        ]
    },
    "three_turns": {
        "conversations": [
            {"from": "human", "value": "Hi 👋🏽, naïve café?"},
            {"from": "gpt", "value": "  Yes: 日本語, 𝔘nicode 🎉 and more.\n"},
            {"from": "human", "value": "And then?"},
            {"from": "gpt", "value": "Then nothing."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "Because."},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather in Köln?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "grey"}'},
            {"role": "assistant", "content": "It is grey."},
        ],
        "tools": [_WEATHER],
    },
    "tools_with_text_arguments": {
        "messages": [
            {"role": "user", "content": "Weather in Köln?"},
            {"role": "assistant", "content": "", "tool_calls": [_TEXT_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "grey"}'},
            {"role": "assistant", "content": "It is grey."},
        ],
        "tools": [_WEATHER],
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "Is 91 prime?"},
            {"role": "assistant", "reasoning_content": "7 times 13 is 91.", "content": "No."},
        ]
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "Is 91 prime?"},
            {"role": "assistant", "reasoning_content": "7 times 13 is 91.", "content": "No."},
            {"role": "user", "content": "And 97?"},
            {"role": "assistant", "reasoning_content": "No divisor up to 9.", "content": "Yes."},
            {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "Welcome."},
        ]
    },
}
