"""One multipart upload: equal parts, in parallel, each with its checksum.

Invariant: what is completed is what was recorded. Each part's checksum is taken from the very buffer that is sent, and
the checksum of the whole is combined from them in order, so a file that changes while it is read is found out before
the upload is completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hiddenq.contracts import checksum as crc
from hiddenq.contracts.errors import TransientError
from hiddenq.storage.bandwidth import BandwidthLimit
from hiddenq.storage.body import Body, PartBuffer

MAX_PARTS = 10_000
_buffer = PartBuffer()


def part_sizes(num_bytes: int, part_bytes: int) -> list[int]:
    """Sizes of the parts of a file: equal ones of at least `part_bytes` (the last may be smaller), 10,000 at most."""
    num_parts = min(MAX_PARTS, max(1, num_bytes // part_bytes))
    size = -(-num_bytes // num_parts)
    return [min(size, num_bytes - begin) for begin in range(0, num_bytes, size)]


@dataclass(kw_only=True)
class Multipart:
    """A multipart upload of one object."""

    call: Callable[..., Any]
    """Runs a request of the client, tried again where that helps."""
    target: dict[str, Any]
    """Bucket, key, and who pays."""
    checksummed: bool
    """Whether the store takes CRC64-NVME of the whole object."""
    limit: BandwidthLimit
    upload_id: str = ""
    _parts: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, **extra: Any) -> None:
        """Open the upload."""
        kind = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if self.checksummed else {}
        answer = self.call(lambda client: client.create_multipart_upload(**self.target, **kind, **extra))
        self.upload_id = answer["UploadId"]

    def send(self, source: int, name: str, sizes: Sequence[int], pool: ThreadPoolExecutor) -> str:
        """Send all parts; returns the checksum of what was sent. The first failure ends it."""

        def send_part(number: int) -> tuple[dict[str, Any], str]:
            data = _buffer.read(source, name, number * sizes[0], sizes[number])
            checksum = crc.of_bytes(data)
            return self._send(number + 1, data, checksum), checksum

        futures = [pool.submit(send_part, number) for number in range(len(sizes))]
        try:
            sent = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # none reads the file any more when this returns
        self._parts = [part for part, _ in sent]
        return crc.of_parts((checksum, size) for (_, checksum), size in zip(sent, sizes, strict=True))

    def send_one(self, data: bytes) -> None:
        """Send these bytes as the only part."""
        self._parts = [self._send(1, memoryview(data), crc.of_bytes(data))]

    def complete(self, checksum: str, num_bytes: int, **options: Any) -> None:
        """Close the upload. If it is gone, an earlier answer was lost: the object itself says whether it is there."""
        proof: dict[str, Any] = {}
        if self.checksummed:
            proof = {
                "ChecksumCRC64NVME": crc.to_s3(checksum),
                "ChecksumType": "FULL_OBJECT",
                "MpuObjectSize": num_bytes,
            }
        parts = {"Parts": self._parts}
        with suppress(TransientError):
            self.call(
                lambda client: client.complete_multipart_upload(
                    **self.target, **proof, UploadId=self.upload_id, MultipartUpload=parts
                ),
                **options,
            )

    def _send(self, number: int, data: memoryview, checksum: str) -> dict[str, Any]:
        body = Body(data, self.limit)
        proof = {"ChecksumCRC64NVME": crc.to_s3(checksum)} if self.checksummed else {}
        answer = self.call(
            lambda client: client.upload_part(
                **self.target, **proof, UploadId=self.upload_id, PartNumber=number, Body=body.rewind()
            )
        )
        return {"PartNumber": number, "ETag": answer["ETag"], **proof}
