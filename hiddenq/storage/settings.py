"""How an object store is reached.

Invariant: no field ever holds a secret, so the settings may travel in Redis to every host of a run; credentials come
from each host's own environment by boto3's chain.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from hiddenq.contracts.base import Frozen
from hiddenq.contracts.errors import UsageError


class StoreSettings(Frozen):
    """Settings of a store; all but the bandwidth concern S3 alone."""

    endpoint_url: str | None = None
    """URL of an S3-compatible server; None for AWS (or `AWS_ENDPOINT_URL`)."""
    region: str | None = None
    """AWS region; None for boto3's chain."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket stands in the path or in the host name of a request."""
    profile: str | None = None
    """Name of a profile in the host's AWS configuration."""
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Server-side encryption of what is written."""
    sse_kms_key_id: str | None = None
    """KMS key for `sse` = `aws:kms`."""
    storage_class: str | None = None
    """Storage class of shards, such as `STANDARD_IA`."""
    request_payer: bool = False
    """Whether the requester pays."""
    bandwidth_bytes_per_second: int | None = Field(default=None, ge=1)
    """The most bytes a second that this host's uploaders send, together."""
    checksums: Literal["auto", "crc64nvme", "metadata"] = "auto"
    """`crc64nvme`: the store must verify it; `metadata`: send no checksum, keep it in the object's metadata and read
    each object back; `auto`: what a probe shows the store to be able to do."""
    num_connections: int = Field(default=8, ge=1, le=64)
    """Requests in flight to the store, per process."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """A request in which no byte moves for so long has failed."""
    part_bytes: int = Field(default=16 << 20, ge=5 << 20, le=5 << 30)
    """Smallest part of a multipart upload; larger files get larger parts, never more than 10,000."""

    @field_validator("endpoint_url")
    @classmethod
    def _no_secret_in_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--endpoint-url {parts.hostname or url!r}: expected http://host:port or https://host")
        if parts.username or parts.password:
            raise UsageError(
                f"--endpoint-url {parts.hostname}: it holds credentials; put them into AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY instead"
            )
        return url
