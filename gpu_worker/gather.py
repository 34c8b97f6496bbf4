"""From a layer's padded output to its place in the shard: real tokens only, no copy beside the one that moves them.

Invariant: the payload on the device is, byte for byte, what the file holds after its header; every real token of every
stored layer is written exactly once, converted to the storage dtype, and looked at for NaN and Inf on the way. On a GPU
that is one kernel launch a layer, made by the layer's hook, so no layer's output outlives the next layer.

Shape legend: B rows, S padded tokens, K target layers, H hidden size, C stored columns (K layers, final state).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenq.contracts.errors import HiddenqError
from hiddenq.contracts.shard import ShardFormat

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
FP8_MIN_SCALE = 2.0**-126
"""Smallest normal float32: keeps an all-zero token from dividing by zero."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One stored layer (or the final state): where a token's H values go within its sample's bytes."""

    name: str
    """For people: `layer 31`, `final_hidden_state`."""
    dtype: torch.dtype
    prefix_bytes: int
    """Bytes a token of the tensors that stand before this one."""
    stride_bytes: int
    """Bytes from one token to the next."""
    offset_bytes: int
    """Bytes of this layer's values within the token's."""
    scale_prefix_bytes: int = -1
    """Like `prefix_bytes`, of the fp8 scales; -1: none."""
    scale_stride_bytes: int = 0
    scale_offset_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The rows' places in one payload, on the payload's device."""

    payload: Tensor
    """uint8 [num_bytes]"""
    lengths_B: Tensor
    """int32 [B], real tokens a row."""
    begins_B: Tensor
    """int64 [B], byte at which a row's sample begins."""
    nonfinite_CB: Tensor
    """int32 [C, B], not 0 where a stored value is NaN or Inf."""
    bytes_per_token: int
    host_lengths: tuple[int, ...]
    """The lengths again, on the host."""
    host_begins: tuple[int, ...]

    def rows(self, first: int, last: int) -> Destination:
        """The places of some of the rows."""
        return Destination(
            payload=self.payload,
            lengths_B=self.lengths_B[first:last],
            begins_B=self.begins_B[first:last],
            nonfinite_CB=self.nonfinite_CB[:, first:last],
            bytes_per_token=self.bytes_per_token,
            host_lengths=self.host_lengths[first:last],
            host_begins=self.host_begins[first:last],
        )


