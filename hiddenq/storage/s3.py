"""S3 and what speaks like it.

Invariant: `put_file` returns only after the store is shown to hold the recorded bytes. They are checked as they leave
(each part's checksum, combined, must be the recorded one before an upload is completed), the store refuses what arrives
damaged where it can, and says its own checksum of the whole object; where it can't, the object is read back once.
A probe finds out which, once a process.

Parts go through boto3's own HTTP client, several at once: benchmarks/upload.py found the C runtime no faster, at more
than twice the processor time.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import DamagedShard, HiddenqError, ObjectMissing, StoreRefused, TransientError
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.body import Body, PartBuffer
from hiddenq.storage.files import opened
from hiddenq.storage.location import open_store
from hiddenq.storage.s3_client import S3Client, S3Connection
from hiddenq.storage.s3_errors import refusal_code
from hiddenq.storage.s3_listing import pages
from hiddenq.storage.s3_multipart import Multipart, part_sizes
from hiddenq.storage.s3_probe import METADATA_CHECKSUM, S3Abilities, probe, proof_of
from hiddenq.storage.s3_sweep import abandoned_uploads, old_probes
from hiddenq.storage.settings import StoreSettings
from hiddenq.storage.store import ObjectInfo, StoreCapabilities, StoreObserver

_READ_BYTES = 8 << 20
_buffer = PartBuffer()


class S3Store:
    """Objects under one prefix of one bucket."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        settings: StoreSettings,
        *,
        observer: StoreObserver,
        limit: BandwidthLimit,
        connection: S3Connection | None = None,
    ) -> None:
        self.uri = f"s3://{bucket}/{prefix}"
        self._bucket = bucket
        self._prefix = prefix + "/"
        self._settings = settings
        self._observer = observer
        self._limit = limit
        self._connection = connection or S3Connection(settings, observer)
        self._abilities: S3Abilities | None = None
        self._probing = threading.Lock()
        payer = {"RequestPayer": "requester"} if settings.request_payer else {}
        self._common: dict[str, Any] = {"Bucket": bucket, **payer}
        self._encrypted = _given(ServerSideEncryption=settings.sse, SSEKMSKeyId=settings.sse_kms_key_id)
        self._shard = {**self._encrypted, **_given(StorageClass=settings.storage_class)}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process makes its own client."""
        return open_store, (self.uri, self._settings)

    def patient(self, seconds: float) -> S3Store:
        bucket, prefix, connection = self._bucket, self._prefix.rstrip("/"), self._connection.patient(seconds)
        other = S3Store(
            bucket, prefix, self._settings, observer=self._observer, limit=self._limit, connection=connection
        )
        other._abilities = self._abilities
        return other

    def anchor(self, key: str) -> None:
        """Nothing to do: a bucket that is gone says so."""

    def put_file(self, key: str, path: Path, *, checksum: str, num_bytes: int) -> ObjectInfo:
        with opened(path) as source:
            size = os.fstat(source).st_size
            if size != num_bytes:
                raise DamagedShard(f"{path.name}: expected {num_bytes} bytes, found {size}")
            if num_bytes <= 2 * self._settings.part_bytes:
                self._put_whole(key, source, path.name, checksum, num_bytes)
            else:
                self._put_parts(key, source, path.name, checksum, num_bytes)
        began = time.monotonic()
        info = self._confirm(key, checksum, num_bytes)
        self._observer.confirmed(time.monotonic() - began)
        return info

    def put_bytes(self, key: str, data: bytes) -> None:
        self._put(key, Body(data, self._limit), crc.of_bytes(data), **self._encrypted)

    def get_bytes(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= begin:
            return b""
        span = {} if begin == 0 and end is None else {"Range": f"bytes={begin}-{'' if end is None else end - 1}"}
        try:
            data: bytes = self._call(key, lambda client: client.get_object(**self._of(key), **span)["Body"].read())
        except StoreRefused as error:
            if refusal_code(error) == "InvalidRange":
                return b""  # from the object's end on, there is nothing
            raise
        return data

    def open_local(self, key: str) -> Path | None:
        return None

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._head(key)
        except ObjectMissing:
            return None
        return ObjectInfo(
            key=key,
            num_bytes=answer["ContentLength"],
            checksum=proof_of(answer) or answer.get("Metadata", {}).get(METADATA_CHECKSUM),
            modified=answer["LastModified"].timestamp(),
        )

    def checksum(self, key: str) -> str:
        trusted = self._abilities.single if self._abilities else self._connection.is_aws
        return (trusted and proof_of(self._head(key))) or self._read_back(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for page in self._pages("list_objects_v2", Prefix=self._prefix + prefix):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                if not any(part.startswith(".") for part in key.split("/")) and not key.endswith("/"):
                    yield ObjectInfo(key=key, num_bytes=item["Size"], modified=item["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        self._call(key, lambda client: client.delete_object(**self._of(key)))

    def probe(self) -> StoreCapabilities:
        self.check_readable()  # some servers make a missing bucket by the first PUT
        abilities = self._can()
        return StoreCapabilities(confirm="store" if abilities.single else "read_back", detail=abilities.detail)

    def check_readable(self) -> None:
        try:
            self._call("", lambda client: client.list_objects_v2(**self._common, Prefix=self._prefix, MaxKeys=1))
        except ObjectMissing as error:
            raise StoreRefused(f"{self.uri}: no such bucket; create it, or check its name") from error

    def abort_unfinished(self, is_abandoned: Callable[[str], bool], *, shard_age_seconds: float | None = None) -> int:
        num_removed = 0
        for full_key, upload_id in abandoned_uploads(self._pages, self._prefix, is_abandoned, shard_age_seconds):
            num_removed += self._abort(full_key, upload_id)
        for key in old_probes(self._pages, self._prefix):
            self.delete(key)
            num_removed += 1
        return num_removed

    def _put_whole(self, key: str, source: int, name: str, checksum: str, num_bytes: int) -> None:
        data = _buffer.read(source, name, 0, num_bytes)
        found = crc.of_bytes(data)
        if found != checksum:
            raise DamagedShard(f"{name}: expected checksum {checksum}, found {found}")
        self._put(key, Body(data, self._limit), checksum, **self._shard)

    def _put(self, key: str, body: Body, checksum: str, **extra: Any) -> None:
        proof = {"ChecksumCRC64NVME": crc.to_s3(checksum)} if self._can().single else {}
        metadata = {METADATA_CHECKSUM: checksum}
        self._call(
            key,
            lambda client: client.put_object(**self._of(key), **extra, **proof, Metadata=metadata, Body=body.rewind()),
        )

    def _put_parts(self, key: str, source: int, name: str, checksum: str, num_bytes: int) -> None:
        sizes = part_sizes(num_bytes, self._settings.part_bytes)
        upload = Multipart(
            call=functools.partial(self._call, key),
            target=self._of(key),
            checksummed=self._can().multipart,
            limit=self._limit,
        )
        upload.begin(**self._shard, Metadata={METADATA_CHECKSUM: checksum})
        try:
            found = upload.send(source, name, sizes, self._connection.pool)
            if found != checksum:
                raise DamagedShard(f"{name}: expected checksum {checksum}, found {found}")
            upload.complete(checksum, num_bytes)
        except BaseException:
            self._abort(self._prefix + key, upload.upload_id)
            raise

    def _confirm(self, key: str, checksum: str, num_bytes: int) -> ObjectInfo:
        try:
            answer = self._head(key)
            found = (self._can().single and proof_of(answer)) or self._read_back(key)
        except ObjectMissing as error:
            raise TransientError(f"{self.uri}/{key}: sent, but not there; sent again") from error
        if answer["ContentLength"] != num_bytes or found != checksum:
            self.delete(key)
            raise TransientError(
                f"{self.uri}/{key}: the store holds {answer['ContentLength']} bytes with checksum {found}, expected "
                f"{num_bytes} with {checksum}; removed there, sent again"
            )
        return ObjectInfo(key=key, num_bytes=num_bytes, checksum=checksum, modified=answer["LastModified"].timestamp())

    def _read_back(self, key: str) -> str:
        def read(client: S3Client) -> str:
            return crc.of_chunks(client.get_object(**self._of(key))["Body"].iter_chunks(_READ_BYTES))

        return str(self._call(key, read))

    def _head(self, key: str) -> dict[str, Any]:
        try:
            return dict(self._call(key, lambda client: client.head_object(**self._of(key), ChecksumMode="ENABLED")))
        except StoreRefused:
            # A HEAD's error has no body; a GET of one byte says why.
            self._call(key, lambda client: client.get_object(**self._of(key), Range="bytes=0-0")["Body"].close())
            raise

    def _abort(self, full_key: str, upload_id: str) -> bool:
        target = {**self._common, "Key": full_key, "UploadId": upload_id}
        try:
            self._call("", lambda client: client.abort_multipart_upload(**target), num_attempts=2)
        except TransientError:  # gone already
            return True
        except HiddenqError:
            self._observer.abort_failed(full_key)
            return False
        return True

    def _pages(self, operation: str, **arguments: Any) -> Iterator[Any]:
        return pages(functools.partial(self._call, ""), operation, **self._common, **arguments)

    def _can(self) -> S3Abilities:
        with self._probing:
            if self._abilities is None:
                # Without patience: a probe provokes errors, and must not wait for them to pass.
                connection = self._connection.patient(0.0)
                self._abilities = probe(connection, self._common, self._prefix, self._settings, self._encrypted)
            return self._abilities

    def _of(self, key: str) -> dict[str, Any]:
        return {**self._common, "Key": self._prefix + key}

    def _call(self, key: str, request: Callable[[S3Client], Any], **options: Any) -> Any:
        return self._connection.call(f"{self.uri}/{key}".rstrip("/"), request, **options)


def _given(**arguments: Any) -> dict[str, Any]:
    """Those arguments of a request that are set."""
    return {name: value for name, value in arguments.items() if value is not None}
