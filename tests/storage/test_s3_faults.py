"""A store that throttles, resets, hangs, lies and forgets: the file is kept, the error says who is to blame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import DamagedShard, ObjectTooLarge, StoreAway, StoreRefused, TransientError
from hiddenq.storage import StoreObserver, StoreSettings, open_store, s3_client, s3_errors, s3_sweep
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.body import BLOCK_BYTES, Body
from hiddenq.storage.s3 import S3Store
from hiddenq.storage.s3_probe import S3Abilities
from tests.support.faulty_proxy import (
    Answer,
    BlackHole,
    FaultyProxy,
    FlipByte,
    Plan,
    Reset,
    Slow,
    completes,
    parts,
    puts,
)
from tests.support.s3_server import S3Location, S3Server
from tests.support.waiting import wait_until

NAME = "000001-0123abcd.safetensors"
KEY = f"states/{NAME}"
PART = 5 << 20
SINGLE, MULTIPLE = 1000, 2 * PART + 1000


class Notes(StoreObserver):
    """What a store told."""

    def __init__(self) -> None:
        self.retries: Counter[str] = Counter()
        self.failed_aborts: list[str] = []

    def retried(self, error: str) -> None:
        self.retries[error] += 1

    def abort_failed(self, key: str) -> None:
        self.failed_aborts.append(key)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "WAIT_SECONDS", 0.01)


@pytest.fixture
def notes() -> Notes:
    return Notes()


def store_at(endpoint_url: str, location: S3Location, notes: Notes, **settings: Any) -> S3Store:
    options = {"part_bytes": PART, "timeout_seconds": 10, **settings}
    store = open_store(location.uri, StoreSettings(endpoint_url=endpoint_url, **options), observer=notes)
    assert isinstance(store, S3Store)
    # What the probe finds (its own tests show that) is known here, which saves a second each time.
    strict = options.get("checksums") is None
    store._abilities = S3Abilities(single=strict, multipart=strict, detail="")
    return store


@pytest.fixture
def store(faulty_proxy: FaultyProxy, s3_location: S3Location, notes: Notes) -> S3Store:
    return store_at(faulty_proxy.endpoint_url, s3_location, notes)


def put(store: S3Store, folder: Path, num_bytes: int) -> str:
    path = folder / NAME
    if not path.exists() or path.stat().st_size != num_bytes:
        path.write_bytes(os.urandom(num_bytes))
    checksum = crc.of_file(path)
    info = store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
    assert info.checksum == store.checksum(KEY) == checksum
    assert store.get_bytes(KEY) == path.read_bytes()
    return checksum


def open_uploads(server: S3Server, location: S3Location) -> list[str]:
    answer = server.client().list_multipart_uploads(Bucket=location.bucket, Prefix=location.prefix)
    return [upload["UploadId"] for upload in answer.get("Uploads", ())]


@pytest.mark.parametrize(("num_bytes", "code"), [(SINGLE, "InternalError"), (MULTIPLE, "SlowDown")])
def test_a_store_that_throttles_is_asked_again_with_growing_waits_and_each_time_is_counted(
    store: S3Store, faulty_proxy: FaultyProxy, notes: Notes, tmp_path: Path, num_bytes: int, code: str
) -> None:
    plan = faulty_proxy.plan(Answer(503, code), times=3, when=puts)
    put(store, tmp_path, num_bytes)
    assert plan.num_met == 3
    assert notes.retries == {code: 3}


def test_a_store_that_stays_away_is_said_to_be_away_and_the_file_is_kept(
    store: S3Store,
    faulty_proxy: FaultyProxy,
    notes: Notes,
    tmp_path: Path,
    s3_server: S3Server,
    s3_location: S3Location,
) -> None:
    faulty_proxy.plan(Answer(503, "SlowDown"), when=parts)
    with pytest.raises(
        StoreAway, match=r"states/000001-0123abcd\.safetensors: the store asks to slow down \(SlowDown\)"
    ):
        put(store, tmp_path, MULTIPLE)
    assert (tmp_path / NAME).stat().st_size == MULTIPLE
    assert open_uploads(s3_server, s3_location) == [], "aborted"
    faulty_proxy.heal()
    put(store, tmp_path, MULTIPLE)


def test_a_patient_store_outlasts_more_failures_than_others_do_and_says_what_it_waits_for(
    store: S3Store, faulty_proxy: FaultyProxy, notes: Notes, caplog: pytest.LogCaptureFixture
) -> None:
    faulty_proxy.plan(Answer(503, "SlowDown"), times=8, when=puts)
    store.patient(600).put_bytes("note", b"kept")
    assert notes.retries == {"SlowDown": 8}
    assert "slow down (SlowDown); asked again for 600 s" in caplog.text
    assert store.get_bytes("note") == b"kept"


@pytest.mark.parametrize("num_bytes", [SINGLE, MULTIPLE])
def test_a_connection_reset_in_the_middle_is_sent_again(
    store: S3Store, faulty_proxy: FaultyProxy, tmp_path: Path, num_bytes: int
) -> None:
    plan = faulty_proxy.plan(Reset(after_bytes=num_bytes // 6), times=3, when=puts)
    put(store, tmp_path, num_bytes)
    assert plan.num_met == 3


def test_a_server_that_takes_a_request_and_never_answers_is_left_after_the_timeout(
    faulty_proxy: FaultyProxy, s3_location: S3Location, notes: Notes, tmp_path: Path
) -> None:
    store = store_at(faulty_proxy.endpoint_url, s3_location, notes, timeout_seconds=0.3)
    plan = faulty_proxy.plan(BlackHole(), when=puts)
    with pytest.raises(StoreAway, match=r"no answer in time|connection was closed"):
        put(store, tmp_path, SINGLE)
    assert plan.num_met == 5
    faulty_proxy.heal()
    put(store, tmp_path, SINGLE)


def test_a_server_that_is_gone_is_away(s3_location: S3Location, s3_server: S3Server, notes: Notes) -> None:
    with pytest.raises(StoreAway, match="can't be reached; check --endpoint-url if this lasts"):
        store_at("http://127.0.0.1:23999", s3_location, notes).check_readable()


@pytest.mark.parametrize("forward", [False, True], ids=["refused", "done, but the answer was lost"])
def test_a_500_on_complete_ends_with_the_whole_object(
    store: S3Store,
    faulty_proxy: FaultyProxy,
    tmp_path: Path,
    s3_server: S3Server,
    s3_location: S3Location,
    forward: bool,
) -> None:
    plan = faulty_proxy.plan(Answer(500, "InternalError", forward=forward), times=1, when=completes)
    put(store, tmp_path, MULTIPLE)
    assert plan.num_met == 1
    assert open_uploads(s3_server, s3_location) == []


@pytest.mark.parametrize("num_bytes", [SINGLE, MULTIPLE])
def test_a_byte_that_flips_on_its_way_is_refused_by_the_store_and_sent_again(
    store: S3Store, faulty_proxy: FaultyProxy, notes: Notes, tmp_path: Path, num_bytes: int
) -> None:
    plan = faulty_proxy.plan(FlipByte(), times=2, when=puts)
    put(store, tmp_path, num_bytes)
    assert plan.num_met == 2
    assert sum(notes.retries.values()) == 2


@pytest.mark.parametrize("num_bytes", [SINGLE, MULTIPLE])
def test_a_byte_that_flips_on_its_way_to_a_lax_store_is_found_by_reading_back(
    faulty_proxy: FaultyProxy, s3_location: S3Location, notes: Notes, tmp_path: Path, num_bytes: int
) -> None:
    store = store_at(faulty_proxy.endpoint_url, s3_location, notes, checksums="metadata")
    faulty_proxy.plan(FlipByte(), times=1, when=puts)
    with pytest.raises(TransientError, match=r"the store holds .* with checksum .*; removed there, sent again"):
        put(store, tmp_path, num_bytes)
    assert store.stat(KEY) is None
    put(store, tmp_path, num_bytes)


def test_a_file_cut_or_flipped_while_it_is_sent_is_not_completed(
    faulty_proxy: FaultyProxy, tmp_path: Path, s3_server: S3Server, s3_location: S3Location, notes: Notes
) -> None:
    store = store_at(faulty_proxy.endpoint_url, s3_location, notes, num_connections=2)
    num_bytes = 5 * PART
    path = tmp_path / NAME
    spoilt: dict[str, Callable[[], None]] = {
        "cut: expected": lambda: os.truncate(path, 3 * PART),
        "expected checksum": lambda: flip_last(path),
    }
    for text, spoil in spoilt.items():
        path.write_bytes(bytes(num_bytes))
        checksum = crc.of_file(path)
        plan = faulty_proxy.plan(Slow(PART * 4), times=2, when=parts)
        spoiler = threading.Thread(target=spoil_amid, args=(plan, spoil))
        spoiler.start()
        with pytest.raises(DamagedShard, match=text):
            store.put_file(KEY, path, checksum=checksum, num_bytes=num_bytes)
        spoiler.join()
        assert store.stat(KEY) is None
        assert open_uploads(s3_server, s3_location) == []


def spoil_amid(plan: Plan, spoil: Callable[[], None]) -> None:
    wait_until(lambda: plan.num_met == 2)
    spoil()


def flip_last(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def test_credentials_that_end_are_waited_for_and_looked_up_again(
    store: S3Store, faulty_proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, tmp_path, SINGLE)
    before = store._connection._own._client
    faulty_proxy.plan(Answer(400, "ExpiredToken"), when=lambda r: "x-amz-security-token" not in r.headers)
    with pytest.raises(StoreAway, match="the credentials have ended; renew them"):
        put(store, tmp_path, SINGLE)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "renewed")
    faulty_proxy.plan(Answer(400, "ExpiredToken"))
    with pytest.raises(StoreAway) as caught:
        put(store, tmp_path, SINGLE)
    assert "renewed" not in str(caught.value)
    newest = next(r for r in reversed(faulty_proxy.requests) if r.method == "PUT")
    assert newest.headers["x-amz-security-token"] == "renewed"
    assert store._connection._own._client is not before
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    faulty_proxy.heal()
    store._connection._own._client = None
    put(store, tmp_path, SINGLE)


ANSWERS = [
    (403, "RequestTimeTooSkewed", StoreRefused, "this host's clock is wrong; set it by NTP"),
    (403, "AccessDenied", StoreRefused, "permission denied; it takes s3:ListBucket"),
    (400, "AuthorizationHeaderMalformed", StoreRefused, "the bucket is in another region; set --region"),
    (301, "PermanentRedirect", StoreRefused, "the bucket is in another region; set --region"),
    (400, "InvalidStorageClass", StoreRefused, "--storage-class is unknown to this store"),
    (400, "EntityTooLarge", ObjectTooLarge, "lower --max-shard-bytes"),
    (413, "", ObjectTooLarge, "lower --max-shard-bytes"),
    (418, "Whatever", StoreRefused, r"the store answers 418 \(Whatever\)"),
    (507, "XMinioStorageFull", StoreAway, "the store is full; make room"),
    (403, "QuotaExceeded", StoreAway, "the bucket is full; make room"),
    (429, "Whatever", StoreAway, "the store answers 429"),
    (502, "Whatever", StoreAway, "the store answers 502"),
]


def test_each_answer_has_its_class_and_its_hint(store: S3Store, faulty_proxy: FaultyProxy, tmp_path: Path) -> None:
    for status, code, kind, text in ANSWERS:
        faulty_proxy.heal()
        faulty_proxy.plan(Answer(status, code), when=puts)
        with pytest.raises(kind, match=text) as caught:
            put(store, tmp_path, SINGLE)
        assert "\n" not in str(caught.value)
        assert (tmp_path / NAME).exists()


def test_a_head_without_a_body_is_explained_by_a_get(store: S3Store, faulty_proxy: FaultyProxy) -> None:
    store.put_bytes("run.json", b"{}")
    faulty_proxy.plan(Answer(403, "RequestTimeTooSkewed"), when=lambda r: r.method in ("GET", "HEAD"))
    with pytest.raises(StoreRefused, match="this host's clock is wrong"):
        store.stat("run.json")


def test_the_region_that_a_store_names_is_in_the_hint() -> None:
    answer: Any = {
        "Error": {"Code": "AuthorizationHeaderMalformed", "Region": "eu-west-3"},
        "ResponseMetadata": {"HTTPStatusCode": 400, "HTTPHeaders": {}},
    }
    error = s3_errors.translate(ClientError(answer, "PutObject"), "s3://b/p")
    assert str(error) == (
        "s3://b/p: the bucket is in another region; set --region eu-west-3 (AuthorizationHeaderMalformed)"
    )


def test_an_abort_that_fails_is_told_and_the_first_error_stays(
    store: S3Store, faulty_proxy: FaultyProxy, notes: Notes, tmp_path: Path
) -> None:
    faulty_proxy.plan(Answer(403, "AccessDenied"), when=lambda r: parts(r) or r.method == "DELETE")
    with pytest.raises(StoreRefused, match="permission denied"):
        put(store, tmp_path, MULTIPLE)
    assert len(notes.failed_aborts) == 1
    assert notes.failed_aborts[0].endswith(KEY)


def test_a_sweep_takes_what_a_killed_upload_left_and_never_a_colleagues_live_one(
    s3_server: S3Server, s3_location: S3Location, notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    path.write_bytes(bytes(MULTIPLE))
    program = f"""