def columns_of(shard_format: ShardFormat) -> tuple[Column, ...]:
    """The stored columns: target layers in the order asked, then the final state."""
    prefixes, position = {}, 0
    for name, dtype, _, size in shard_format.token_layout:
        prefixes[name] = (position, size, dtype)
        position += size
    columns = []
    layers = len(shard_format.target_layer_ids)
    for place, layer in enumerate(shard_format.target_layer_ids):
        prefix, size, dtype = prefixes["hidden_states"]
        scale = prefixes.get("hidden_states_scale", (-1, 0, ""))
        columns.append(
            Column(
                name=f"layer {layer}",
                dtype=TORCH_DTYPES[dtype],
                prefix_bytes=prefix,
                stride_bytes=size,
                offset_bytes=place * (size // layers),
                scale_prefix_bytes=scale[0],
                scale_stride_bytes=scale[1],
                scale_offset_bytes=place * 4,
            )
        )
    if shard_format.final_hidden_state:
        prefix, size, dtype = prefixes["final_hidden_state"]
        columns.append(
            Column(
                name="final_hidden_state",
                dtype=TORCH_DTYPES[dtype],
                prefix_bytes=prefix,
                stride_bytes=size,
                offset_bytes=0,
            )
        )
    return tuple(columns)


def quantize_fp8(states_NH: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token fp8: float8_e4m3fn [N, H], float32 scales [N, 1]; states ≈ values x scale, within 1/16 of a row's max.

    The scale is the row's largest magnitude over 448, the largest e4m3fn value.
    """
    wide = states_NH.float()
    scale_N1 = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(FP8_MIN_SCALE)
    return (wide / scale_N1).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_N1


def store_states(column: Column, index: int, states_BSH: Tensor, destination: Destination) -> None:
    """Put a layer's real tokens at their places."""
    if destination.payload.device.type == "cuda":
        from gpu_worker.gather_triton import store_states_cuda

        store_states_cuda(column, index, states_BSH, destination)
        return
    for row, (length, begin) in enumerate(zip(destination.host_lengths, destination.host_begins, strict=True)):
        states_SH = states_BSH[row, :length]
        if column.scale_prefix_bytes >= 0:
            stored_SH, scale_S1 = quantize_fp8(states_SH)
            first = begin + length * column.scale_prefix_bytes
            scales = _rows(destination.payload, first, length, column.scale_stride_bytes, torch.float32)
            scales[:, column.scale_offset_bytes // 4] = scale_S1[:, 0]
            finite = states_SH.isfinite().all()
        else:
            stored_SH = states_SH.to(column.dtype)
            finite = stored_SH.isfinite().all()
        first = begin + length * column.prefix_bytes
        place = _rows(destination.payload, first, length, column.stride_bytes, column.dtype)
        start = column.offset_bytes // column.dtype.itemsize
        place[:, start : start + states_SH.shape[1]] = stored_SH
        destination.nonfinite_CB[index, row] = int(not finite)


def store_tokens(input_ids_BS: Tensor, loss_mask_BS: Tensor, destination: Destination) -> None:
    """Put the real tokens' `input_ids` and `loss_mask`, both int64, behind their states."""
    prefix = destination.bytes_per_token - 16
    if destination.payload.device.type == "cuda":
        from gpu_worker.gather_triton import store_tokens_cuda

        store_tokens_cuda(input_ids_BS, loss_mask_BS, prefix, destination)
        return
    for row, (length, begin) in enumerate(zip(destination.host_lengths, destination.host_begins, strict=True)):
        first = begin + length * prefix
        for values_BS in (input_ids_BS, loss_mask_BS):
            place = destination.payload[first : first + length * 8]
            place.copy_(values_BS[row, :length].to(torch.int64).view(torch.uint8))
            first += length * 8


def load_states(
    columns: tuple[Column, ...], payload: Tensor, begin: int, length: int, hidden_size: int
) -> list[tuple[str, Tensor]]:
    """Read one sample's columns back out of a payload, as float32 [S, H]."""
    loaded = []
    for column in columns:
        place = _rows(payload, begin + length * column.prefix_bytes, length, column.stride_bytes, column.dtype)
        start = column.offset_bytes // column.dtype.itemsize
        values_SH = place[:, start : start + hidden_size].float()
        if column.scale_prefix_bytes >= 0:
            first = begin + length * column.scale_prefix_bytes
            scales = _rows(payload, first, length, column.scale_stride_bytes, torch.float32)
            values_SH = values_SH * scales[:, column.scale_offset_bytes // 4, None]
        loaded.append((column.name, values_SH))
    return loaded


def name_nonfinite(columns: tuple[Column, ...], nonfinite_CB: Tensor, describe: Callable[[int], str]) -> str | None:
    """Say which rows and layers hold NaN or Inf; None if none does. `describe` names a row's sample."""
    places = nonfinite_CB.nonzero().tolist()
    if not places:
        return None
    index, row = min(places, key=lambda place: (place[1], place[0]))
    more = f" (and {len(places) - 1} more places)" if len(places) > 1 else ""
    return f"NaN or Inf in {columns[index].name} of {describe(row)}{more}"


class WrongStates(HiddenqError):
    """A layer gave something else than one [B, S, H] stream: our fault or the model's, never stored."""


def _rows(payload: Tensor, first: int, length: int, stride_bytes: int, dtype: torch.dtype) -> Tensor:
    return payload[first : first + length * stride_bytes].view(dtype).view(length, stride_bytes // dtype.itemsize)
