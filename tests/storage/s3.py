"""A store on the S3 server of the tests, and files to put there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hiddenq.contracts import checksum as crc
from hiddenq.storage import StoreSettings, open_store
from hiddenq.storage.s3 import S3Store

KEY = "states/000001-0123abcd.safetensors"
PART = 5 << 20


def make_file(folder: Path, num_bytes: int) -> tuple[Path, str]:
    path = folder / f"file-{num_bytes}"
    path.write_bytes(os.urandom(num_bytes))
    return path, crc.of_file(path)


def store_at(endpoint_url: str, uri: str, **settings: Any) -> S3Store:
    options = StoreSettings(endpoint_url=endpoint_url, part_bytes=PART, timeout_seconds=10, **settings)
    store = open_store(uri, options)
    assert isinstance(store, S3Store)
    return store
