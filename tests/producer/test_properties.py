"""Whatever the rows: nothing is raised, nothing is lost, nothing is in two batches, no row changes another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hiddenq.storage import ObjectStore, open_store
from producer import ProducerSettings, prepare
from producer.encoder import Encoder
from tests.producer.conftest import Produce, chat, encode_rows, make_encoder, make_model, split_samples, write_lines

TEXT = st.text(st.characters(codec=None), max_size=30)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
ANYTHING = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "", "alien"]) | SCALAR
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLE, "from": ROLE, "content": TEXT | ANYTHING, "value": TEXT | ANYTHING, "tool_calls": ANYTHING,
        "reasoning_content": TEXT | ANYTHING, "name": SCALAR,
    },
)  # fmt: skip
PLAIN_TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXT},
    optional={"tool_calls": st.just([{"function": {"name": "f", "arguments": {}}}]), "reasoning_content": TEXT},
)
ROW = ANYTHING | st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(PLAIN_TURN, max_size=5) | st.lists(TURN, max_size=4) | ANYTHING,
        "conversations": st.lists(PLAIN_TURN, max_size=3) | st.lists(TURN, max_size=4),
        "system": SCALAR, "tools": ANYTHING, "prompt": TEXT | ANYTHING, "completion": TEXT | ANYTHING,
        "text": TEXT | ANYTHING, "input_ids": st.lists(st.integers(-2, 600), max_size=9) | ANYTHING,
        "loss_mask": st.lists(st.integers(0, 2), max_size=9) | ANYTHING,
    },
)  # fmt: skip
SCHEMAS = ("messages", "conversations", "prompt_completion", "text", "input_ids")
QUICK = settings(max_examples=60)


@pytest.fixture(scope="module")
def encoders(model: Path) -> dict[str, Encoder]:
    return {schema: make_encoder(model, row_schema=schema, vocab_size=512, max_length=64) for schema in SCHEMAS}


@pytest.mark.parametrize("schema", SCHEMAS)
@QUICK
@given(rows=st.lists(ROW | st.binary(max_size=20).filter(lambda line: b"\n" not in line), min_size=1, max_size=6))
def test_any_row_is_one_sample_or_one_reject(encoders: dict[str, Encoder], schema: str, rows: list[Any]) -> None:
    block = encode_rows(encoders[schema], rows)
    samples = split_samples(block)
    assert sorted([*samples, *(reject.row for reject in block.rejected)]) == list(range(len(rows)))
    assert len(block.input_ids) == len(block.loss_mask) == block.lengths.sum()
    for ids, mask in samples.values():
        assert 0 < len(ids) == len(mask) <= 64
        assert set(mask) <= {0, 1}
        assert any(mask)
        assert all(0 <= token < 512 for token in ids)


@QUICK
@given(texts=st.lists(st.lists(TEXT, min_size=2, max_size=5), min_size=1, max_size=5))
def test_a_row_does_not_depend_on_its_neighbours(encoders: dict[str, Encoder], texts: list[list[str]]) -> None:
    rows = [chat(*row) for row in texts]
    together = split_samples(encode_rows(encoders["messages"], [*rows, [1], b"{", rows[0]]))
    for number, row in enumerate(rows):
        alone = split_samples(encode_rows(encoders["messages"], [row]))
        assert together.get(number) == alone.get(0)
    assert together.get(len(rows) + 2) == together.get(0)


def test_a_prompt_of_text_and_one_of_turns_do_not_depend_on_each_other(tmp_path: Path) -> None:
    """Text gets the tokenizer's special tokens, turns get those of their template."""
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model"))
    start = (tokenizer.pad_token, tokenizer.pad_token_id)  # which the template never writes
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    tokenizer.save_pretrained(tmp_path / "model")
    encoder = make_encoder(tmp_path / "model", row_schema="prompt_completion")
    turns = {"prompt": chat("2+2=")["messages"], "completion": [{"role": "assistant", "content": "4"}]}
    rows: list[dict[str, Any]] = [{"prompt": "2+2=", "completion": "4"}, turns]
    alone = [split_samples(encode_rows(encoder, [row]))[0] for row in rows]
    assert [ids[0] == start[1] for ids, _ in alone] == [True, False]
    assert split_samples(encode_rows(encoder, rows)) == dict(enumerate(alone))
    assert split_samples(encode_rows(encoder, rows[::-1])) == dict(enumerate(alone[::-1]))


@QUICK
@given(texts=st.lists(TEXT, min_size=2, max_size=6))
def test_any_text_of_an_assistant_is_what_the_mask_covers(encoders: dict[str, Encoder], texts: list[str]) -> None:
    encoder = encoders["messages"]
    assert encoder.chat is not None
    assert encoder.chat.backend is not None
    block = encode_rows(make_roomy(encoder), [chat(*texts)])
    for ids, mask in split_samples(block).values():
        said = encoder.chat.backend.decode(
            [token for token, bit in zip(ids, mask, strict=True) if bit], skip_special_tokens=False
        )
        spoken = [json.loads(json.dumps(text)) for text in texts[1::2]]
        clean = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in spoken]
        assert said == "".join(f"{text}<|im_end|>" for text in clean)


def make_roomy(encoder: Encoder) -> Encoder:
    """The same encoder without a limit that a test's texts reach."""
    from dataclasses import replace

    roomy = object.__new__(Encoder)
    roomy.chat, roomy._settings = encoder.chat, replace(encoder._settings, max_length=4096)
    return roomy


@settings(max_examples=15)
@given(rows=st.lists(ROW | st.builds(chat, TEXT, TEXT), min_size=1, max_size=12))
def test_rows_in_are_rows_kept_and_rows_rejected(produce: Produce, tmp_path: Path, rows: list[Any]) -> None:
    import shutil

    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    outcome = produce([*rows, chat("a", "b")], row_schema="messages")
    config, samples = outcome.prepared.config, outcome.samples
    assert config.num_rows == len(rows) + 1 == config.num_samples + config.num_rejected
    assert sorted([*samples, *outcome.reasons]) == list(range(len(rows) + 1))
    assert config.num_tokens == sum(len(row.input_ids) for row in samples.values())
    assert config.num_supervised == sum(int(row.loss_mask.sum()) for row in samples.values())


def token_bytes(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.get_bytes(info.key) for info in store.list() if info.key != "run.json"}


def test_the_same_input_gives_the_same_bytes_whatever_the_number_of_processes(model: Path, tmp_path: Path) -> None:
    rows: list[Any] = [chat(f"question {number} " * (number % 50), f"answer {number}") for number in range(1500)]
    rows[700] = b"not json"
    data = write_lines(tmp_path / "rows.jsonl", rows)
    run: Callable[[int], dict[str, bytes]] = lambda processes: token_bytes(prepared(model, data, tmp_path, processes))  # noqa: E731
    one = run(1)
    assert set(one) == {"tokens/part-00000.safetensors", "tokens/batches.jsonl", "rejected.jsonl"}
    assert run(2) == one


def prepared(model: Path, data: Path, tmp_path: Path, processes: int) -> ObjectStore:
    store = open_store(tmp_path / f"out-{processes}")
    prepare(ProducerSettings(model=str(model), data=(str(data),), target_layers="0", processes=processes), store)
    return store
