"""LocalStore: the final place, so nothing counts before it is on disk."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import DamagedShard, MissingShard, ObjectMissing, ObjectTooLarge, StoreAway, StoreRefused
from hiddenq.storage import BandwidthLimit, LocalStore, open_store
from tests.support.small_disk import SMALL_DISK_BYTES, small_disk

__all__ = ["small_disk"]

NAME = "000001-0123abcd.safetensors"
KEY = f"states/{NAME}"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


def make_file(folder: Path, data: bytes = b"0123456789" * 1000) -> tuple[Path, str]:
    path = folder / NAME
    path.write_bytes(data)
    return path, crc.of_file(path)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def temporaries(store: LocalStore) -> list[str]:
    return [path.name for path in store.folder.rglob(".tmp-*")]


def test_a_path_and_a_file_url_are_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("a b").uri == open_store(f"file://{tmp_path}/a%20b").uri == str(tmp_path / "a b")


def test_on_one_file_system_a_shard_is_read_once_and_linked(store: LocalStore, tmp_path: Path) -> None:
    path, checksum = make_file(tmp_path)
    path.chmod(0o640)
    info = store.put_file(KEY, path, checksum=checksum, num_bytes=10_000)
    assert (info.num_bytes, info.checksum) == (10_000, checksum)
    assert (store.folder / KEY).stat().st_ino == path.stat().st_ino
    assert (store.folder / KEY).stat().st_mode & 0o777 == 0o666 & ~umask(), "as the user's other files"
    path.unlink()
    assert store.checksum(KEY) == checksum
    stated = store.stat(KEY)
    assert stated is not None
    assert stated.checksum == checksum, "kept beside the file"
    assert temporaries(store) == []


def test_between_file_systems_a_shard_is_copied_within_the_bandwidth(small_disk: Path, tmp_path: Path) -> None:
    path, checksum = make_file(tmp_path, os.urandom(3 << 20))
    store = LocalStore(small_disk / "out", limit=BandwidthLimit(10 << 20))
    began = time.monotonic()
    for number in range(2):
        key = f"states/{number:06d}-0123abcd.safetensors"
        store.put_file(key, path, checksum=checksum, num_bytes=3 << 20)
    assert time.monotonic() - began > 0.2
    assert store.get_bytes(key) == path.read_bytes()
    assert store.checksum(key) == checksum


def test_a_file_that_is_not_what_was_recorded_never_becomes_an_object(
    store: LocalStore, small_disk: Path, tmp_path: Path
) -> None:
    for target in (store, LocalStore(small_disk / "out")):
        path, checksum = make_file(tmp_path)
        data = path.read_bytes()
        cases = {
            "expected checksum": data[:-1] + b"x",
            "expected 10000 bytes, found 9999": data[:-1],
            "expected 10000 bytes, found more": data + b"x",
            "expected 10000 bytes, found 0": b"",
        }
        for text, found in cases.items():
            path.write_bytes(found)
            with pytest.raises(DamagedShard, match=f"{NAME}: {text}"):
                target.put_file(KEY, path, checksum=checksum, num_bytes=10_000)
            assert target.stat(KEY) is None
            assert temporaries(target) == []
    path.unlink()
    with pytest.raises(MissingShard, match="no such file in the spool"):
        store.put_file(KEY, path, checksum=checksum, num_bytes=10_000)


def test_a_file_replaced_while_it_is_read_is_found_out(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checksum = make_file(tmp_path)
    link = os.link

    def replace_and_link(source: Path, *rest: object, **options: object) -> None:
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        other.replace(path)
        link(source, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", replace_and_link)
    with pytest.raises(DamagedShard, match="replaced while it was being read"):
        store.put_file(KEY, path, checksum=checksum, num_bytes=10_000)
    assert temporaries(store) == []


def test_file_and_folder_are_on_disk_before_a_put_returns(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    path, checksum = make_file(tmp_path)
    store.put_file(KEY, path, checksum=checksum, num_bytes=10_000)
    assert synced[-2:] == [(store.folder / KEY).stat().st_ino, (store.folder / "states").stat().st_ino]
    assert tmp_path.stat().st_ino in synced, "new folders, too"
    store.put_bytes("manifest.json", b"{}")
    assert synced[-2:] == [(store.folder / "manifest.json").stat().st_ino, store.folder.stat().st_ino]


def test_small_objects_are_whole_or_not_there_while_they_are_replaced(store: LocalStore) -> None:
    store.put_bytes("manifest.json", b"a" * 100_000)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            store.put_bytes("manifest.json", b"b" * 50_000)
            store.put_bytes("manifest.json", b"a" * 100_000)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(200):
        assert store.get_bytes("manifest.json") in (b"a" * 100_000, b"b" * 50_000)
    stop.set()
    writer.join()


def test_a_listing_is_sorted_as_keys_are_and_leaves_out_hidden_names(store: LocalStore) -> None:
    keys = ["states/a-b", "states/a/b", "states/a.b", "run.json", "tokens/part-00000.safetensors"]
    for key in keys:
        store.put_bytes(key, b"x")
    (store.folder / ".hiddenq/spool").mkdir(parents=True)
    (store.folder / ".hiddenq/spool/file").write_text("x")
    (store.folder / "states/.tmp-0123abcd-x").write_text("x")
    assert [info.key for info in store.list()] == sorted(keys)
    assert [info.key for info in store.list("states/a")] == ["states/a-b", "states/a.b", "states/a/b"]
    assert list(store.list("nothing/")) == []
    assert list(LocalStore(store.folder / "nowhere").list()) == []


def test_ranges_are_half_open_and_missing_objects_are_named(store: LocalStore, tmp_path: Path) -> None:
    store.put_bytes("run.json", b"0123456789")
    assert store.get_bytes("run.json", 2, 5) == b"234"
    assert store.get_bytes("run.json", 8) == b"89"
    assert store.get_bytes("run.json", 8, 100) == b"89"
    assert store.get_bytes("run.json", 3, 3) == b""
    with pytest.raises(ObjectMissing, match=f"{store.uri}/nothing: no such object"):
        store.get_bytes("nothing")
    with pytest.raises(ObjectMissing, match="not an object"):
        store.get_bytes("run.json/below")
    for key in ("../outside", "/etc/passwd"):
        with pytest.raises(ObjectMissing, match="a key stays below the location"):
            store.get_bytes(key)
    assert store.stat("nothing") is None
    assert store.stat("") is None
    store.delete("run.json")
    store.delete("run.json")
    assert store.open_local("run.json") == tmp_path / "out/run.json"


def test_a_probe_leaves_nothing_and_a_place_that_can_not_be_used_says_why(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="out: no such folder"):
        store.check_readable()
    assert store.probe().confirm == "file"
    store.check_readable()
    assert list(store.folder.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreRefused, match="can't be read: Not a directory"):
        LocalStore(tmp_path / "file").check_readable()
    with pytest.raises(StoreRefused, match="file: expected a folder, found a file"):
        LocalStore(tmp_path / "file/out").probe()


def test_a_full_disk_is_a_store_that_is_away_and_nothing_is_left(small_disk: Path, tmp_path: Path) -> None:
    path, checksum = make_file(tmp_path, os.urandom(12 << 20))
    store = LocalStore(small_disk / "out")
    (small_disk / "another").write_bytes(bytes(8 << 20))
    with pytest.raises(StoreAway, match="No space left on device; waiting until the disk can be used"):
        store.put_file(KEY, path, checksum=checksum, num_bytes=12 << 20)
    assert temporaries(store) == []
    assert store.stat(KEY) is None


def test_what_an_interrupted_upload_left_is_removed_only_if_it_is_abandoned(store: LocalStore) -> None:
    old, live, fresh, other = (
        store.folder / "states" / f".tmp-{token}-{number:06d}-{token}.safetensors"
        for number, token in enumerate(("aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd"))
    )
    store.put_bytes("states/x", b"x")
    for path in (old, live, fresh, other):
        path.write_bytes(b"half")
    for path in (old, live, other):
        os.utime(path, (1, 1))
    asked: list[str] = []

    def is_abandoned(name: str) -> bool:
        asked.append(name)
        return "bbbbbbbb" not in name

    assert store.abort_unfinished(is_abandoned) == 2
    assert sorted(asked) == [path.name.partition("-")[2].partition("-")[2] for path in (old, live, other)]
    assert sorted(temporaries(store)) == [live.name, fresh.name]


def test_kill_9_while_a_shard_is_copied_leaves_no_object(small_disk: Path, tmp_path: Path) -> None:
    path, checksum = make_file(tmp_path, os.urandom(4 << 20))
    program = f"""
