"""Real chat templates: what is supervised, down to the character, and ids equal to the template's own tokenisation."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.producer.conftest import encode_rows, real_encoder, split_samples
from tests.producer.conversations import ROWS
from tests.support.tokenizers import NAMES, real_template, real_tokenizer

GOLDENS = Path(__file__).with_name("data") / "goldens.json"
GENERATION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CASES: list[tuple[str, str, dict[str, Any]]] = [(name, row, {}) for name in NAMES for row in ROWS]
CASES += [("qwen3", row, {"template_arguments": {"enable_thinking": False}}) for row in ROWS]
CASES += [("smollm2", row, {"chat_template": GENERATION_TEMPLATE}) for row in ("one_turn", "three_turns")]
TEMPLATES = [
    ("llama3_1", "llama3_1"),  # the one that knows tools
    ("qwen3", "qwen3_training"),  # with generation blocks, like the next
    ("deepseek_v3", "deepseekv3_training"),
]
CASES += [(name, row, {"template": template}) for name, template in TEMPLATES for row in ROWS]
CASES += [("deepseek_v3", row, {"template": "deepseekv3"}) for row in ("one_turn", "tools")]  # it prompts with <think>


def case_name(name: str, row: str, options: dict[str, Any]) -> str:
    """The name of a case in the file of goldens."""
    return "/".join([name, row, *(options.values() if "template" in options else options)])


def segments(name: str, row: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a row becomes: stretches of text with their mask, or the reason why it is refused."""
    if "template" in options:
        options = {"chat_template": real_template(options["template"])}
    encoder = real_encoder(name, "messages" if "messages" in ROWS[row] else "conversations", json.dumps(options))
    block = encode_rows(encoder, [ROWS[row]])
    if block.rejected:
        return {"rejected": block.rejected[0].reason, "detail": block.rejected[0].detail}
    assert encoder.chat is not None
    ids, mask = split_samples(block)[0]
    runs: list[tuple[list[int], int]] = []
    for token, bit in zip(ids, mask, strict=True):
        if not runs or runs[-1][1] != bit:
            runs.append(([], bit))
        runs[-1][0].append(token)
    backend = encoder.chat.backend
    assert backend is not None
    return {
        "num_tokens": len(ids),
        "segments": [[bit, backend.decode(run, skip_special_tokens=False)] for run, bit in runs],
        "repairs": dict(block.repairs),
    }


@pytest.mark.parametrize(("name", "row", "options"), CASES, ids=[case_name(*case) for case in CASES])
def test_real_template_supervises_exactly_what_the_assistant_says(name: str, row: str, options: dict[str, Any]) -> None:
    goldens = json.loads(GOLDENS.read_text())
    assert segments(name, row, options) == goldens[case_name(name, row, options)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", ["one_turn", "three_turns", "thinking"])
def test_ids_are_those_of_the_template_in_one_step(name: str, row: str) -> None:
    from transformers import AutoTokenizer

    turns = ROWS[row].get("messages") or [
        {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
        for turn in ROWS[row]["conversations"]
    ]
    tokenizer = AutoTokenizer.from_pretrained(real_tokenizer(name))
    expected = tokenizer.apply_chat_template(copy.deepcopy(turns), tokenize=True, return_dict=True)["input_ids"]
    block = encode_rows(
        real_encoder(name, "messages" if "messages" in ROWS[row] else "conversations", "{}"), [ROWS[row]]
    )
    assert split_samples(block)[0][0] == expected


if __name__ == "__main__":  # python -m tests.producer.test_goldens writes them anew: read the difference
    found = {case_name(*case): segments(*case) for case in CASES}
    GOLDENS.write_text(json.dumps(found, ensure_ascii=False, indent=1, sort_keys=True) + "\n")
