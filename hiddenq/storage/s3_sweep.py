"""What interrupted uploads left in a bucket: unfinished multipart uploads, and the objects of probes.

Invariant: a probe's is named only once it is old by the store's own clock, a shard's only where the caller says that it
is abandoned; so nothing is named that somebody still sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hiddenq.contracts import names
from hiddenq.contracts.errors import StoreRefused
from hiddenq.storage.s3_errors import refusal_code
from hiddenq.storage.s3_listing import age_seconds
from hiddenq.storage.s3_probe import PROBE_PREFIX
from hiddenq.storage.store import UNFINISHED_SECONDS

Pages = Callable[..., Iterator[Any]]
"""Every page of a listing, by its operation and `Prefix`."""


def abandoned_uploads(
    pages: Pages, prefix: str, is_abandoned: Callable[[str], bool], shard_age_seconds: float | None
) -> Iterator[tuple[str, str]]:
    """Full key and id of each upload that may be aborted; none where the store has no list of them."""
    shard_age = UNFINISHED_SECONDS if shard_age_seconds is None else shard_age_seconds
    try:
        for page in pages("list_multipart_uploads", Prefix=prefix):
            for upload in page.get("Uploads", ()):
                key = upload["Key"].removeprefix(prefix)
                age = UNFINISHED_SECONDS if key.startswith(PROBE_PREFIX) else shard_age
                if age_seconds(page, upload["Initiated"]) >= age and _may_go(key, is_abandoned):
                    yield upload["Key"], upload["UploadId"]
    except StoreRefused as error:
        if refusal_code(error) != "NotImplemented":
            raise


def old_probes(pages: Pages, prefix: str) -> Iterator[str]:
    """Key, relative to the prefix, of each object that a probe left behind."""
    for page in pages("list_objects_v2", Prefix=prefix + PROBE_PREFIX):
        for item in page.get("Contents", ()):
            if age_seconds(page, item["LastModified"]) > UNFINISHED_SECONDS:
                yield item["Key"].removeprefix(prefix)


def _may_go(key: str, is_abandoned: Callable[[str], bool]) -> bool:
    """Whether an old unfinished upload is a probe's, or that of a shard which is abandoned."""
    name = key.removeprefix(names.STATES_PREFIX)
    return key.startswith(PROBE_PREFIX) or (names.parse_shard_name(name) is not None and is_abandoned(name))
