"""S3Store against a real, strict server, and against stores that are lax or old (made by a proxy from the real one)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import (
    DamagedShard,
    MissingShard,
    ObjectMissing,
    StoreRefused,
    UsageError,
)
from hiddenq.storage import ObjectStore, StoreObserver, StoreSettings, open_store
from hiddenq.storage.s3_client import S3Connection
from hiddenq.storage.s3_multipart import part_sizes
from tests.support.faulty_proxy import CHECKSUMS, ENCRYPTION, Answer, FaultyProxy, Request, Strip, has_checksum
from tests.support.s3_server import ACCESS_KEY, SECRET_KEY, S3Location, S3Server

KEY = "states/000001-0123abcd.safetensors"
PART = 5 << 20


def make_file(folder: Path, num_bytes: int) -> tuple[Path, str]:
    path = folder / f"file-{num_bytes}"
    path.write_bytes(os.urandom(num_bytes))
    return path, crc.of_file(path)


def store_at(endpoint_url: str, uri: str, **settings: Any) -> ObjectStore:
    return open_store(
        uri,
        StoreSettings(endpoint_url=endpoint_url, part_bytes=PART, timeout_seconds=10, **settings),
    )


@pytest.fixture
def store(s3_server: S3Server, s3_location: S3Location) -> ObjectStore:
    return store_at(s3_server.endpoint_url, s3_location.uri)


def test_a_strict_store_is_trusted_because_it_refuses_a_wrong_checksum(store: ObjectStore) -> None:
    capabilities = store.probe()
    assert capabilities.confirm == "store"
    assert capabilities.detail == "the store verifies CRC64-NVME and tells it back"
    assert list(store.list()) == []


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000, 2 * PART, 2 * PART + 1, 4 * PART + 12345])
def test_a_file_of_any_size_arrives_with_the_checksum_that_the_worker_recorded(
    store: ObjectStore, s3_server: S3Server, s3_location: S3Location, tmp_path: Path, num_bytes: int
) -> None:
    path, checksum = make_file(tmp_path, num_bytes)
    info = store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
    assert (info.num_bytes, info.checksum) == (num_bytes, checksum)
    answer = s3_server.client().head_object(
        Bucket=s3_location.bucket, Key=f"{s3_location.prefix}/{KEY}", ChecksumMode="ENABLED"
    )
    assert answer["ChecksumCRC64NVME"] == crc.to_s3(checksum)
    assert answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    assert answer["Metadata"]["hiddenq-checksum"] == checksum
    assert store.get_bytes(KEY) == path.read_bytes()
    assert store.checksum(KEY) == checksum


def test_bytes_that_are_not_those_recorded_never_become_an_object(
    store: ObjectStore, s3_server: S3Server, s3_location: S3Location, tmp_path: Path
) -> None:
    for num_bytes in (1000, 3 * PART):
        path, checksum = make_file(tmp_path, num_bytes)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            DamagedShard, match=re.escape(f"file-{num_bytes}: expected checksum {checksum}, found crc64nvme:")
        ):
            store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
        path.write_bytes(data[:-1])
        with pytest.raises(DamagedShard, match=f"expected {num_bytes} bytes, found {num_bytes - 1}"):
            store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
        path.write_bytes(data + b"more")
        with pytest.raises(DamagedShard, match=f"expected {num_bytes} bytes, found {num_bytes + 4}"):
            store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
    assert store.stat(KEY) is None
    assert "Uploads" not in s3_server.client().list_multipart_uploads(
        Bucket=s3_location.bucket, Prefix=s3_location.prefix
    )


def test_a_file_that_is_gone_or_a_link_is_not_uploaded(store: ObjectStore, tmp_path: Path) -> None:
    path, checksum = make_file(tmp_path, 10)
    with pytest.raises(MissingShard, match="nothing: no such file in the spool"):
        store.put_file(KEY, tmp_path / "nothing", checksum=checksum, num_bytes=10)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(DamagedShard, match="link: expected a file, found a link"):
        store.put_file(KEY, tmp_path / "link", checksum=checksum, num_bytes=10)


def test_ranges_are_half_open_and_a_missing_object_is_named(store: ObjectStore) -> None:
    store.put_bytes("run.json", b"0123456789")
    assert store.get_bytes("run.json", 2, 5) == b"234"
    assert store.get_bytes("run.json", 8) == b"89"
    assert store.get_bytes("run.json", 3, 3) == b""
    assert store.get_bytes("run.json", 10) == b""
    assert store.get_bytes("run.json", 8, 100) == b"89"
    with pytest.raises(ObjectMissing, match=r"/nothing\.json: no such object"):
        store.get_bytes("nothing.json")
    assert store.stat("nothing.json") is None


def test_a_listing_is_sorted_spans_pages_and_leaves_out_hidden_names(
    store: ObjectStore, s3_server: S3Server, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"states/{number:06d}-0123abcd.safetensors" for number in range(7)]
    for key in reversed(keys):
        store.put_bytes(key, b"x")
    store.put_bytes(".hiddenq/log", b"x")
    store.put_bytes("run.json", b"x")
    # Pages of three, where a server gives a thousand.
    with monkeypatch.context() as patch:
        patch.setitem(store._common, "MaxKeys", 3)  # type: ignore[attr-defined]
        assert [info.key for info in store.list("states/")] == keys
    assert [info.key for info in store.list()] == ["run.json", *keys]
    assert [info.key for info in store.list("states/00000")] == keys
    store.delete(keys[0])
    store.delete(keys[0])
    assert [info.key for info in store.list("states/")] == keys[1:]


def test_a_store_without_checksums_gets_none_and_is_read_back(
    faulty_proxy: FaultyProxy, s3_location: S3Location, tmp_path: Path
) -> None:
    faulty_proxy.plan(CHECKSUMS)
    store = store_at(faulty_proxy.endpoint_url, s3_location.uri)
    assert store.probe().confirm == "read_back"
    faulty_proxy.requests.clear()
    for num_bytes in (1000, 3 * PART):
        path, checksum = make_file(tmp_path, num_bytes)
        assert store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes).checksum == checksum
        assert store.checksum(KEY) == checksum
        info = store.stat(KEY)
        assert info is not None
        assert info.checksum == checksum, "kept in the object's metadata"
    assert not [r for r in faulty_proxy.requests if r.method in ("PUT", "POST") and has_checksum(r)]
    assert [r for r in faulty_proxy.requests if r.method == "GET" and "file" not in r.target]


def test_a_store_that_drops_metadata_is_read_back_and_says_so(
    faulty_proxy: FaultyProxy, s3_location: S3Location, tmp_path: Path
) -> None:
    faulty_proxy.plan(Strip((*CHECKSUMS.prefixes, "x-amz-meta-")))
    store = store_at(faulty_proxy.endpoint_url, s3_location.uri)
    assert "each object is read back; it keeps no metadata, so until the index" in store.probe().detail
    path, checksum = make_file(tmp_path, 1000)
    store.put_file(KEY, path, checksum=checksum, num_bytes=1000)
    info = store.stat(KEY)
    assert info is not None
    assert info.checksum is None
    assert store.checksum(KEY) == checksum


def test_an_old_store_that_refuses_unknown_headers_is_used_without_them(
    faulty_proxy: FaultyProxy, s3_location: S3Location, tmp_path: Path
) -> None:
    faulty_proxy.plan(Answer(501, "NotImplemented"), when=lambda r: r.method in ("PUT", "POST") and has_checksum(r))
    store = store_at(faulty_proxy.endpoint_url, s3_location.uri)
    assert store.probe().detail == "the store verifies no CRC64-NVME: none is sent, each object is read back"
    path, checksum = make_file(tmp_path, 3 * PART)
    assert store.put_file(KEY, path, checksum=checksum, num_bytes=3 * PART).checksum == checksum


def test_without_a_probe_only_amazons_own_word_is_taken_for_a_checksum(
    faulty_proxy: FaultyProxy, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_at(faulty_proxy.endpoint_url, s3_location.uri).put_bytes("run.json", b"{}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty_proxy.endpoint_url)
    reader = open_store(s3_location.uri)
    faulty_proxy.requests.clear()
    assert reader.checksum("run.json") == crc.of_bytes(b"{}")
    assert [request.method for request in faulty_proxy.requests] == ["GET"], "read, and nothing written"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert S3Connection(StoreSettings(region="eu-west-3"), StoreObserver()).is_aws


def test_asking_a_lax_store_for_checksums_is_refused_with_the_way_out(
    faulty_proxy: FaultyProxy, s3_location: S3Location
) -> None:
    faulty_proxy.plan(CHECKSUMS)
    with pytest.raises(StoreRefused, match="does not verify CRC64-NVME; use --checksums metadata"):
        store_at(faulty_proxy.endpoint_url, s3_location.uri, checksums="crc64nvme").probe()
    assert store_at(faulty_proxy.endpoint_url, s3_location.uri, checksums="metadata").probe().confirm == "read_back"


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
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    path, checksum = make_file(tmp_path, 1000)
    store.put_file(KEY, path, checksum=checksum, num_bytes=1000)
    with pytest.raises(ObjectMissing) as caught:
        store.get_bytes("nothing")
    for text in (caplog.text, str(caught.value), repr(store), repr(vars(store))):
        assert SECRET_KEY not in text


def _client_pid(store: ObjectStore) -> None:
    store.get_bytes("run.json")
    os._exit(0 if store._connection._own._pid == os.getpid() else 1)  # type: ignore[attr-defined]


def test_a_client_is_never_carried_over_a_fork_and_a_copy_makes_its_own(store: ObjectStore) -> None:
    store.put_bytes("run.json", b"{}")
    child = multiprocessing.get_context("fork").Process(target=_client_pid, args=(store,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert pickle.loads(pickle.dumps(store)).get_bytes("run.json") == b"{}"


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


@pytest.mark.parametrize("num_bytes", [10 << 20, 333_333_333, 1 << 30, (1 << 40) + 7, 5 << 40])
def test_parts_are_equal_and_never_more_than_ten_thousand(num_bytes: int) -> None:
    sizes = part_sizes(num_bytes, 5 << 20)
    assert sum(sizes) == num_bytes
    assert len(sizes) <= 10_000
    assert set(sizes[:-1]) <= {sizes[0]}
    assert sizes[0] >= 5 << 20
    assert 0 < sizes[-1] <= sizes[0]
