"""S3Store against a real, strict server: what goes in comes out, or nothing is there."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
from pathlib import Path

import pytest

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import (
    DamagedShard,
    MissingShard,
    ObjectMissing,
)
from hiddenq.storage.s3 import S3Store
from hiddenq.storage.s3_multipart import part_sizes
from tests.storage.s3 import KEY, PART, make_file, store_at
from tests.support.s3_server import S3Location, S3Server


@pytest.fixture
def store(s3_server: S3Server, s3_location: S3Location) -> S3Store:
    return store_at(s3_server.endpoint_url, s3_location.uri)


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000, 2 * PART, 2 * PART + 1, 4 * PART + 12345])
def test_a_file_of_any_size_arrives_with_the_checksum_that_the_worker_recorded(
    store: S3Store, s3_server: S3Server, s3_location: S3Location, tmp_path: Path, num_bytes: int
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
    store: S3Store, s3_server: S3Server, s3_location: S3Location, tmp_path: Path
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


def test_a_file_that_is_gone_or_a_link_is_not_uploaded(store: S3Store, tmp_path: Path) -> None:
    path, checksum = make_file(tmp_path, 10)
    with pytest.raises(MissingShard, match="nothing: no such file in the spool"):
        store.put_file(KEY, tmp_path / "nothing", checksum=checksum, num_bytes=10)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(DamagedShard, match="link: expected a file, found a link"):
        store.put_file(KEY, tmp_path / "link", checksum=checksum, num_bytes=10)


def test_ranges_are_half_open_and_a_missing_object_is_named(store: S3Store) -> None:
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
    store: S3Store, s3_server: S3Server, s3_location: S3Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"states/{number:06d}-0123abcd.safetensors" for number in range(7)]
    for key in reversed(keys):
        store.put_bytes(key, b"x")
    store.put_bytes(".hiddenq/log", b"x")
    store.put_bytes("run.json", b"x")
    # Pages of three, where a server gives a thousand.
    with monkeypatch.context() as patch:
        patch.setitem(store._common, "MaxKeys", 3)
        assert [info.key for info in store.list("states/")] == keys
    assert [info.key for info in store.list()] == ["run.json", *keys]
    assert [info.key for info in store.list("states/00000")] == keys
    store.delete(keys[0])
    store.delete(keys[0])
    assert [info.key for info in store.list("states/")] == keys[1:]


def _client_pid(store: S3Store) -> None:
    store.get_bytes("run.json")
    os._exit(0 if store._connection._own._pid == os.getpid() else 1)


def test_a_client_is_never_carried_over_a_fork_and_a_copy_makes_its_own(store: S3Store) -> None:
    store.put_bytes("run.json", b"{}")
    child = multiprocessing.get_context("fork").Process(target=_client_pid, args=(store,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert pickle.loads(pickle.dumps(store)).get_bytes("run.json") == b"{}"


@pytest.mark.parametrize("num_bytes", [10 << 20, 333_333_333, 1 << 30, (1 << 40) + 7, 5 << 40])
def test_parts_are_equal_and_never_more_than_ten_thousand(num_bytes: int) -> None:
    sizes = part_sizes(num_bytes, 5 << 20)
    assert sum(sizes) == num_bytes
    assert len(sizes) <= 10_000
    assert set(sizes[:-1]) <= {sizes[0]}
    assert sizes[0] >= 5 << 20
    assert 0 < sizes[-1] <= sizes[0]
