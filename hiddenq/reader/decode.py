"""From the bytes of one sample to its tensors.

Invariant: the buffer's size is checked against the format before any view is made, so no view leaves the buffer; the
tensors share that one buffer and own it, so no file stays open behind them.

Shape legend: S tokens, K target layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hiddenq.contracts.errors import DamagedShard
from hiddenq.contracts.shard import ITEM_BYTES, SAFETENSORS_DTYPES, ShardFormat

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_BY_SAFETENSORS = {SAFETENSORS_DTYPES[name]: dtype for name, dtype in TORCH_DTYPES.items()} | {"I64": torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """A safetensors dtype as torch's.

    Raises:
        DamagedShard: no dtype that hiddenq writes.
    """
    try:
        return _BY_SAFETENSORS[name]
    except KeyError:
        raise DamagedShard(f"dtype {name[:20]!r} is none of {', '.join(_BY_SAFETENSORS)}") from None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample: tokens, mask and states, without padding."""

    sample_id: int
    input_ids: torch.Tensor
    """int64 [S]"""
    loss_mask: torch.Tensor
    """int64 [S]: 1 where the token is supervised; not shifted."""
    hidden_states: torch.Tensor | None
    """[S, K, H]: outputs of the target layers, in the order of `target_layer_ids`; None if no layer is stored."""
    final_hidden_state: torch.Tensor | None
    """[S, H]: the last decoder layer's output before the final norm; None if it is not stored."""

    def __len__(self) -> int:
        return len(self.input_ids)


def sample_tensors(buffer: torch.Tensor, shard_format: ShardFormat, sample_id: int) -> dict[str, torch.Tensor]:
    """Views of a sample's tensors, as stored, by name without the sample id.

    Args:
        buffer: uint8 [num_bytes], the sample's whole byte range.

    Raises:
        DamagedShard: the buffer is not a whole number of tokens.
    """
    num_tokens, rest = divmod(len(buffer), shard_format.bytes_per_token)
    if rest or not num_tokens:
        raise DamagedShard(f"sample {sample_id}: {len(buffer)} bytes are no whole tokens; run `hiddenq verify`")
    tensors = {}
    begin = 0
    for name, dtype, tail, width in shard_format.token_layout:
        part = buffer[begin : begin + num_tokens * width]
        if part.storage_offset() % ITEM_BYTES[dtype]:
            part = part.clone()  # fp8 scales of an odd count leave what follows off its alignment
        tensors[name] = part.view(torch_dtype(dtype)).view(num_tokens, *tail)
        begin += num_tokens * width
    return tensors


def decode_sample(
    buffer: torch.Tensor, shard_format: ShardFormat, sample_id: int, dtype: torch.dtype | None = None
) -> Sample:
    """A sample from its byte range, its states in `dtype` (None: as stored; fp8 comes out in the model's dtype).

    fp8 states are stored as `hidden / scale` with one float32 scale a token and layer, and are multiplied back here.
    """
    tensors = sample_tensors(buffer, shard_format, sample_id)
    hidden, final = tensors.get("hidden_states"), tensors.get("final_hidden_state")
    if hidden is not None and "hidden_states_scale" in tensors:
        wanted = dtype or TORCH_DTYPES[shard_format.model_dtype]
        hidden = (hidden.float() * tensors["hidden_states_scale"]).to(wanted)
    elif hidden is not None and dtype is not None:
        hidden = hidden.to(dtype)
    if final is not None and dtype is not None:
        final = final.to(dtype)
    return Sample(
        sample_id=sample_id,
        input_ids=tensors["input_ids"],
        loss_mask=tensors["loss_mask"],
        hidden_states=hidden,
        final_hidden_state=final,
    )
