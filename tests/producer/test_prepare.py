"""A run comes to exist whole or not at all, once, and says at once what can't be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiddenq.contracts.errors import DatasetError, ModelError, RunMismatch, UsageError, UserError
from hiddenq.storage import open_store
from hiddenq.storage.local import LocalStore
from hiddenq.storage.runfiles import load_run_json
from producer import ProducerSettings, parts, prepare
from tests.producer.conftest import Produce, chat, make_model, write_lines

ROWS = [chat(f"question {number}", f"answer {number} " * (number % 9)) for number in range(200)]


def settings(folder: Path, file: Path, **fields: Any) -> ProducerSettings:
    return ProducerSettings(**{"model": str(folder), "data": (str(file),), "target_layers": "1,2"} | fields)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", ROWS)


class Recorder(LocalStore):
    """A local store that remembers what was written, in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: list[str] = []

    def put_bytes(self, key: str, data: bytes) -> None:
        super().put_bytes(key, data)
        self.written.append(key)

    def put_file(self, key: str, path: Path, **options: Any) -> Any:
        info = super().put_file(key, path, **options)
        self.written.append(key)
        return info


def test_run_json_is_written_last_and_once(model: Path, data: Path, tmp_path: Path) -> None:
    store = Recorder(tmp_path / "out")
    first = prepare(settings(model, data), store)
    assert store.written == ["tokens/part-00000.safetensors", "tokens/batches.jsonl", "rejected.jsonl", "run.json"]
    again = prepare(settings(model, data), store)
    assert len(store.written) == 4
    assert (first.reused, again.reused) == (False, True)
    assert again.config == first.config == load_run_json(store)


def test_a_second_start_tokenises_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    stages: set[str] = set()
    for _ in range(2):
        stages.clear()
        prepare(settings(model, data), open_store(tmp_path / "out"), lambda stage, done, total: stages.add(stage))
    assert stages == {"reading"}


def test_the_name_of_a_file_may_change_its_bytes_may_not(model: Path, data: Path, tmp_path: Path) -> None:
    prepare(settings(model, data), open_store(tmp_path / "out"))
    moved = data.rename(tmp_path / "moved.jsonl")
    assert prepare(settings(model, moved), open_store(tmp_path / "out")).reused


def test_a_length_that_only_follows_from_the_budget_is_no_difference_of_its_own(
    model: Path, data: Path, tmp_path: Path
) -> None:
    prepare(settings(model, data, token_budget=256), open_store(tmp_path / "out"))
    with pytest.raises(RunMismatch, match=r"token_budget: 256 there, 128 asked for") as refusal:
        prepare(settings(model, data, token_budget=128), open_store(tmp_path / "out"))
    assert "max_length" not in str(refusal.value)
    prepare(settings(model, data, token_budget=256, max_length=100), open_store(tmp_path / "short"))
    with pytest.raises(RunMismatch, match=r"max_length: 100 there, 128 asked for; token_budget: 256 there"):
        prepare(settings(model, data, token_budget=128), open_store(tmp_path / "short"))


