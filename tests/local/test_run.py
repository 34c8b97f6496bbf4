"""`hiddenq run`: from a dataset to committed shards, and again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hiddenq
from hiddenq.storage import StoreSettings, open_store
from tests.local.conftest import ALONE, chats, shard_files, write_rows
from tests.local.whole_runs import assert_complete
from tests.support.command import Command, lines_of, make_command
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Location, S3Server
from tests.support.samples import both_states

pytestmark = pytest.mark.slow


def plain_states(model: Any, input_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Each layer's output, the last one before the final norm, and the logits, of one sample alone."""
    decoder = model.get_decoder()
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for layer in decoder.layers
    ]
    with torch.inference_mode():
        logits = model(input_ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return [out[0] for out in outputs], outputs[-1][0], logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5_text"])
def test_every_layer_of_every_sample_equals_a_plain_forward_of_that_sample_alone(
    name: str, hiddenq: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(24))
    out = tmp_path / "out"
    ended = hiddenq(
        "run", "--model", models[name], "--data", data, "--out", out, "--target-layers", "0,1,2,3",
        "--token-budget", "1024", *ALONE,
    )  # fmt: skip
    run = assert_complete(ended, out, 24)
    assert run.config.num_batches > 2
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
    head, norm = model.get_output_embeddings(), model.get_decoder().norm
    for sample_id in run.sample_ids:
        sample = run[int(sample_id)]
        layers, final, logits = plain_states(model, sample.input_ids)
        stored, stored_final = both_states(sample)
        assert stored.shape == (len(sample.input_ids), 4, 64)
        for layer in range(4):
            assert relative(stored[:, layer], layers[layer]) < 1e-5, f"layer {layer} of {sample_id}"
        assert relative(stored_final, final) < 1e-5
        with torch.inference_mode():
            assert relative(head(norm(stored_final)), logits) < 1e-5


def test_a_second_run_has_nothing_to_do_and_does_no_forward_pass(
    hiddenq: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(6))
    out = tmp_path / "out"
    arguments = ("run", "--model", models["llama"], "--data", data, "--out", out, "--target-layers", "1",
                 *ALONE)  # fmt: skip
    assert_complete(hiddenq(*arguments), out, 6)
    before = {path: path.stat().st_mtime_ns for path in shard_files(out)}
    worker_log = (out / ".hiddenq" / "logs" / "worker-cpu.log").read_text()
    again = hiddenq(*arguments)
    assert_complete(again, out, 6)
    assert "0 to do" in again.out
    assert {path: path.stat().st_mtime_ns for path in shard_files(out)} == before
    assert (out / ".hiddenq" / "logs" / "worker-cpu.log").read_text() == worker_log, "no worker was even started"


def test_token_ids_with_a_mask_are_taken_as_they_are(hiddenq: Command, models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(3, 3 + n)), "loss_mask": [0] * (n // 2) + [1] * (n - n // 2)} for n in (5, 9, 33)]
    data = write_rows(tmp_path / "ids.jsonl", rows)
    out = tmp_path / "out"
    ended = hiddenq("run", "--model", models["qwen3"], "--data", data, "--out", out, "--target-layers", "0,2",
                    *ALONE)  # fmt: skip
    run = assert_complete(ended, out, 3)
    for number, row in enumerate(rows):
        assert run[number].input_ids.tolist() == row["input_ids"]
        assert run[number].loss_mask.tolist() == row["loss_mask"]


def test_the_test_flag_runs_the_first_hundred_rows_beside_the_location(
    hiddenq: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(120, max_words=4))
    out = tmp_path / "out"
    ended = hiddenq("run", "--test", "--model", models["llama"], "--data", data, "--out", out, "--target-layers", "1",
                    *ALONE)  # fmt: skip
    assert_complete(ended, tmp_path / "out-test", 100)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--target-layers": "1,4"}, r"layer 4 does not exist; this model has 4 layers, ids 0 to 3"),
        ({"--target-layers": "1,1"}, r"an id is repeated"),
        ({"--target-layers": "eagle3"}, r"this model has 4 layers, too few for the preset"),
        ({"--data": "nothing.jsonl"}, r"nothing\.jsonl"),
        ({"--model": "no/such-model"}, r"no/such-model"),
        ({"--out": "s3://bucket"}, r"a prefix is needed"),
        ({"--devices": "cuda:9"}, r"cuda:9 is not there"),
        ({"--token-budget": "0"}, r"--token-budget"),
        ({"--out": "{}/chats.jsonl"}, r"chats\.jsonl is a file; name a folder, which need not be there yet"),
        ({"--out": "{}/chats.jsonl/below"}, r"--out .*/below: .*chats\.jsonl is a file"),
    ],
)
def test_what_is_the_users_to_mend_is_one_line_and_exit_2_and_leaves_nothing_behind(
    change: dict[str, str], message: str, hiddenq: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(3))
    out = tmp_path / "out" / "of"
    options = {"--model": str(models["llama"]), "--data": str(data), "--out": str(out), "--target-layers": "1",
               "--devices": "cpu"} | change  # fmt: skip
    ended = hiddenq("run", *[part.format(tmp_path) for pair in options.items() for part in pair])
    assert ended.status == 2, ended
    said = ended.err.strip().splitlines()
    assert len(said) == 1, ended
    assert re.search(message, said[0]), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "home"]


