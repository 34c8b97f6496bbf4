"""The spool: bytes reserved before a shard is made, marks that all processes share, names that can't be misused."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hiddenq.contracts.errors import BadMessage, DamagedShard, MissingShard, SpoolAway, SpoolGone, UsageError
from hiddenq.storage import Spool, SpoolEntry, SpoolPresence, quarantine, spool
from hiddenq.storage.spool_file import allocate
from tests.support.small_disk import SMALL_DISK_BYTES

NOBODY = 65534


def name(number: int, execution: str = "0123abcd") -> str:
    return f"{number:06d}-{execution}.safetensors"


def publish(target: Spool, number: int, num_bytes: int = 100) -> str:
    file = target.reserve(name(number), num_bytes)
    assert file is not None
    os.write(file.fd, bytes(num_bytes))
    file.publish()
    return name(number)


def test_all_processes_of_a_spool_find_one_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        spools = list(pool.map(lambda _: Spool.open(tmp_path / "spool"), range(64)))
    assert len({opened.spool_id for opened in spools}) == 1
    assert Spool.open(tmp_path / "spool").spool_id == spools[0].spool_id
    assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == ["spool_id"]


def test_a_folder_that_is_no_spool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing: no such folder"):
        Spool.open(tmp_path / "nothing", create=False)
    with pytest.raises(UsageError, match=r"not a spool \(no file spool_id\)"):
        Spool.open(tmp_path, create=False)
    (tmp_path / "spool_id").write_text("me")
    with pytest.raises(UsageError, match="spool_id holds no UUID"):
        Spool.open(tmp_path)
    with pytest.raises(UsageError, match="low mark 11: expected 0 to the high mark"):
        Spool.open(tmp_path / "new", high_bytes=10, low_bytes=11)


def test_a_shard_appears_whole_by_one_rename(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path)
    file = opened.reserve(name(1), 600)
    assert file is not None
    assert opened.usage().reserved_bytes == 600
    assert opened.files() == []
    os.write(file.fd, b"x" * 600)
    assert file.publish(fsync=True) == tmp_path / name(1)
    file.discard()
    assert [(entry.file_name, entry.num_bytes) for entry in opened.files()] == [(name(1), 600)]
    with opened.open_shard(name(1)) as shard:
        assert shard.read() == b"x" * 600
    opened.delete(name(1))
    opened.delete(name(1))
    assert opened.usage().num_bytes == 0


def test_reserved_bytes_are_on_disk_before_they_are_written(tmp_path: Path) -> None:
    file = Spool.open(tmp_path).reserve(name(1), 1 << 20)
    assert file is not None
    assert os.fstat(file.fd).st_blocks * 512 >= 1 << 20
    file.discard()
    file.discard()
    assert Spool.open(tmp_path).usage().num_bytes == 0


def test_workers_stop_at_the_high_mark_and_go_on_below_the_low_mark(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path, high_bytes=1000, low_bytes=400)
    other = Spool.open(tmp_path, high_bytes=1000, low_bytes=400)
    for number in range(3):
        publish(opened, number, 300)
    assert opened.reserve(name(3), 300) is None
    assert other.usage().paused
    opened.delete(name(0))
    assert other.reserve(name(3), 300) is None, "600 bytes are above the low mark"
    opened.delete(name(1))
    file = other.reserve(name(3), 300)
    assert file is not None
    assert not opened.usage().paused


def test_a_shard_that_can_never_fit_is_an_error_and_no_wait(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a shard of 1001 bytes does not fit below the high mark of 1000"):
        Spool.open(tmp_path, high_bytes=1000).reserve(name(1), 1001)


def _hammer(folder: Path, worker: int, num_shards: int) -> None:
    opened = Spool.open(folder, high_bytes=1000)
    for number in range(num_shards):
        while (file := opened.reserve(name(number, f"{worker:08x}"), 150)) is None:
            time.sleep(0.002)
        file.publish()


def test_writers_faster_than_the_uploader_never_pass_the_mark_and_never_stand_still(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path, high_bytes=1000)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_hammer, args=(tmp_path, worker, 30)) for worker in range(2)]
    for writer in writers:
        writer.start()
    uploaded, most, paused = 0, 0, False
    deadline = time.monotonic() + 60
    while uploaded < 60:
        assert time.monotonic() < deadline
        assert not any(writer.exitcode for writer in writers)
        usage = opened.usage()
        most, paused = max(most, usage.num_bytes), paused or usage.paused
        for entry in opened.files()[:1]:
            opened.delete(entry.file_name)
            uploaded += 1
        time.sleep(0.005)
    for writer in writers:
        writer.join(10)
        assert writer.exitcode == 0
    assert 0 < most <= 1000
    assert paused


def test_a_shard_is_not_renamed_while_another_process_counts(tmp_path: Path) -> None:
    opened, counting = Spool.open(tmp_path), Spool.open(tmp_path)
    file = opened.reserve(name(1), 100)
    assert file is not None
    publishing = threading.Thread(target=file.publish)
    with counting._locked():
        publishing.start()
        publishing.join(0.2)
        assert publishing.is_alive()
        assert opened.files() == []
    publishing.join(10)
    assert [entry.file_name for entry in opened.files()] == [name(1)]


def test_bytes_are_set_aside_on_disk_without_holding_up_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Spool.open(tmp_path, high_bytes=1000)

    def slowly(descriptor: int, num_bytes: int) -> None:
        if num_bytes == 600:
            assert opened.usage().num_bytes == 600, "it counts already"
            assert Spool.open(tmp_path, high_bytes=1000).reserve(name(2), 500) is None
            assert opened.reserve(name(3), 400) is not None
        allocate(descriptor, num_bytes)

    monkeypatch.setattr(spool, "allocate", slowly)
    assert opened.reserve(name(1), 600) is not None


def test_a_full_disk_pauses_workers_instead_of_failing_them(small_disk: Path) -> None:
    opened = Spool.open(small_disk / "spool")
    assert opened.usage().high_bytes == pytest.approx(0.8 * SMALL_DISK_BYTES, rel=0.02)
    (small_disk / "other").write_bytes(bytes(SMALL_DISK_BYTES // 2))
    published = 0
    while (file := opened.reserve(name(published), 1 << 20)) is not None:
        file.publish()
        published += 1
    assert published == 6, "0.8 of the 8 MiB that others leave"
    assert opened.usage().paused
    (small_disk / "more").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    for number in range(published):
        opened.delete(name(number))
    while shutil.disk_usage(small_disk).free > 0:
        with (small_disk / "more").open("ab") as more:
            more.write(bytes(shutil.disk_usage(small_disk).free))
    assert opened.reserve(name(9), 1 << 20) is None
    (small_disk / "more").unlink()
    assert opened.reserve(name(9), 1 << 20) is not None


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach (pytest's own can't be)."""
    folder = Path(tempfile.mkdtemp(prefix="hiddenq-spool-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_user(uid: int, groups: list[int], work: Callable[[], str]) -> str:
    """What `work` returns, or the text of its error, as another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_an_uploader_of_the_folders_group_can_read_and_delete_what_a_worker_of_another_user_wrote(
    open_folder: Path,
) -> None:
    group = 54321
    folder = open_folder / "spool"
    Spool.open(folder)
    os.chown(folder, 0, group)
    os.chown(folder / "spool_id", 0, group)
    folder.chmod(0o2770)
    file_name = publish(Spool.open(folder), 1)
    status = (folder / file_name).stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o640, group)

    def read_and_delete() -> str:
        opened = Spool.open(folder)
        with opened.open_shard(file_name) as shard:
            size = len(shard.read())
        opened.delete(file_name)
        return str(size)

    assert as_user(NOBODY, [group], read_and_delete) == "100"


def test_a_start_without_access_says_whose_the_folder_is_and_what_to_do(open_folder: Path) -> None:
    folder = open_folder / "spool"
    Spool.open(folder)
    text = as_user(NOBODY, [], lambda: Spool.open(folder).spool_id)
    assert text.startswith(
        f"UsageError: --spool {folder}: user {NOBODY} may not write there (owner 0, group 0, mode 2770)"
    )
    folder.chmod(0o2777)
    (folder / "spool_id").chmod(0o644)
    publish(Spool.open(folder), 1)
    text = as_user(NOBODY, [], lambda: Spool.open(folder).spool_id)
    assert "may not read 000001-0123abcd.safetensors (owner 0, group 0, mode 640)" in text
    assert "run the workers and uploaders of a host as one user" in text


def test_a_start_is_not_disturbed_by_shards_that_are_uploaded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spool.open(tmp_path)
    listed = [SpoolEntry(file_name=name(1), num_bytes=10, modified=0.0)]
    monkeypatch.setattr(Spool, "files", lambda self: listed)
    assert Spool.open(tmp_path).files() == listed


@pytest.mark.parametrize(
    "bad",
    ["../000001-0123abcd.safetensors", "/etc/passwd", "a.safetensors", "", "states/000001-0123abcd.safetensors"],
)
def test_a_name_from_a_message_is_bare_or_refused(tmp_path: Path, bad: str) -> None:
    opened = Spool.open(tmp_path)
    for act in (opened.path, opened.open_shard, opened.delete, lambda text: opened.reserve(text, 1)):
        with pytest.raises(BadMessage, match=r"expected a bare shard name such as 000123-9f3c2a71\.safetensors"):
            act(bad)


def test_links_and_devices_under_a_shards_name_are_not_followed(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path / "spool")
    (tmp_path / "secret").write_text("secret")
    opened.path(name(1)).symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedShard, match=r"000001-0123abcd\.safetensors: expected a file, found a link"):
        opened.open_shard(name(1))
    os.mkfifo(opened.path(name(2)))
    with pytest.raises(DamagedShard, match="found something else"):
        opened.open_shard(name(2))
    with pytest.raises(MissingShard, match=r"000003-0123abcd\.safetensors: no such file in the spool"):
        opened.open_shard(name(3))
    assert opened.files() == []


def test_quarantine_lies_outside_the_marks_and_has_a_cap_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "MAX_BYTES", 450)
    opened = Spool.open(tmp_path, high_bytes=1000)
    for number in range(6):
        publish(opened, number, 200)
        opened.quarantine(name(number), f"damaged {number}")
        os.utime(tmp_path / "quarantine" / name(number), (number, number))
    usage = opened.usage()
    assert usage.num_bytes == 0
    assert 200 < usage.quarantine_bytes <= 450
    assert (tmp_path / "quarantine" / name(5)).exists()
    assert (tmp_path / "quarantine" / f"{name(5)}.reason").read_text() == "damaged 5\n"
    opened.quarantine(name(9), "gone already")


def test_only_temporaries_of_dead_executions_are_swept(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path)
    living, dead = opened.reserve(name(1, "aaaaaaaa"), 10), opened.reserve(name(2, "bbbbbbbb"), 10)
    assert living is not None
    assert dead is not None
    publish(opened, 3)
    assert opened.sweep(lambda execution: execution == "bbbbbbbb", min_age_seconds=60) == []
    assert opened.sweep(lambda execution: execution == "bbbbbbbb") == [f".tmp-bbbbbbbb-{name(2, 'bbbbbbbb')}"]
    living.publish()
    assert [entry.file_name for entry in opened.files()] == [name(1, "aaaaaaaa"), name(3)]


def test_what_a_copy_took_over_unfinished_from_its_original_is_abandoned_and_goes(tmp_path: Path) -> None:
    original = Spool.open(tmp_path / "spool")
    assert original.reserve(name(1), 10) is not None
    assert SpoolPresence(original.folder, original.spool_id).show(1)
    before = sorted(path.name for path in original.folder.iterdir())
    shutil.copytree(original.folder, tmp_path / "copy")
    (tmp_path / "copy" / "spool_id").unlink()
    copy = Spool.open(tmp_path / "copy")
    [holder] = copy.folder.glob(".holder-*")
    presence = SpoolPresence(copy.folder, copy.spool_id)
    assert presence.show(1)
    assert copy.sweep(lambda execution: True) == [f".tmp-0123abcd-{name(1)}"]
    os.utime(holder, (0, time.time() - 86500))  # nobody wrote it for a day
    presence.leave()
    assert not [*copy.folder.glob(".tmp-*"), *copy.folder.glob(".holder-*")]
    assert sorted(path.name for path in original.folder.iterdir()) == before


def test_reserving_from_several_threads_counts_each_byte_once(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path, high_bytes=1000)
    files = []
    lock = threading.Lock()

    def reserve(number: int) -> None:
        if file := opened.reserve(name(number), 100):
            with lock:
                files.append(file)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(reserve, range(40)))
    assert len(files) == 10
    assert opened.usage().num_bytes == 1000


def test_a_disk_that_fills_between_look_and_reservation_is_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    opened = Spool.open(tmp_path)
    assert opened.reserve(name(1), 100) is None
    assert opened.usage().paused
    assert opened.usage().num_bytes == 0


def test_a_spool_that_becomes_read_only_is_away_and_says_so_and_goes_on_afterwards(small_disk: Path) -> None:
    opened = Spool.open(small_disk / "spool")
    begun = opened.reserve(name(1), 100)
    assert begun is not None
    os.close(begun.fd)  # what is open for writing keeps a disk from becoming read-only
    begun.fd = -1
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    try:
        for refused in (lambda: opened.reserve(name(2), 100), begun.publish, lambda: opened.quarantine(name(3), "why")):
            with pytest.raises(SpoolAway, match="Read-only file system") as away:
                refused()
            assert str(away.value).startswith(f"--spool {small_disk / 'spool'}: ")
            assert "see that its disk is mounted and writable; no batch is charged for it" in str(away.value)
        begun.discard()  # says nothing: what the disk keeps is swept later
    finally:
        subprocess.run([*remount[:2], "remount,rw", remount[3]], check=True)
    assert opened.sweep(lambda execution: True) == [f".tmp-{name(1)[7:15]}-{name(1)}"]
    file = opened.reserve(name(2), 100)
    assert file is not None
    assert file.publish().exists()


def test_a_spool_made_on_a_full_disk_is_named_and_half_of_it_is_not_left(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(2 * SMALL_DISK_BYTES))
    with pytest.raises(SpoolAway, match="No space left on device; make room there") as away:
        Spool.open(small_disk)
    assert str(away.value).startswith(f"--spool {small_disk}: ")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    (small_disk / "filler").unlink()
    assert Spool.open(small_disk).spool_id


def test_how_full_a_spool_is_that_was_removed_is_not_told(tmp_path: Path) -> None:
    opened = Spool.open(tmp_path / "spool")
    shutil.rmtree(tmp_path / "spool")
    with pytest.raises(SpoolGone, match="does not lie there any more"):
        opened.usage()