def test_an_interrupted_producer_leaves_no_run_and_its_remains_do_no_harm(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_TOKENS", 500)
    store = Recorder(tmp_path / "out")
    whole = prepare(settings(model, data, token_budget=256), store)
    assert whole.config.num_token_parts > 3
    store.delete("run.json")
    monkeypatch.setattr(parts, "PART_TOKENS", 1 << 20)
    again = prepare(settings(model, data, token_budget=256), store)
    assert again.config.num_token_parts == 1
    assert [info.key for info in store.list("tokens/")] == ["tokens/batches.jsonl", "tokens/part-00000.safetensors"]


@pytest.mark.parametrize("part_tokens", [1, 500, 1 << 20])
def test_parts_hold_every_batch_as_one_slice(
    produce: Produce, monkeypatch: pytest.MonkeyPatch, part_tokens: int
) -> None:
    monkeypatch.setattr(parts, "PART_TOKENS", part_tokens)
    outcome = produce(ROWS, token_budget=256)
    assert sorted(outcome.samples) == list(range(200))
    batches = outcome.batches
    assert [batch.batch_id for batch in batches] == [f"{number:06d}" for number in range(len(batches))]
    assert len(batches) == outcome.prepared.config.num_batches
    first_rows: dict[int, int] = {}
    for batch in batches:
        assert batch.first_row == first_rows.get(batch.token_part, 0)
        first_rows[batch.token_part] = batch.first_row + batch.num_samples
    assert max(first_rows) + 1 == outcome.prepared.config.num_token_parts


def test_a_message_of_a_batch_stays_small(produce: Produce) -> None:
    outcome = produce(ROWS[:3])
    batch = outcome.batches[0]
    assert len(batch.job(outcome.prepared.config.run).to_json()) < 1024


def test_too_many_rejects_end_before_anything_is_written(produce: Produce, tmp_path: Path) -> None:
    rows = [chat("a", "b")] * 7 + [{"messages": []}] * 2 + [{"text": "x"}]
    with pytest.raises(
        DatasetError,
        match=r"3 of 10 rows rejected, more than --max-rejected 0\.25 allows: empty 2, wrong_schema 1",
    ):
        produce(rows, max_rejected=0.25)
    assert list(open_store(tmp_path / "out").list()) == []
    assert produce(rows, max_rejected=0.3).prepared.config.num_rejected == 3


@pytest.mark.parametrize("schema", ["auto", "messages"])
def test_nothing_kept_is_an_error(produce: Produce, schema: str) -> None:
    with pytest.raises(DatasetError, match=r"rows\.jsonl: no rows in it"):
        produce([], row_schema=schema)
    with pytest.raises(DatasetError, match=r"all 2 rows rejected: empty 2; see them with hiddenq plan"):
        produce([{"messages": []}] * 2, row_schema=schema)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([b"{oops", b"{oops"], "none of the first rows is a JSON object: .*expected"),
        ([b"hello", chat("a", "b")["messages"]], "none of the first rows is a JSON object: unexpected|expected"),
        ([[1], 5], "none of the first rows is a JSON object: list"),
        ([b"\xff\xfe{"], "none of the first rows is a JSON object: not UTF-8"),
    ],
)
def test_a_file_of_something_else_says_what_was_found(produce: Produce, rows: list[Any], why: str) -> None:
    with pytest.raises(DatasetError, match=f"no schema fits; {why}"):
        produce(rows)


def test_with_no_reject_allowed_the_first_one_ends_the_run(produce: Produce) -> None:
    with pytest.raises(DatasetError, match=r"1 of 201 rows rejected, more than --max-rejected 0 allows: empty 1"):
        produce([*ROWS, {"messages": []}], max_rejected=0)
    assert produce(ROWS, max_rejected=0).prepared.config.num_rejected == 0


def test_identical_rows_and_ids_of_their_own_are_samples_each(produce: Produce) -> None:
    outcome = produce([chat("a", "b") | {"id": 7}] * 5)
    assert sorted(outcome.samples) == [0, 1, 2, 3, 4]


def test_data_that_changed_between_two_starts_is_named_and_the_old_run_left_alone(
    produce: Produce, tmp_path: Path
) -> None:
    before = produce(ROWS)
    with pytest.raises(RunMismatch, match=r"dataset\.files.*use another location, or the settings and inputs of"):
        produce([*ROWS, chat("one", "more")])
    assert load_run_json(open_store(tmp_path / "out")) == before.prepared.config