import os, signal
from pathlib import Path
from hiddenq.storage import StoreSettings, open_store, s3_multipart
s3_multipart.Multipart.complete = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
settings = StoreSettings(endpoint_url={s3_server.endpoint_url!r}, part_bytes={PART}, checksums="metadata")
store = open_store({s3_location.uri!r}, settings)
store.put_file({KEY!r}, Path({str(path)!r}), checksum={crc.of_file(path)!r}, num_bytes={MULTIPLE})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    client = s3_server.client()
    live, foreign = (
        client.create_multipart_upload(Bucket=s3_location.bucket, Key=key)["UploadId"]
        for key in (f"{s3_location.prefix}/states/000002-bbbbbbbb.safetensors", f"elsewhere-{s3_location.prefix}/{KEY}")
    )
    probed = f"{s3_location.prefix}/.hiddenq-probe-0123abcd"  # what a probe left that was killed
    client.create_multipart_upload(Bucket=s3_location.bucket, Key=probed)
    client.put_object(Bucket=s3_location.bucket, Key=probed, Body=b"x")
    store = store_at(s3_server.endpoint_url, s3_location, notes)
    assert len(open_uploads(s3_server, s3_location)) == 3
    assert store.abort_unfinished(lambda name: True) == 0, "all are younger than ten minutes"
    monkeypatch.setattr(s3_sweep, "UNFINISHED_SECONDS", -1)
    assert store.abort_unfinished(lambda name: name == NAME) == 3
    assert client.list_objects_v2(Bucket=s3_location.bucket, Prefix=probed)["KeyCount"] == 0
    assert open_uploads(s3_server, s3_location) == [live]
    elsewhere = S3Location(s3_location.bucket, f"elsewhere-{s3_location.prefix}")
    assert open_uploads(s3_server, elsewhere) == [foreign]
    assert store.stat(KEY) is None


