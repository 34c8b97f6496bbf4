"""The two messages that travel through Redis.

Invariant: a message is under 1 KB and carries ids and sizes only, never tokens or tensors, so a queue of any
length fits into Redis; and `ShardReady` holds the whole `BatchJob`, so a lost file can always be made again.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from hiddenq.contracts.base import Versioned

RunId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
BatchId = Annotated[str, StringConstraints(pattern=r"^([0-9]{6}|[1-9][0-9]{6,11})$")]
ExecutionId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]
SpoolId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$")]
ShardName = Annotated[str, StringConstraints(pattern=r"^[0-9]{6,12}-[0-9a-f]{8}\.safetensors$")]
Checksum = Annotated[str, StringConstraints(pattern=r"^crc64nvme:[A-Za-z0-9+/]{11}=$")]

MAX_MESSAGE_BYTES = 1024


class BatchJob(Versioned):
    """One forward pass to be made: where its tokens are and how large it is."""

    schema_version: int = 1
    run: RunId
    batch_id: BatchId
    token_part: int = Field(ge=0)
    """Number of the token part (`tokens/part-00000.safetensors` is 0)."""
    first_row: int = Field(ge=0)
    """Row of the batch's first sample within that part."""
    num_samples: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    """Real tokens, padding not counted."""
    padded_length: int = Field(ge=1)
    """Tokens that each sample is padded to."""


class ShardReady(Versioned):
    """One finished shard that waits in a spool for its upload."""

    schema_version: int = 1
    batch: BatchJob
    spool_id: SpoolId
    file_name: ShardName
    """A bare file name inside the spool."""
    num_bytes: int = Field(ge=1)
    data_offset: int = Field(ge=8)
    """Bytes before the first sample: the safetensors header with its length field."""
    checksum: Checksum
    """CRC64-NVME over the whole file."""
    execution: ExecutionId
    worker: str = Field(max_length=128)


class LedgerEntry(Versioned):
    """Which execution's shard is the batch's: first one in wins."""

    schema_version: int = 1
    batch_id: BatchId
    execution: ExecutionId
    key: str = Field(max_length=256)
    """Object key relative to the run's output location."""
    num_bytes: int = Field(ge=1)
    data_offset: int = Field(ge=8)
    checksum: Checksum
    num_samples: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
