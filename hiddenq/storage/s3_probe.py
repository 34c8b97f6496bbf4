"""What an S3 store can do, found out with a small object.

Invariant: a store is trusted to verify checksums only after it has refused a wrong one and told a right one back; every
other store gets no checksum headers, and each shard is read back. The probe's object is removed whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import HiddenqError, ObjectMissing, StoreAway, StoreRefused
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.s3_client import S3Client, S3Connection
from hiddenq.storage.s3_errors import arrived_damaged
from hiddenq.storage.s3_multipart import Multipart
from hiddenq.storage.settings import StoreSettings

METADATA_CHECKSUM = "hiddenq-checksum"
"""Object metadata that keeps the checksum for stores that keep none."""
PROBE_PREFIX = ".hiddenq-probe-"
"""Keys of what a probe writes; what a killed one left is swept later."""
_DATA = b"hiddenq asks what this store can do"
_RIGHT = crc.of_bytes(_DATA)
_WRONG = crc.of_bytes(_DATA + b"?")


@dataclass(frozen=True, kw_only=True)
class S3Abilities:
    """Where the store itself verifies CRC64-NVME of a whole object and tells it back."""

    single: bool
    """In one PUT."""
    multipart: bool
    detail: str


def probe(
    connection: S3Connection,
    common: dict[str, Any],
    prefix: str,
    settings: StoreSettings,
    written: dict[str, Any],
) -> S3Abilities:
    """Ask the store. `written` are the arguments with which everything is written (encryption).

    Raises:
        StoreRefused: it can't be written or read, or can't do what `settings.checksums` asks for.
        StoreAway: it does not answer for now.
    """
    target = {**common, "Key": f"{prefix}{PROBE_PREFIX}{secrets.token_hex(4)}"}
    call = functools.partial(connection.call, f"s3://{common['Bucket']}/{prefix.rstrip('/')}")
    try:
        return _probe(call, target, settings, written)
    except ObjectMissing as error:
        raise StoreRefused(f"{error}; the store lost an object just written, or there is no such bucket") from error
    finally:
        with contextlib.suppress(HiddenqError):
            call(lambda client: client.delete_object(**target), num_attempts=1)


def proof_of(answer: Mapping[str, Any]) -> str | None:
    """The store's own checksum of the whole object, from its answer to a HEAD; None if it tells none."""
    value = answer.get("ChecksumCRC64NVME")
    return crc.from_s3(value) if value and answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" else None


def _probe(
    call: Callable[..., Any], target: dict[str, Any], settings: StoreSettings, written: dict[str, Any]
) -> S3Abilities:
    def get(client: S3Client) -> tuple[bytes, str | None]:
        answer = client.get_object(**target)
        return answer["Body"].read(), answer.get("Metadata", {}).get(METADATA_CHECKSUM)

    call(lambda client: client.put_object(**target, **written, Metadata={METADATA_CHECKSUM: _RIGHT}, Body=_DATA))
    data, recorded = call(get)
    if data != _DATA:
        raise StoreRefused(f"s3://{target['Bucket']}: an object read back differs from what was written")
    beside = (
        ""
        if recorded == _RIGHT
        else "; it keeps no metadata, so until the index is written no checksum is recorded there"
    )
    if settings.checksums == "metadata":
        detail = f"no checksums sent, as asked: each object is read back{beside}"
        return S3Abilities(single=False, multipart=False, detail=detail)

    def put(checksum: str) -> None:
        proof = {"ChecksumCRC64NVME": crc.to_s3(checksum)}
        call(lambda client: client.put_object(**target, **written, **proof, Body=_DATA), num_attempts=1)

    def put_parts(checksum: str) -> None:
        upload = Multipart(call=call, target=target, checksummed=True, limit=BandwidthLimit(None))
        upload.begin(**written)
        try:
            upload.send_one(_DATA)
            upload.complete(checksum, len(_DATA), num_attempts=1)
        finally:
            with contextlib.suppress(HiddenqError):
                call(lambda client: client.abort_multipart_upload(**target, UploadId=upload.upload_id), num_attempts=1)

    single = _verifies(call, target, put)
    multipart = single and _verifies(call, target, put_parts)
    if settings.checksums == "crc64nvme" and not multipart:
        raise StoreRefused(
            f"s3://{target['Bucket']}: the store does not verify CRC64-NVME; use --checksums metadata (or auto)"
        )
    return S3Abilities(single=single, multipart=multipart, detail=_DETAILS[single, multipart] + beside)


_DETAILS = {
    (True, True): "the store verifies CRC64-NVME and tells it back",
    (True, False): "the store verifies CRC64-NVME of single uploads; multipart objects are read back",
    (False, False): "the store verifies no CRC64-NVME: none is sent, each object is read back",
}


def _verifies(call: Callable[..., Any], target: dict[str, Any], put: Callable[[str], None]) -> bool:
    """Whether `put` is refused with a wrong checksum, and works with the right one, which the store then tells."""
    try:
        put(_WRONG)
        return False
    except StoreRefused:
        pass  # of the header or of the value: the right value tells which
    except StoreAway as error:
        if not arrived_damaged(error):
            raise
    try:
        put(_RIGHT)
        answer = call(lambda client: client.head_object(**target, ChecksumMode="ENABLED"))
    except (StoreRefused, ObjectMissing):
        return False
    except StoreAway as error:
        if arrived_damaged(error):
            return False
        raise
    return proof_of(answer) == _RIGHT