def test_a_store_that_lists_no_multipart_uploads_is_swept_of_the_rest(
    store: S3Store, faulty_proxy: FaultyProxy, s3_server: S3Server, s3_location: S3Location, monkeypatch: Any
) -> None:
    probed = f"{s3_location.prefix}/.hiddenq-probe-0123abcd"
    s3_server.client().put_object(Bucket=s3_location.bucket, Key=probed, Body=b"x")
    faulty_proxy.plan(Answer(501, "NotImplemented"), when=lambda request: "?uploads" in request.target)
    monkeypatch.setattr(s3_sweep, "UNFINISHED_SECONDS", -1)
    assert store.abort_unfinished(lambda name: True) == 1
    faulty_proxy.heal()
    faulty_proxy.plan(Answer(403, "AccessDenied"), when=lambda request: "?uploads" in request.target)
    with pytest.raises(StoreRefused, match="s3:ListBucketMultipartUploads"):
        store.abort_unfinished(lambda name: True)


def test_uploads_keep_to_the_bandwidth_that_is_left_to_them(
    s3_server: S3Server, s3_location: S3Location, notes: Notes, tmp_path: Path
) -> None:
    store = store_at(s3_server.endpoint_url, s3_location, notes, bandwidth_bytes_per_second=20 << 20)
    began = time.monotonic()
    put(store, tmp_path, MULTIPLE)
    assert time.monotonic() - began > 0.4, "10 MiB at 20 MiB a second"


def test_a_body_is_read_in_blocks_so_a_slow_line_is_no_timeout_as_long_as_it_moves() -> None:
    data = os.urandom(1_000_000)
    body = Body(data, BandwidthLimit(None))
    assert body.seek(0, os.SEEK_END) == len(body) == len(data)
    for _ in range(2):
        body.rewind()
        blocks = []
        while block := bytes(body.read(16_384)):
            blocks.append(block)
        assert {len(block) for block in blocks[:-1]} == {BLOCK_BYTES}
        assert b"".join(blocks) == data
