"""From a URI to a store.

Invariant: what a URI can't mean is refused here, in one line and before anything is touched: credentials in it, a
bucket without a prefix, a setting that has no effect on such a store.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from hiddenq.contracts.errors import UsageError
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.files import must_be_utf8
from hiddenq.storage.local import LocalStore
from hiddenq.storage.settings import StoreSettings
from hiddenq.storage.store import ObjectStore, StoreObserver

_EVERYWHERE = frozenset({"bandwidth_bytes_per_second", "num_connections", "part_bytes", "timeout_seconds"})


def open_store(
    uri: str | Path,
    settings: StoreSettings | None = None,
    *,
    observer: StoreObserver | None = None,
    limit: BandwidthLimit | None = None,
) -> ObjectStore:
    """The store at a URI: `s3://bucket/prefix`, `file:///folder`, or a path. Nothing is touched yet.

    `limit` is the host's share of bandwidth; without it, the settings' own, for this process alone.

    Raises:
        UsageError: a URI of another kind or with credentials in it, a bucket without a prefix, or settings without
            effect there.
    """
    settings = settings or StoreSettings()
    observer = observer or StoreObserver()
    limit = limit or BandwidthLimit(settings.bandwidth_bytes_per_second)
    text = str(uri)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if holds_credentials(text):
        raise UsageError(f"--out {scheme}://…: it holds credentials; put them into AWS_ACCESS_KEY_ID and the like")
    if scheme == "s3":
        must_be_utf8("--out", text)
        bucket, _, prefix = text.removeprefix("s3://").partition("/")
        prefix = prefix.strip("/")
        if not bucket or not prefix:
            raise UsageError(f"--out {text}: a prefix is needed, such as s3://{bucket or 'bucket'}/my-run")
        if ".." in prefix.split("/") or "//" in prefix:
            raise UsageError(f"--out {text}: a prefix has no empty part and no '..'")
        from hiddenq.storage.s3 import S3Store  # boto3 only where S3 is used

        return S3Store(bucket, prefix, settings, observer=observer, limit=limit)
    if scheme not in ("", "file"):
        raise UsageError(f"--out {text}: expected s3://bucket/prefix or a local folder, found {scheme}://")
    folder = text
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"--out {text}: a file URL has three slashes: file:///folder")
        folder = unquote(parts.path)
    if not folder.strip():
        raise UsageError("--out: expected s3://bucket/prefix or a local folder, found nothing")
    idle = sorted(settings.model_dump(exclude_defaults=True).keys() - _EVERYWHERE)
    if idle:
        raise UsageError(f"--{idle[0].replace('_', '-')}: has no effect on a local folder ({folder}); leave it out")
    return LocalStore(Path(folder), limit=limit)


def holds_credentials(uri: str) -> bool:
    """Whether a URI names a user or a password, which would travel wherever the URI is written down."""
    return "@" in uri.partition("://")[2].partition("/")[0]
