"""What the spool and the local store know of files."""

from __future__ import annotations

from pathlib import Path

from hiddenq.storage.files import file_system


def test_the_kind_of_a_file_system_is_that_of_its_innermost_mount(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self/status")) == "proc"
    assert file_system(Path("/sys/kernel")) == "sysfs"
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\nserver:/x /data\\040sets nfs4 rw 0 0\n")
    assert file_system(Path("/data sets/one"), mounts) == "nfs4"
    assert file_system(Path("/etc"), mounts) == "ext4"


def test_a_file_system_that_nothing_tells_of_is_unknown(tmp_path: Path) -> None:
    assert file_system(Path("/etc"), tmp_path / "none") == "unknown"