import os, signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from hiddenq.storage import LocalStore, local, local_file
local_file.CHUNK_BYTES = 1 << 20
set_checksum = local.set_checksum
local.set_checksum = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
LocalStore(Path({str(small_disk / "out")!r})).put_file({KEY!r}, Path({str(path)!r}), checksum={checksum!r},
    num_bytes={4 << 20})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    store = LocalStore(small_disk / "out")
    assert list(store.list()) == []
    assert len(temporaries(store)) == 1
    store.put_file(KEY, path, checksum=checksum, num_bytes=4 << 20)
    assert store.checksum(KEY) == checksum


def test_a_file_over_the_file_systems_limit_is_too_large_and_not_a_store_to_wait_for(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checksum = make_file(tmp_path)
    monkeypatch.setattr("hiddenq.storage.local.link_open_file", lambda *files: False)  # as on another file system
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limit[1]))
    try:
        with pytest.raises(
            ObjectTooLarge, match=r"states/000001.*takes no file of this size .* lower --max-shard-bytes"
        ):
            store.put_file(KEY, path, checksum=checksum, num_bytes=10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert temporaries(store) == []
    store.put_file(KEY, path, checksum=checksum, num_bytes=10_000)


def test_a_file_larger_than_the_whole_disk_is_too_large_and_not_a_store_to_wait_for(
    small_disk: Path, tmp_path: Path
) -> None:
    store = LocalStore(small_disk / "out")
    path, checksum = make_file(tmp_path, bytes(SMALL_DISK_BYTES + 1))
    with pytest.raises(ObjectTooLarge, match=r"16777217 bytes do not fit on a disk of 16777216; use a larger one"):
        store.put_file(KEY, path, checksum=checksum, num_bytes=SMALL_DISK_BYTES + 1)
    assert temporaries(store) == []


def test_an_anchored_folder_that_is_not_there_is_away_and_who_is_patient_finds_it_when_it_is_back(
    store: LocalStore, tmp_path: Path
) -> None:
    path, checksum = make_file(tmp_path, b"shard")
    store.put_bytes("run.json", b"{}")
    store.put_bytes("tokens/part", b"tokens")
    store.anchor("run.json")
    assert store.stat("nothing") is None, "what is missing is missing while the location is there"
    with pytest.raises(ObjectMissing):
        store.get_bytes("nothing")
    away = store.folder.rename(tmp_path / "away")
    store.folder.mkdir()
    for ask in (
        lambda: store.get_bytes("tokens/part"),
        lambda: store.stat("tokens/part"),
        lambda: store.checksum("tokens/part"),
        lambda: list(store.list()),
        lambda: store.delete("tokens/part"),
        lambda: store.put_bytes("owner.json", b"{}"),
        lambda: store.put_file(KEY, path, checksum=checksum, num_bytes=5),
        store.probe,
        lambda: store.anchor("run.json"),
    ):
        with pytest.raises(StoreAway, match=r"run\.json is not there any more \(unmounted, moved or removed\?\)"):
            ask()
    assert list(store.folder.iterdir()) == []
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.patient(60).get_bytes, "tokens/part")
        with pytest.raises(TimeoutError):
            found.result(0.1)
        store.folder.rmdir()
        away.rename(store.folder)
        assert found.result(30) == b"tokens"
    (store.folder / "run.json").write_text('{"another": 1}')
    with pytest.raises(StoreRefused, match="is not the one that was there before"):
        store.put_bytes("owner.json", b"{}")
