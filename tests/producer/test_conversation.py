"""Rows: what each shape means, and what is refused by which name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from producer.conversation import Conversation, PlainText, TokenIds, detect_schema, read_row
from producer.rejects import RowRejected


def read(row: Any, schema: Any = "messages") -> Any:
    return read_row(row, schema, Counter())


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("name", "role"),
    [("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"), ("chatgpt", "assistant"),
     ("bing", "assistant"), (" GPT ", "assistant")],
)  # fmt: skip
def test_every_common_role_name_is_known(name: str, role: str) -> None:
    opening = [] if role == "user" else [{"from": "human", "value": "hi"}]
    row = read({"conversations": [*opening, {"from": name, "value": "there"}]}, "conversations")
    assert row.messages[-1] == {"role": role, "content": "there"}


@pytest.mark.parametrize("name", ["tool", "function", "observation"])
def test_every_name_of_a_tools_answer_is_known(name: str) -> None:
    row = read({"conversations": [
        {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": name, "value": "c"},
        {"from": "gpt", "value": "d"},
    ]}, "conversations")  # fmt: skip
    assert [message["role"] for message in row.messages] == ["user", "assistant", "tool", "assistant"]


def test_unknown_role_is_refused_and_shown() -> None:
    with pytest.raises(RowRejected, match="turn 0: role 'narrator'") as refused:
        read(turns(("narrator", "once")))
    assert refused.value.reason == "unknown_role"


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (["system", "user", "user", "assistant"], "turn 2: user after user"),
        (["assistant", "user"], "turn 0: assistant after nothing"),
        (["user", "system", "assistant"], "turn 1: system after user"),
        (["user", "assistant", "assistant"], "turn 2: assistant after assistant"),
        (["user", "tool", "assistant"], "turn 1: tool after user"),
    ],
)
def test_turns_out_of_order_are_refused_not_moved(roles: list[str], text: str) -> None:
    with pytest.raises(RowRejected, match=text) as refused:
        read(turns(*((role, "words") for role in roles)))
    assert refused.value.reason == "role_order"


def test_text_parts_are_joined_in_order() -> None:
    row = read(turns(("user", [{"type": "text", "text": "a"}, {"text": "b"}, "c"]), ("assistant", "d")))
    assert row.messages[0]["content"] == "abc"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_a_part_that_is_not_text_refuses_the_row(kind: str) -> None:
    with pytest.raises(RowRejected, match=f"a part of type '{kind}'") as refused:
        read(turns(("user", [{"type": "text", "text": "see"}, {"type": kind, kind: "x"}])))
    assert refused.value.reason == "multimodal"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "not_an_object"), ("text", "not_an_object"), (None, "not_an_object"),
        ({"other": 1}, "wrong_schema"), ({"messages": "text"}, "wrong_schema"), ({"messages": [1]}, "wrong_schema"),
        ({"messages": []}, "empty"), (turns(("user", None)), "null_content"), (turns(("user", 7)), "bad_content"),
        ({"messages": [{"content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": 3, "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "f()"}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]}, "null_content"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "bad_content"),
        (turns(("user", "x")) | {"tools": "{not json"}, "bad_content"),
        (turns(("user", "x")) | {"tools": ["name"]}, "bad_content"),
    ],
)  # fmt: skip
def test_bad_row_has_a_named_reason(row: Any, reason: str) -> None:
    with pytest.raises(RowRejected) as refused:
        read(row)
    assert refused.value.reason == reason


def test_all_turns_of_a_tool_conversation_are_kept() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    row = read({"messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a"},
    ], "tools": '[{"name": "f"}]'})  # fmt: skip
    assert isinstance(row, Conversation)
    assert [message["role"] for message in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2]["tool_calls"] == [call]
    assert row.tools == [{"name": "f"}]


def test_system_text_in_a_column_of_its_own_becomes_the_first_turn() -> None:
    repairs: Counter[str] = Counter()
    row = read_row({"system": "s", "conversations": [{"from": "human", "value": "u"}]}, "conversations", repairs)
    assert isinstance(row, Conversation)
    assert row.messages[0] == {"role": "system", "content": "s"}
    assert repairs == {"system_column": 1}


@pytest.mark.parametrize(
    ("system", "detail"),
    [
        (["s"], "system is list, not text"), (5, "system is int, not text"),
        ("other", "the system column says otherwise than the system turn"),
    ],
)  # fmt: skip
def test_a_system_column_that_would_be_left_out_refuses_the_row(system: Any, detail: str) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with pytest.raises(RowRejected, match=detail) as refused:
        read_row({"system": system, "messages": turns}, "messages", Counter())
    assert refused.value.reason == "bad_content"
    for same in ("s", " s ", "", None):
        read_row({"system": same, "messages": turns}, "messages", Counter())


def test_turns_stored_column_by_column_are_put_together() -> None:
    assert read({"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}).messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_prompt_and_completion_are_text_with_the_completion_supervised() -> None:
    row = read({"prompt": "2+2=", "completion": "4"}, "prompt_completion")
    assert row == PlainText(text="2+2=4", supervised_from=4)


def test_prompt_and_completion_of_turns_supervise_the_completions_turns() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = read({"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}, "prompt_completion")
    assert row.supervised_from == 3
    assert len(row.messages) == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": []}, "empty"), ({"input_ids": [1.5]}, "bad_content"), ({"input_ids": [True]}, "bad_content"),
        ({"input_ids": "12"}, "bad_content"), ({"input_ids": [-1]}, "token_out_of_range"),
        ({"input_ids": [1 << 40]}, "token_out_of_range"), ({"ids": [1]}, "wrong_schema"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": "11"}, "bad_loss_mask"),
    ],
)  # fmt: skip
def test_bad_token_ids_have_a_named_reason(row: Any, reason: str) -> None:
    with pytest.raises(RowRejected) as refused:
        read(row, "input_ids")
    assert refused.value.reason == reason


def test_token_ids_come_through_with_their_mask() -> None:
    row = read({"input_ids": [5, 6, 7], "loss_mask": [0, True, 1]}, "input_ids")
    assert isinstance(row, TokenIds)
    assert (row.input_ids.tolist(), row.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 1])


@pytest.mark.parametrize(
    ("rows", "schema"),
    [
        ([{"messages": [], "text": "x", "prompt": "p", "completion": "c"}], "messages"),
        ([{"conversations": []}], "conversations"), ([{"conversation": []}], "conversations"),
        ([{"prompt": "", "completion": ""}], "prompt_completion"), ([{"text": ""}], "text"),
        ([{"input_ids": [1], "text": "x"}], "input_ids"), ([{"messages": None, "text": "x"}], "text"),
        ([{"text": "x"}, 5, {"messages": []}, {"messages": []}], "messages"), ([{"prompt": "p"}], None), ([], None),
    ],
)  # fmt: skip
def test_schema_is_that_of_most_rows_whatever_their_order(rows: list[Any], schema: str | None) -> None:
    assert detect_schema(rows)[0] == schema
    assert detect_schema(rows[::-1])[0] == schema
