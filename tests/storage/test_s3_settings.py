"""Where a store is and as whom it is asked: each setting goes where it is for, a wrong one is a line, none leaks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hiddenq.contracts.errors import (
    ObjectMissing,
    StoreRefused,
    UsageError,
)
from hiddenq.storage import StoreObserver, StoreSettings, open_store
from hiddenq.storage.s3_client import S3Connection
from tests.storage.s3 import KEY, PART, make_file, store_at
from tests.support.faulty_proxy import ENCRYPTION, FaultyProxy, Request
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Location, S3Server


def test_a_store_that_can_not_be_used_says_why_and_what_to_do(
    s3_server: S3Server, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreRefused, match="no-such-bucket-here/run: no such bucket"):
        store_at(s3_server.endpoint_url, "s3://no-such-bucket-here/run").check_readable()
    with pytest.raises(StoreRefused, match="no such bucket"):
        store_at(s3_server.endpoint_url, "s3://no-such-bucket-here/run").probe()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(StoreRefused, match="the secret key is wrong; check AWS_ACCESS_KEY_ID") as caught:
            store_at(s3_server.endpoint_url, s3_location.uri).probe()
        assert "wrong\n" not in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        with pytest.raises(StoreRefused, match="the access key is unknown"):
            store_at(s3_server.endpoint_url, s3_location.uri).probe()
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        with pytest.raises(StoreRefused, match="no credentials found; set AWS_ACCESS_KEY_ID"):
            store_at(s3_server.endpoint_url, s3_location.uri).probe()
    with pytest.raises(UsageError, match="profile"):
        store_at(s3_server.endpoint_url, s3_location.uri, profile="nobody").probe()


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("s3://bucket", r"a prefix is needed, such as s3://bucket/my-run"),
        ("s3://bucket/", "a prefix is needed"),
        ("s3://", "a prefix is needed"),
        ("s3://bucket/a/../b", "no '..'"),
        ("gs://bucket/run", "expected s3://bucket/prefix or a local folder, found gs://"),
        ("file://host/folder", "three slashes"),
        ("  ", "found nothing"),
        ("s3://me:planted@bucket/run", "s3://…: it holds credentials"),
        ("https://planted@host/run", "https://…: it holds credentials"),
    ],
)
def test_a_location_that_can_not_be_is_refused(uri: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        open_store(uri)
    assert "planted" not in str(caught.value)


def test_settings_hold_no_secret_and_none_without_effect(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it holds credentials") as caught:
        StoreSettings(endpoint_url="http://me:my-secret@host:9000")
    assert "my-secret" not in str(caught.value)
    with pytest.raises(UsageError, match="--endpoint-url"):
        StoreSettings(endpoint_url="host:9000")
    with pytest.raises(UsageError, match="--storage-class: has no effect on a local folder"):
        open_store(tmp_path, StoreSettings(storage_class="STANDARD"))


def test_nothing_secret_is_ever_logged(
    s3_server: S3Server, s3_location: S3Location, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = store_at(s3_server.endpoint_url, s3_location.uri)
    path, checksum = make_file(tmp_path, 1000)
    store.put_file(KEY, path, checksum=checksum, num_bytes=1000)
    with pytest.raises(ObjectMissing) as caught:
        store.get_bytes("nothing")
    for text in (caplog.text, str(caught.value), repr(store), repr(vars(store))):
        assert SECRET_KEY not in text


def written_to_states(request: Request) -> bool:
    """Whether a request makes a shard (of a multipart upload, the one that opens it)."""
    makes = request.method == "PUT" and "partNumber" not in request.target
    return "/states/" in request.target and (makes or request.target.endswith("?uploads"))


def test_settings_go_with_every_request_that_they_are_for(
    faulty_proxy: FaultyProxy, s3_location: S3Location, tmp_path: Path
) -> None:
    faulty_proxy.plan(ENCRYPTION)  # this server has no keys
    store = store_at(
        faulty_proxy.endpoint_url,
        s3_location.uri,
        sse="aws:kms",
        sse_kms_key_id="key-1",
        storage_class="STANDARD_IA",
        request_payer=True,
    )
    store.probe()
    store.put_bytes("run.json", b"{}")
    for num_bytes in (1000, 3 * PART):
        path, checksum = make_file(tmp_path, num_bytes)
        store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
        assert store.checksum(KEY) == checksum
    assert [info.key for info in store.list()] == ["run.json", KEY]
    store.abort_unfinished(lambda name: True)
    store.delete(KEY)
    requests = faulty_proxy.requests
    assert {request.method for request in requests} == {"PUT", "POST", "GET", "HEAD", "DELETE"}
    assert {request.headers.get("x-amz-request-payer") for request in requests} == {"requester"}
    assert all(request.target.startswith(f"/{s3_location.bucket}") for request in requests)
    shards = [request.headers for request in requests if written_to_states(request)]
    assert len(shards) == 2
    assert {headers.get("x-amz-storage-class") for headers in shards} == {"STANDARD_IA"}
    encrypted = [
        request.headers
        for request in requests
        if (request.method == "PUT" and "partNumber" not in request.target) or request.target.endswith("?uploads")
    ]
    assert len(encrypted) >= 6
    assert {headers.get("x-amz-server-side-encryption") for headers in encrypted} == {"aws:kms"}
    assert {headers.get("x-amz-server-side-encryption-aws-kms-key-id") for headers in encrypted} == {"key-1"}


class Asked(Exception):
    """A request as it would have been sent."""


def asked(**settings: Any) -> tuple[str, str]:
    """The address that a store with these settings asks for an object of `bucket`, and in whose name."""

    def keep(request: Any, **_: Any) -> None:
        raise Asked(request.url, request.headers["Authorization"].decode())

    def get(client: Any) -> None:
        client.meta.events.register("before-send.s3", keep)
        client.get_object(Bucket="bucket", Key="key")

    with pytest.raises(Asked) as caught:
        S3Connection(StoreSettings(**settings), StoreObserver()).call("", get)
    url, authorization = caught.value.args
    return url, authorization


def test_endpoint_addressing_region_and_profile_decide_whom_is_asked_where_and_as_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    (tmp_path / "config").write_text("[profile other]\nregion = eu-west-3\n")
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = OTHERKEY\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OURKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    endpoint = "https://store.example:9000"
    assert asked(endpoint_url=endpoint, addressing_style="path")[0] == f"{endpoint}/bucket/key"
    assert asked(endpoint_url=endpoint, addressing_style="virtual")[0] == "https://bucket.store.example:9000/key"
    url, authorization = asked(region="ap-south-1")
    assert url == "https://bucket.s3.ap-south-1.amazonaws.com/key"
    assert "Credential=OURKEY/" in authorization
    assert "/ap-south-1/s3/" in authorization
    _, authorization = asked(profile="other")
    assert "Credential=OTHERKEY/" in authorization
    assert "/eu-west-3/s3/" in authorization


def test_credentials_that_a_program_hands_out_are_fetched_anew_before_they_end(
    faulty_proxy: FaultyProxy, s3_location: S3Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    program = tmp_path / "give.sh"
    program.write_text(
        f"""#!/bin/sh
echo x >>{tmp_path}/given
end=$(date -u -d "+60 seconds" +%Y-%m-%dT%H:%M:%SZ)
printf '{{"Version": 1, "AccessKeyId": "{ACCESS_KEY}", "SecretAccessKey": "{SECRET_KEY}", "Expiration": "%s"}}' "$end"
"""
    )
    program.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
    store = store_at(faulty_proxy.endpoint_url, s3_location.uri, checksums="metadata")
    given = []
    for _ in range(3):  # always within botocore's last minutes: asked again each time
        store.put_bytes("run.json", b"{}")
        given.append(len((tmp_path / "given").read_text()))
    assert given[0] < given[1] < given[2]
