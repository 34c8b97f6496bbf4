"""What the spool and the local store know of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddenq.contracts.errors import UsageError
from hiddenq.storage import Spool, open_store
from hiddenq.storage.files import file_system


def test_the_kind_of_a_file_system_is_that_of_its_innermost_mount(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self/status")) == "proc"
    assert file_system(Path("/sys/kernel")) == "sysfs"
    mounts = tmp_path / "mounts"
    mounts.write_bytes(
        "/dev/vda / ext4 rw 0 0\nserver:/x /data\\040sets nfs4 rw 0 0\n/dev/vdb /é xfs rw 0 0\n".encode()
        + b"/dev/vdc /\xff btrfs rw 0 0\n"
    )
    assert file_system(Path("/data sets/one"), mounts) == "nfs4"
    assert file_system(Path("/etc"), mounts) == "ext4"
    assert file_system(Path("/é/x"), mounts) == "xfs"
    assert file_system(Path(os.fsdecode(b"/\xff/x")), mounts) == "btrfs"


def test_a_file_system_that_nothing_tells_of_is_unknown(tmp_path: Path) -> None:
    assert file_system(Path("/etc"), tmp_path / "none") == "unknown"


@pytest.mark.parametrize("open_it", [open_store, lambda path: Spool.open(Path(path))], ids=["location", "spool"])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_place_whose_name_is_no_utf_8_is_refused_by_a_name_that_can_be_shown(
    open_it: Callable[[str], object], kind: str, tmp_path: Path
) -> None:
    name = os.fsdecode(b"caf\xe9")
    place = f"s3://bucket/{name}" if kind == "bucket" else str(tmp_path / name)
    with pytest.raises(UsageError, match="caf\N{REPLACEMENT CHARACTER}: this name is no UTF-8") as refused:
        open_it(place)
    str(refused.value).encode()
    assert not list(tmp_path.iterdir())
