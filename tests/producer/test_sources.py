"""What a user may name as data, and what is refused in one line."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from botocore.response import StreamingBody

from hiddenq.contracts.errors import DatasetError
from producer import ProducerSettings, plan
from producer.sources import check_named, digest_files, resolve_data
from tests.producer.conftest import Produce, chat, write_lines
from tests.support.s3_server import S3Location, S3Server, s3_location, s3_server

__all__ = ["s3_location", "s3_server"]


def names(tmp_path: Path, *entries: str) -> list[str]:
    return [Path(file.name).name for file in resolve_data(entries, lambda: tmp_path / "scratch")]


def test_files_come_in_the_order_given_and_globs_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl", "[odd].jsonl"):
        write_lines(tmp_path / name, [chat("a", "b")])
    assert names(tmp_path, str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")) == ["c.jsonl", "a.jsonl", "b.jsonl"]
    assert names(tmp_path, str(tmp_path / "[odd].jsonl")) == ["[odd].jsonl"]


def test_a_folder_gives_its_data_files_sorted_and_nothing_hidden(tmp_path: Path) -> None:
    (tmp_path / "data" / ".cache").mkdir(parents=True)
    (tmp_path / "data" / "more.json").mkdir()
    for name in ("b.jsonl", "README.md", ".hidden.jsonl", ".cache/x.jsonl", "more.json/a.jsonl.gz"):
        (tmp_path / "data" / name).write_bytes(b"{}\n")
    assert names(tmp_path, str(tmp_path / "data")) == ["b.jsonl", "a.jsonl.gz"]


def test_a_file_whose_name_is_no_utf_8_is_read_and_named_as_well_as_can_be(produce: Produce, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    folder.mkdir()
    write_lines(folder / "rows.jsonl", [chat("a", "b"), {"messages": 1}])
    shown = f"{tmp_path}/\ufffd/rows.jsonl"
    for entry in (folder, folder / "rows.jsonl", f"{folder}/*.jsonl"):
        assert [file.name for file in resolve_data([str(entry)], lambda: tmp_path)] == [shown]
    outcome = produce([], data=(str(folder),))
    assert [file.name for file in outcome.prepared.config.dataset.files] == [shown]
    assert [(reject.row, reject.file) for reject in outcome.rejected] == [(1, shown)]
    settings = ProducerSettings(model=outcome.prepared.config.model.model, data=(str(folder),), target_layers="1")
    assert json.loads(plan(settings).model_dump_json())["data"] == [str(Path(shown).parent)]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("{tmp}/none.jsonl", "no such file"),
        ("./none", "no such file"),
        ("{tmp}/*.jsonl", "no file matches"),
        ("{tmp}", r"no \.jsonl, .* file in this folder"),
        ("https://host/rows.jsonl", "expected a path, s3://bucket/key or a hub dataset's name"),
        ("s3://bucket", "expected s3://bucket/key, a pattern, or a prefix that ends in /"),
        ("owner/name:a:b:c", "expected owner/name, owner/name:split or owner/name:config:split"),
    ],
)
def test_data_that_is_not_there_is_one_line(tmp_path: Path, entry: str, text: str) -> None:
    with pytest.raises(DatasetError, match=text) as refused:
        resolve_data([entry.format(tmp=tmp_path)], lambda: tmp_path / "scratch")
    assert "\n" not in str(refused.value)


def test_a_bucket_without_credentials_says_which_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(DatasetError, match=r"--data s3://b/x\.jsonl: no credentials found; set AWS_ACCESS_KEY_ID"):
        resolve_data(["s3://b/x.jsonl"], lambda: tmp_path / "scratch")


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [("AWS_PROFILE", "none", r"profile \(none\) could not be found"), ("AWS_ENDPOINT_URL", "none", "Invalid endpoint")],
)
def test_a_setting_of_s3_that_cannot_be_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(DatasetError, match=rf"--data s3://b/x\.jsonl: .*{text}"):
        resolve_data(["s3://b/x.jsonl"], lambda: tmp_path / "scratch")


def test_a_download_that_breaks_off_again_and_again_is_one_line(
    tmp_path: Path, s3_server: S3Server, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    key = f"{s3_location.prefix}/rows.jsonl"
    s3_server.client().put_object(Bucket=s3_location.bucket, Key=key, Body=b"rows")

    def broken(body: StreamingBody, *_arguments: object) -> bytes:
        body.close()
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(StreamingBody, "read", broken)
    with pytest.raises(DatasetError, match=r"rows\.jsonl: broke off again and again: reset by peer"):
        resolve_data([f"{s3_location.uri}/rows.jsonl"], lambda: tmp_path / "scratch")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"splits": ["train", "test"]}', "it holds the splits train, test; name one"),
        ('{"splits": []}', "its dataset_dict.json names no splits: IndexError"),
        ("[]", "its dataset_dict.json names no splits: TypeError"),
    ],
)
def test_a_dataset_of_several_splits_must_name_one(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DatasetError, match=text):
        resolve_data([str(tmp_path)], lambda: tmp_path)


def test_an_unreadable_name_is_found_before_anything_is_fetched(tmp_path: Path) -> None:
    check_named(["s3://bucket/not-looked-at", "owner/not-looked-at"])
    with pytest.raises(DatasetError, match="a URI holds credentials") as caught:
        check_named(["s3://me:planted@bucket/rows.jsonl"])
    assert "planted" not in str(caught.value)
    with pytest.raises(DatasetError, match="no such file"):
        check_named([str(tmp_path / "none.jsonl")])


def test_objects_in_s3_become_files_in_the_order_of_keys(
    tmp_path: Path, s3_server: S3Server, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        s3_server.client().put_object(Bucket=s3_location.bucket, Key=f"{s3_location.prefix}/{name}", Body=name.encode())
    for number, (entry, expected) in enumerate(
        [("/", ["a.jsonl", "b.jsonl"]), ("/b.jsonl", ["b.jsonl"]), ("/*.txt", ["notes.txt"])]
    ):
        files = resolve_data([s3_location.uri + entry], partial(Path, tmp_path / str(number)))
        assert [Path(file.name).name for file in files] == expected
        assert [file.path.read_text() for file in files] == expected
    for entry in ("/none.jsonl", "/*.parquet", "/none/"):
        with pytest.raises(DatasetError, match="no object there"):
            resolve_data([s3_location.uri + entry], lambda: tmp_path / "none")


def test_a_digest_is_that_of_the_bytes_not_of_the_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for file in (one, two):
        write_lines(file, [chat("a", "b")])
    seen: list[int] = []
    files = digest_files(resolve_data([str(one), str(two)], lambda: tmp_path), seen.append)
    assert files[0].digest == files[1].digest
    assert seen[-1] == one.stat().st_size * 2
    two.write_bytes(two.read_bytes() + b" ")
    assert digest_files(resolve_data([str(two)], lambda: tmp_path), seen.append)[0].digest != files[0].digest
