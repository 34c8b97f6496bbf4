"""What a store can prove of a checksum: a strict one, and lax or old ones (made by a proxy from the strict one)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import (
    StoreRefused,
)
from hiddenq.storage import StoreObserver, StoreSettings, open_store
from hiddenq.storage.s3_client import S3Connection
from tests.storage.s3 import KEY, PART, make_file, store_at
from tests.support.faulty_proxy import CHECKSUMS, Answer, FaultyProxy, Strip, has_checksum
from tests.support.s3_server import S3Location, S3Server


def test_a_strict_store_is_trusted_because_it_refuses_a_wrong_checksum(
    s3_server: S3Server, s3_location: S3Location
) -> None:
    store = store_at(s3_server.endpoint_url, s3_location.uri)
    capabilities = store.probe()
    assert capabilities.confirm == "store"
    assert capabilities.detail == "the store verifies CRC64-NVME and tells it back"
    assert list(store.list()) == []


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