def test_a_location_of_another_run_is_refused_naming_the_field(
    hiddenq: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "chats.jsonl", chats(3))
    out = tmp_path / "out"
    common = ("run", "--data", data, "--out", out, *ALONE)
    assert_complete(hiddenq(*common, "--model", models["llama"], "--target-layers", "1"), out, 3)
    ended = hiddenq(*common, "--model", models["llama"], "--target-layers", "2")
    assert ended.status == 2
    assert "target_layer_ids" in ended.err
    ended = hiddenq(*common, "--model", models["qwen3"], "--target-layers", "1")
    assert ended.status == 2
    assert "model.config_digest" in ended.err


def test_a_run_into_s3_is_complete_and_resumes(
    s3_server: S3Server, s3_location: S3Location, models: dict[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = make_command(
        home,
        AWS_ACCESS_KEY_ID=ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=SECRET_KEY,
        AWS_REGION="us-east-1",
        HF_TOKEN="hf_planted",
        HIDDENQ_LOG_LEVEL="DEBUG",
    )
    data = write_rows(tmp_path / "chats.jsonl", chats(8))
    arguments = ("run", "--model", models["llama"], "--data", data, "--out", s3_location.uri, "--target-layers", "1,2",
                 "--endpoint-url", s3_server.endpoint_url, *ALONE)  # fmt: skip
    ended = command(*arguments)
    assert ended.status == 0, f"{ended}\n{lines_of(sorted(home.rglob('*.log')))}"
    again = command(*arguments)
    assert again.status == 0, again
    assert "0 to do" in again.out
    verdict = command("verify", "--out", s3_location.uri, "--endpoint-url", s3_server.endpoint_url, "--recompute", "2")
    assert verdict.status == 0, verdict
    settings = StoreSettings(endpoint_url=s3_server.endpoint_url, region="us-east-1")
    run = hiddenq.open_run(s3_location.uri, settings)
    assert len(run) == 8
    assert both_states(run[3])[0].shape[1:] == (2, 64)
    store = open_store(s3_location.uri, settings)
    places = {info.key: store.get_bytes(info.key) for info in store.list()}
    private = [path for path in home.rglob("*") if path.is_file() and path.stat().st_mode & 0o077 == 0]
    [password] = [path.read_bytes().strip() for path in private if path.name == "password"]
    secrets = [SECRET_KEY.encode(), b"hf_planted", password]
    places |= {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file() and path not in private}
    places |= {name: f"{said}".encode() for name, said in (("run", ended), ("again", again), ("verify", verdict))}
    assert any(".log" in place for place in places)
    assert [place for place, data in places.items() for secret in secrets if secret in data] == []
    assert {path.name for path in private if password in path.read_bytes()} == {"password", "redis.conf"}


def test_a_real_model_in_bf16_is_as_close_to_its_own_fp32_as_transformers_is(
    hiddenq: Command, tmp_path: Path, real_model: tuple[Path, Path]
) -> None:
    model, conversations = real_model
    data = tmp_path / "few.jsonl"
    data.write_text("".join(conversations.read_text().splitlines(keepends=True)[:6]))
    out = tmp_path / "out"
    ended = hiddenq("run", "--model", model, "--data", data, "--out", out, "--max-length", "96",
                    "--token-budget", "288", "--devices", "cpu", "--processes", "1")  # fmt: skip
    run = assert_complete(ended, out, 6)
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    assert run.target_layer_ids == (1, 14, 26)
    for sample_id in range(6):
        sample = run[sample_id]
        truth, final, _ = plain_states(exact, sample.input_ids)
        theirs, their_final, _ = plain_states(rounded, sample.input_ids)
        hidden, our_final = both_states(sample)
        pairs = [(hidden[:, n], theirs[layer], truth[layer]) for n, layer in enumerate(run.target_layer_ids)]
        for ours, plain, expected in [*pairs, (our_final, their_final, final)]:
            assert distance(ours, expected) <= 1.1 * distance(plain, expected) + 1e-4
            assert distance(ours, expected) < 5e-2, "thirty layers of bf16"


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference, relative to that of the expected states."""
    return float((found.float() - expected).norm() / expected.norm())
