"""A copied spool is found and refused, whoever comes second; nothing that is legal is taken for a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from hiddenq.contracts.errors import UsageError
from hiddenq.delivery import DeliverySettings, whereabouts
from hiddenq.delivery.spool_holders import SpoolHolders
from hiddenq.storage import Spool, SpoolPresence
from tests.support.small_disk import SMALL_DISK_BYTES
from tests.support.waiting import wait_until

PATIENT = DeliverySettings(lease_seconds=30, renew_seconds=0.1)
"""Who lives is not taken for dead, however slow this machine is."""
SHORT = DeliverySettings(lease_seconds=1, renew_seconds=0.1)


def holder(client: redis.Redis, folder: Path, settings: DeliverySettings = PATIENT) -> SpoolHolders:
    spool = Spool.open(folder)
    return SpoolHolders(client, SpoolPresence(spool.folder, spool.spool_id), settings=settings)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(".lock"))
    return to


def killed(holder: SpoolHolders) -> None:
    """As after kill -9: it writes no more, and takes nothing away."""
    holder._closing.set()
    holder._thread.join()


def entries(client: redis.Redis) -> int:
    [key] = client.keys("hiddenq:spool:*:holders") or [b""]
    return int(client.hlen(key)) if key else 0


@pytest.fixture
def on_another_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """From its call on, who comes is under another kernel: a file's device and number prove nothing."""
    other = tmp_path / "boot_id"
    other.write_text("0a5d2f5e-another-kernel\n")

    def come() -> None:
        monkeypatch.setattr(whereabouts, "_BOOT_ID", other)
        monkeypatch.setenv("HIDDENQ_HOST", "another-host")

    return come


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_copy_of_a_spool_in_use_is_refused_at_its_start_and_the_first_goes_on(
    redis_client: redis.Redis, tmp_path: Path, on_another_host: Callable[[], None], elsewhere: bool
) -> None:
    with holder(redis_client, tmp_path / "first") as first, holder(redis_client, tmp_path / "first"):
        copy = copied(tmp_path / "first", tmp_path / "copy")
        if elsewhere:
            on_another_host()
        second = holder(redis_client, copy)
        with pytest.raises(UsageError) as refused, second:
            pass
        spool_id = Spool.open(copy).spool_id
        assert f"--spool {copy}: it has the id of a spool that process " in str(refused.value)
        assert f" serves in {tmp_path / 'first'}, another folder, so one is a copy of the other" in str(refused.value)
        assert f"delete {copy}/spool_id and start again" in str(refused.value)
        assert str(refused.value).endswith(f"spool {spool_id}")
        assert entries(redis_client) == 2, "the second was never there"
        first.check()
    (copy / "spool_id").unlink()
    with holder(redis_client, copy) as own:  # what the line says helps
        own.check()


def test_of_two_copies_that_start_at_once_the_later_one_ends(redis_client: redis.Redis, tmp_path: Path) -> None:
    Spool.open(tmp_path / "first")
    copy = copied(tmp_path / "first", tmp_path / "copy")
    first, second = holder(redis_client, tmp_path / "first"), holder(redis_client, copy)
    first._keep()  # both have looked and found nobody, and come in now
    second._keep()
    first._thread.start()
    second._thread.start()
    wait_until(lambda: second._elsewhere, what="the second sees the first one")
    with pytest.raises(UsageError, match="so one is a copy of the other"):
        second.check()
    numbers = first._number
    wait_until(lambda: first._number > numbers + 5, what="the first one looks again and again")
    first.check()
    second.close()
    first.close()
    assert entries(redis_client) == 0
    assert not list(tmp_path.glob("*/.holder-*"))


def test_processes_of_one_folder_know_each_other_at_once_whatever_it_is_called(
    redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = PATIENT.model_copy(update={"lease_seconds": 3000.0, "renew_seconds": 1000.0})
    (tmp_path / "mounted-there").symlink_to(tmp_path / "spool")
    with holder(redis_client, tmp_path / "spool", slow):  # which says nothing more in this test
        monkeypatch.setenv("HIDDENQ_HOST", "a-container-with-another-name")
        with holder(redis_client, tmp_path / "mounted-there", slow) as second:
            second.check()


def test_two_hosts_that_share_a_spool_know_each_other_by_what_the_first_one_writes(
    redis_client: redis.Redis, tmp_path: Path, on_another_host: Callable[[], None]
) -> None:
    with holder(redis_client, tmp_path / "spool") as first:
        on_another_host()
        with holder(redis_client, tmp_path / "spool") as second:
            assert second._known._here == {first._presence.token}
            numbers = second._number
            wait_until(lambda: second._number > numbers + 5, what="they look again and again")
            second.check()
            first.check()


@pytest.mark.parametrize("what", ["killed and started again", "restarted after a power cut", "moved after a kill"])
def test_who_is_dead_keeps_nobody_out(
    redis_client: redis.Redis, tmp_path: Path, on_another_host: Callable[[], None], what: str
) -> None:
    folder, settings = tmp_path / "spool", PATIENT if what.startswith("killed") else SHORT
    first = holder(redis_client, folder, settings)
    first.start()
    killed(first)
    if what == "restarted after a power cut":  # what was not on disk yet is gone
        on_another_host()
        (folder / f".holder-{first._presence.token}").write_bytes(b"")
    elif what == "moved after a kill":
        on_another_host()
        copied(folder, tmp_path / "moved")
        folder = tmp_path / "moved"
    with holder(redis_client, folder, settings) as second:
        second.check()


def test_a_spool_moved_under_its_process_is_no_copy_for_who_finds_it_in_its_new_place(
    redis_client: redis.Redis, tmp_path: Path, on_another_host: Callable[[], None]
) -> None:
    with holder(redis_client, tmp_path / "spool", SHORT) as first:
        (tmp_path / "spool").rename(tmp_path / "moved")
        Spool.open(tmp_path / "spool")  # and another one is mounted there
        on_another_host()
        with holder(redis_client, tmp_path / "moved", SHORT) as second:
            second.check()
        assert not list((tmp_path / "spool").glob(".holder-*")), "nothing is written into what is not the spool"
        first.check()


def test_a_full_disk_and_other_peoples_entries_refuse_nobody(redis_client: redis.Redis, small_disk: Path) -> None:
    spool_id = Spool.open(small_disk / "spool").spool_id
    for token, entry in {"x": "no JSON", "y": "[]", "z": '{"seen": 1e99, "token": "../../../etc/passwd"}'}.items():
        redis_client.hset(f"hiddenq:spool:{spool_id}:holders", token, entry)
    with holder(redis_client, small_disk / "spool") as first:
        with pytest.raises(OSError, match="No space"):
            (small_disk / "filler").write_bytes(bytes(SMALL_DISK_BYTES))
        numbers = first._number
        wait_until(lambda: first._number > numbers + 2, what="it writes on")
        with holder(redis_client, small_disk / "spool") as second:
            second.check()
