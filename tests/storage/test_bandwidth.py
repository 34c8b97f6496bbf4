"""A limit on bytes a second that all processes of a host keep together."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hiddenq.storage import BandwidthLimit


def test_no_limit_never_waits(tmp_path: Path) -> None:
    limit = BandwidthLimit(None, tmp_path / "line")
    began = time.monotonic()
    limit.take(1 << 40)
    assert time.monotonic() - began < 0.1
    assert not (tmp_path / "line").exists()


def test_uploaders_that_share_a_file_share_the_line(tmp_path: Path) -> None:
    limits = [BandwidthLimit(1_000_000, tmp_path / "line") for _ in range(4)]

    def send(limit: BandwidthLimit) -> None:
        for _ in range(10):
            limit.take(10_000)

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, limits))
    assert time.monotonic() - began > 0.3, "400,000 bytes at 1,000,000 a second, less one block and the idle time"


def test_a_line_left_by_a_host_that_was_restarted_is_begun_anew(tmp_path: Path) -> None:
    limit = BandwidthLimit(1_000_000, tmp_path / "line")
    for left in (b"", b"xx", b"\xff" * 8, (8 * b"\x7f")):
        (tmp_path / "line").write_bytes(left)
        began = time.monotonic()
        limit.take(1000)
        assert time.monotonic() - began < 0.2
