"""Listings of a bucket, page by page, and how old what they name is.

Invariant: age is counted by the store's own clock (the answer's `Date`), so a wrong clock of this host sweeps nothing
that is young.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from hiddenq.storage.s3_client import S3Client

FOLLOW = {
    "list_objects_v2": {"NextContinuationToken": "ContinuationToken"},
    "list_multipart_uploads": {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"},
}
"""By operation: which fields of a page are which arguments of the next request."""


def pages(call: Callable[[Callable[[S3Client], Any]], Any], operation: str, **arguments: Any) -> Iterator[Any]:
    """Every page of a listing; `call` runs a request of the client."""
    while True:
        page = call(lambda client: getattr(client, operation)(**arguments))  # noqa: B023 (run before the next round)
        yield page
        if not page.get("IsTruncated"):
            return
        arguments |= {argument: page[field] for field, argument in FOLLOW[operation].items()}


def age_seconds(page: Mapping[str, Any], since: datetime) -> float:
    """Seconds from `since` to the page's answer, both by the store's own clock."""
    date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return (now - since).total_seconds()
