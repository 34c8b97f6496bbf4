"""Tool calls and lists of tools that are not what they should be: each costs its own row, and no other.

The invariant: a block encodes to one sample or one reject a row, whatever stands in a call.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.formats import read_blocks
from producer.sources import InputFile
from tests.producer.conftest import chat, encode_rows, make_encoder, make_model

CALLING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Takes a call's arguments as an object."""


def calling(calls: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize("function", ["look", None, ["look"]])
def test_a_call_or_a_tool_that_is_no_function_refuses_its_row_alone(model: Path, function: Any) -> None:
    rows = [chat("a", "b"), calling([{"function": function}]), chat("a", "b") | {"tools": [{"function": function}]}]
    assert [
        (reject.row, reject.reason, reject.detail) for reject in encode_rows(make_encoder(model), rows).rejected
    ] == [
        (1, "bad_content", "turn 1: tool_calls is not a list of objects, each of a function"),
        (2, "bad_content", "tools: expected a list of objects, each of a function"),
    ]


@pytest.mark.parametrize(
    ("arguments", "reason", "detail"),
    [
        ('{"city": "\\ud83d"}', "bad_text", "an unpaired surrogate in the arguments of a tool call"),
        ("[" * 3000 + "]" * 3000, "template_error", "UndefinedError: 'str object' has no attribute 'items'"),
    ],
)
def test_arguments_that_cannot_be_taken_refuse_their_row_alone(
    tmp_path: Path, arguments: str, reason: str, detail: str
) -> None:
    encoder = make_encoder(make_model(tmp_path, template=CALLING_TEMPLATE))
    block = encode_rows(encoder, [calling([{"function": {"name": "look", "arguments": arguments}}]), chat("a", "b")])
    assert [(reject.row, reject.reason, reject.detail) for reject in block.rejected] == [(0, reason, detail)]


def test_a_columnar_call_with_arguments_that_json_has_not_refuses_its_row_alone(tmp_path: Path, model: Path) -> None:
    """A template that takes arguments as text meets a date."""
    path = tmp_path / "rows.parquet"
    call = {"function": {"name": "look", "arguments": {"day": datetime.date(2026, 11, 30)}}}
    pq.write_table(pa.Table.from_pylist([chat("a", "b"), calling([call])]), path)
    (block,) = read_blocks([InputFile.at(path)])
    encoded = make_encoder(model).encode(block)
    assert [reject.row for reject in encoded.rejected] == [1]
