"""The gather on a GPU: one Triton program a token copies its row, converts it, and flags NaN and Inf.

Invariant: a program reads one row of a layer once and writes it once; padded tokens return at their first comparison;
every offset is a multiple of `ALIGN` elements, which the host proves, so loads and stores are as wide as they can be.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from gpu_worker.gather import Column, Destination

_MAX_ALIGN_BYTES = 16


# Triton compiles a kernel once for numbers and addresses that are multiples of 16, and again for others. What changes
# from batch to batch is exempt, so that no batch waits for the compiler.
_FROM_BATCH_TO_BATCH = ["lengths", "begins", "nonfinite"]


@triton.jit(do_not_specialize_on_alignment=_FROM_BATCH_TO_BATCH)
def _store_states_kernel(
    states, out, scales, lengths, begins, nonfinite,
    hidden, states_stride_row, states_stride_token,
    prefix, stride, offset, scale_prefix, scale_stride, scale_offset,
    ITEM: tl.constexpr, ALIGN: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(lengths + row)
    if token < length:
        begin = tl.load(begins + row)
        columns = tl.arange(0, BLOCK)
        inside = columns < hidden
        source = states + row.to(tl.int64) * states_stride_row + token.to(tl.int64) * states_stride_token
        values = tl.load(source + columns, mask=inside, other=0.0)
        place = (begin + length.to(tl.int64) * prefix + token.to(tl.int64) * stride + offset) // ITEM
        place = tl.multiple_of(place, ALIGN)
        if FP8:
            wide = values.to(tl.float32)
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide)), 448.0), 1.1754943508222875e-38)
            bad = tl.sum((wide != wide).to(tl.int32)) + tl.sum((tl.abs(wide) == float("inf")).to(tl.int32))
            stored = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -448.0), 448.0).to(out.dtype.element_ty)
            where = (begin + length.to(tl.int64) * scale_prefix + token.to(tl.int64) * scale_stride + scale_offset) // 4
            tl.store(scales + where, scale)
        else:
            stored = values.to(out.dtype.element_ty)
            check = stored.to(tl.float32)
            bad = tl.sum((check != check).to(tl.int32)) + tl.sum((tl.abs(check) == float("inf")).to(tl.int32))
        tl.store(out + place + columns, stored, mask=inside)
        if bad > 0:
            tl.store(nonfinite + row, 1)


@triton.jit(do_not_specialize=["ids_stride", "mask_stride"], do_not_specialize_on_alignment=_FROM_BATCH_TO_BATCH[:2])
def _store_tokens_kernel(
    ids, mask, out, lengths, begins, prefix, ids_stride, mask_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    real = tokens < length
    # int64 values as pairs of int32 words: with fp8 scales a sample may begin at 4 mod 8.
    first = (tl.load(begins + row) + length.to(tl.int64) * prefix) // 4
    values = tl.load(ids + row * ids_stride + tokens, mask=real, other=0).to(tl.int32)
    flags = tl.load(mask + row * mask_stride + tokens, mask=real, other=0).to(tl.int32)
    zeros = tl.zeros([BLOCK], dtype=tl.int32)
    tl.store(out + first + tokens * 2, values, mask=real)
    tl.store(out + first + tokens * 2 + 1, zeros, mask=real)
    second = first + length * 2
    tl.store(out + second + tokens * 2, flags, mask=real)
    tl.store(out + second + tokens * 2 + 1, zeros, mask=real)


def store_states_cuda(column: Column, index: int, states_BSH: Tensor, destination: Destination) -> None:
    """`gather.store_states` in one launch."""
    num_rows, num_tokens, hidden = states_BSH.shape
    if states_BSH.stride(-1) != 1:
        states_BSH = states_BSH.contiguous()
    item = column.dtype.itemsize
    fp8 = column.scale_prefix_bytes >= 0
    common = math.gcd(
        _MAX_ALIGN_BYTES, destination.bytes_per_token, column.prefix_bytes, column.stride_bytes, column.offset_bytes
    )
    block = triton.next_power_of_2(hidden)
    _launch(
        _store_states_kernel,
        (num_tokens, num_rows),
        states_BSH,
        destination.payload.view(column.dtype),
        destination.payload[: destination.payload.numel() // 4 * 4].view(torch.float32) if fp8 else destination.payload,
        destination.lengths_B,
        destination.begins_B,
        destination.nonfinite_CB[index],
        hidden,
        states_BSH.stride(0),
        states_BSH.stride(1),
        column.prefix_bytes,
        column.stride_bytes,
        column.offset_bytes,
        column.scale_prefix_bytes,
        column.scale_stride_bytes,
        column.scale_offset_bytes,
        ITEM=item,
        ALIGN=max(1, common // item),
        FP8=fp8,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )


def store_tokens_cuda(input_ids_BS: Tensor, loss_mask_BS: Tensor, prefix: int, destination: Destination) -> None:
    """`gather.store_tokens` in one launch."""
    num_rows, num_tokens = input_ids_BS.shape
    block = 256
    _launch(
        _store_tokens_kernel,
        (triton.cdiv(num_tokens, block), num_rows),
        input_ids_BS,
        loss_mask_BS,
        destination.payload.view(torch.int32),
        destination.lengths_B,
        destination.begins_B,
        prefix,
        input_ids_BS.stride(0),
        loss_mask_BS.stride(0),
        BLOCK=block,
    )


def _launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants)


@triton.jit(do_not_specialize=["num_rows"])
def _l2norm_kernel(x, y, rstd, eps, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    place = rows[:, None] * width + columns[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(values * values, 1) + eps)
    tl.store(rstd + rows, inverse, mask=rows < num_rows)
    tl.store(y + place, (values * inverse[:, None]).to(y.dtype.element_ty), mask=inside)


def l2norm_cuda(x: Tensor, eps: float, output_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """x / sqrt(sum(x²) + eps) over the last axis, and the inverse root."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    out = torch.empty_like(flat, dtype=output_dtype or x.dtype)
    rstd = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    rows = max(1, 4096 // block)
    _launch(
        _l2norm_kernel, (triton.cdiv(flat.shape[0], rows), 1), flat, out, rstd, eps, flat.shape[0], width,
        ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out.view(x.shape), rstd.view(x.shape[:-1])