def test_shards_without_their_run_json_are_not_taken_over(model: Path, data: Path, tmp_path: Path) -> None:
    store = open_store(tmp_path / "out")
    store.put_bytes("states/000000-00000000.safetensors", b"x")
    with pytest.raises(RunMismatch, match=r"it holds shards of a run whose run\.json is gone"):
        prepare(settings(model, data), store)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"target_layers": "1,99"}, ModelError, "layer 99 does not exist; this model has 4 layers, ids 0 to 3"),
        ({"target_layers": "dflash"}, ModelError, "too few for the preset"),
        ({"target_layers": "1,1"}, UsageError, "an id is repeated"),
        ({"target_layers": "none", "final_hidden_state": False}, UsageError, "nothing would be stored"),
        ({"model": "/no/such/folder"}, ModelError, "--model /no/such/folder: no such folder"),
        ({"data": ("/no/such/rows.jsonl",)}, DatasetError, "--data /no/such/rows.jsonl: no such file"),
        ({"max_shard_bytes": 1 << 16, "max_length": 4000}, UsageError, "a sample of 4000 tokens would not fit"),
        ({"chat_template": Path("/no/template")}, UsageError, "--chat-template /no/template: can't be read"),
    ],
)
def test_what_cannot_be_is_one_line_at_once(
    model: Path, data: Path, tmp_path: Path, change: dict[str, Any], error: type[UserError], text: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(error, match=text) as refused:
        prepare(settings(model, data, **change), open_store(tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2
    assert time.monotonic() - begin < 5


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="--max-length 5000: one such sample would not fit --token-budget 4096"):
        ProducerSettings(model="m", data=("d",), max_length=5000, token_budget=4096)
    with pytest.raises(UsageError, match="--template-arguments: has no effect on rows of text; leave it out"):
        ProducerSettings(model="m", data=("d",), row_schema="text", template_arguments={"enable_thinking": True})
    with pytest.raises(UsageError, match="--chat-template: has no effect on rows of input_ids; leave it out"):
        ProducerSettings(model="m", data=("d",), row_schema="input_ids", chat_template=Path("template.jinja"))
    with pytest.raises(UsageError, match="--data: name at least one file"):
        ProducerSettings(model="m", data=())


def test_a_model_without_a_chat_template_is_told_how_to_get_one(tmp_path: Path, data: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=r"its tokenizer has no chat template.*--chat-template FILE"):
        prepare(settings(model, data), open_store(tmp_path / "out"))
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
                        "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    assert (
        prepare(settings(model, data, chat_template=template), open_store(tmp_path / "out")).config.num_samples == 200
    )


def test_truncation_left_in_a_tokenizer_file_does_not_cut_samples(tmp_path: Path, produce: Produce) -> None:
    model = make_model(tmp_path / "model")
    path = model / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fields["padding"] = {"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                         "pad_type_id": 0, "pad_token": "<|pad|>"}  # fmt: skip
    path.write_text(json.dumps(fields))
    (length,) = (len(row.input_ids) for row in produce([chat("hello", "ho")], model=str(model)).samples.values())
    assert 4 < length < 999


def test_ids_beyond_the_models_vocabulary_are_refused(produce: Produce) -> None:
    outcome = produce([{"input_ids": [1, 511]}, {"input_ids": [1, 512]}])
    assert outcome.reasons == {1: "token_out_of_range"}


def test_plain_text_is_supervised_except_for_what_the_tokenizer_adds(produce: Produce) -> None:
    samples = produce([{"text": "hello"}]).samples
    assert samples[0].loss_mask.all()


def test_a_completion_is_supervised_and_its_prompt_is_not(produce: Produce) -> None:
    row = produce([{"prompt": "What? ", "completion": "Paris."}]).samples[0]
    supervised = row.loss_mask.tolist()
    assert supervised == sorted(supervised)
    assert 0 < sum(supervised) < len(supervised)


@pytest.mark.parametrize("module", ["producer", "hiddenq.model_identity", "hiddenq.storage.runfiles"])
def test_imports_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_a_template_that_writes_the_date_is_warned_about(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = make_model(tmp_path / "model", template=template)
    with caplog.at_level("WARNING", "hiddenq"):
        prepare(settings(model, data), open_store(tmp_path / "out"))
    assert [event["event"] for event in events(caplog)] == ["template_may_write_the_date"]


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What hiddenq logged."""
    return [record.msg for record in caplog.records if record.name == "hiddenq" and isinstance(record.msg, dict)]


def test_what_was_understood_and_mended_is_logged(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, chat("a", "b")["messages"][1]]}
    rows = [chat("a", "b"), odd, {"messages": []}]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    with caplog.at_level("INFO", "hiddenq"):
        prepare(settings(model, file, max_rejected=0.5), open_store(tmp_path / "out"))
    understood, tokenised = events(caplog)
    assert understood["row_schema"] == "messages"
    assert (tokenised["rejected"], tokenised["repairs"]) == ({"empty": 1}, {"text_parts_joined": 1})


def test_an_output_short_of_room_is_warned_about(
    produce: Produce, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    produce(ROWS)
    (event,) = events(caplog)
    assert (event["event"], event["free_bytes"]) == ("output_short_of_room", 1000)
    assert event["needed_bytes"] > 1000
