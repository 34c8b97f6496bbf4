"""Templates rendered directly: the same text as through the tokenizer, inside the same sandbox."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from producer.rejects import RowRejected
from producer.template import ChatTemplate
from tests.producer.conftest import chat
from tests.producer.conversations import ROWS
from tests.support.tokenizers import NAMES, real_tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_a_direct_render_is_that_of_the_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_tokenizer(name))
    template = ChatTemplate(tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map))
    conversations = [
        row["messages"] for row in (*ROWS.values(), chat("a", "b", "c")) if "tools" not in row and "messages" in row
    ]
    for messages in conversations:
        for prompt in (True, False):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert template.render(messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}", "{{ messages.__class__ }}", "{{ messages[0].__class__ }}", "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}", "{{ messages[0].clear() }}",
        "{% for m in messages %}{{ loop._iterator }}{% endfor %}",
        "{{ ''.format.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}", "{{ namespace(x=1).__class__ }}",
        "{{ raise_exception.__globals__ }}", "{{ '%s'|attr('__class__') }}",
    ],
)  # fmt: skip
def test_the_sandbox_holds(text: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    with contextlib.suppress(RowRejected):
        rendered = ChatTemplate(text, {}).render(messages)
        assert "class" not in rendered
        assert "iterator" not in rendered
    assert messages == [{"role": "user", "content": "x"}]


def test_absent_keys_are_undefined_and_methods_work() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ loop.index }}/{{ ns.n }}:{{ m.content.strip().upper() }}{{ m.missing is defined }}"
        "{{ m.items()|list|length }};{% endfor %}",
        {},
    )
    assert template.render([{"role": "user", "content": " a "}]) == "1/1:AFalse2;"


def test_a_variable_can_be_left_out() -> None:
    template = ChatTemplate("{{ enable_thinking is defined }}", {"enable_thinking": False})
    assert template.render([]) == "True"
    assert template.render([], without=("enable_thinking",)) == "False"


def test_spans_of_generation_blocks_are_those_of_the_text() -> None:
    text = "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}"
    rendered, spans = ChatTemplate(text, {}).render_marked(chat("one", "two")["messages"])
    assert rendered == "[one][two]"
    assert [rendered[begin:end] for begin, end in spans] == ["one", "two"]


def test_a_template_file_is_read_as_utf_8_whatever_the_locale(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("na\u00efve", encoding="utf-8")
    code = (
        "import sys; from producer import ProducerSettings; from producer.tokenizer import TokenizerSource; "
        "from hiddenq.model_identity import identify_model; "
        "settings = ProducerSettings(model=sys.argv[1], data=('x',), chat_template=sys.argv[2]); "
        "print(ascii(TokenizerSource.of(settings, identify_model(sys.argv[1])).chat_template))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    read = subprocess.run(
        [sys.executable, "-c", code, model, file], env=os.environ | locale, capture_output=True, text=True, check=False
    )
    assert read.stdout == "'na\\xefve'\n", read.stderr
