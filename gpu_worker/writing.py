"""From the pinned block to the spool and the upload queue.

Invariant: the bytes that the device gathered are written as they lie, once, behind the header, while their CRC64-NVME
is computed from the same memory; only then the file gets its name, and only then one transaction makes it the batch's
result. A worker whose lease is gone deletes its own file and nobody else's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.gather import Column, name_nonfinite
from gpu_worker.inputs import PaddedBatch
from hiddenq.contracts import names
from hiddenq.contracts.checksum import Crc64Nvme, of_parts
from hiddenq.contracts.errors import LeaseLost, NonFiniteStates
from hiddenq.contracts.messages import BatchJob, ShardReady
from hiddenq.contracts.shard import ShardLayout
from hiddenq.delivery import Claim
from hiddenq.storage import Spool, SpoolFile
from hiddenq.storage.spool_folder import writing

CHUNK_BYTES = 32 << 20
"""Written at once, by one of several threads: a block of a gigabyte is on its way in a fraction of a second."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A shard on disk under its temporary name."""

    checksum: str
    num_bytes: int


class ShardWriter:
    """Writes shards with several threads: checksum and write leave the interpreter's lock alone."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="write")

    def write(self, file: SpoolFile, layout: ShardLayout, payload: Tensor) -> Written:
        """Write header and payload into a reserved file of just that size.

        Raises:
            SpoolAway: the disk is full or read-only.
            OSError: it is broken.
        """
        chunks: list[tuple[memoryview, int]] = [(memoryview(layout.header), 0)]
        block = payload.numpy().data
        for first in range(0, len(block), CHUNK_BYTES):
            chunks.append((block[first : first + CHUNK_BYTES], layout.data_offset + first))
        with writing(file.folder):
            parts = list(self._pool.map(lambda chunk: _write_chunk(file.fd, *chunk), chunks))
        return Written(checksum=of_parts(parts), num_bytes=sum(num_bytes for _, num_bytes in parts))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def refuse_nonfinite(job: BatchJob, batch: PaddedBatch, columns: tuple[Column, ...], nonfinite_CB: Tensor) -> None:
    """Look at what the gather found; `nonfinite_CB` is 1 where a column of a row holds NaN or Inf.

    Raises:
        NonFiniteStates: a state holds NaN or Inf; the text names sample and layer.
    """
    where = name_nonfinite(
        columns, nonfinite_CB, lambda row: f"sample {batch.sample_ids[row]} ({batch.lengths[row]} tokens)"
    )
    if where is not None:
        raise NonFiniteStates(
            f"batch {job.batch_id}: {where}; nothing is published. --dtype bfloat16 or float32 has a wider range "
            "than float16; a sample that fails in those, too, is best left out"
        )


def publish_shard(
    publish: Callable[[Claim[BatchJob], ShardReady], None],
    claim: Claim[BatchJob],
    spool: Spool,
    file: SpoolFile,
    layout: ShardLayout,
    written: Written,
    *,
    worker: str,
    fsync: bool,
) -> ShardReady:
    """Name the file and make it the batch's result.

    Raises:
        LeaseLost: the batch is another execution's; the file is gone.
    """
    file.publish(fsync=fsync)
    shard = ShardReady(
        batch=claim.message,
        spool_id=spool.spool_id,
        file_name=names.shard_file_name(claim.message.batch_id, claim.execution),
        num_bytes=written.num_bytes,
        data_offset=layout.data_offset,
        checksum=written.checksum,
        execution=claim.execution,
        worker=worker,
    )
    try:
        publish(claim, shard)
    except LeaseLost:
        spool.delete(shard.file_name)
        raise
    return shard


def _write_chunk(descriptor: int, data: memoryview, position: int) -> tuple[str, int]:
    """Checksum and write a piece of the file; returns the checksum and its size."""
    crc, written = Crc64Nvme(), 0
    crc.update(data)
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], position + written)
    return crc.value, written
