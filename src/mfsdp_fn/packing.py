"""Packing gradients as one operation of a graph: ``torch.ops.mfsdp_fn.pack``.

A compiler sees through a concatenation: it lets each part's producer write into the packed buffer, which then lives
from the first of them on; for the root, whose norm comes first in backward and whose embedding last, through all of
it. This is opaque: the buffer lives from here to its reduction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import collectives


@torch.library.custom_op("mfsdp_fn::pack", mutates_args=())
def pack(
    parts: Sequence[torch.Tensor], offsets: Sequence[int], gaps: Sequence[int], size: int, dtype: torch.dtype
) -> torch.Tensor:
    """A flat buffer of `size` elements with each part, cast, at its offset.

    `gaps` are the offset and length, in turn, of what no part covers; zero there.
    """
    flat = parts[0].new_empty(size, dtype=dtype)
    for offset, length in zip(gaps[::2], gaps[1::2], strict=True):
        flat.narrow(0, offset, length).zero_()
    views = [flat.narrow(0, at, part.numel()).view(part.shape) for at, part in zip(offsets, parts, strict=True)]
    collectives.copy_many(views, parts)
    return flat


@pack.register_fake
def _(
    parts: Sequence[torch.Tensor], offsets: Sequence[int], gaps: Sequence[int], size: int, dtype: torch.dtype
) -> torch.Tensor:
    return parts[0].new_empty(size, dtype=dtype)


# What it is in a graph.
OPERATION = torch.ops.mfsdp_fn.pack.default


@torch.library.custom_op("mfsdp_fn::pack_products", mutates_args=())
def pack_products(
    parts: Sequence[torch.Tensor],
    offsets: Sequence[int],
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    product_offsets: Sequence[int],
    rows: Sequence[torch.Tensor],
    row_numbers: Sequence[torch.Tensor],
    table_offsets: Sequence[int],
    table_rows: Sequence[int],
    gaps: Sequence[int],
    size: int,
    dtype: torch.dtype,
    scale: float,
) -> torch.Tensor:
    """As `pack`, with some parts given by what they are computed from, which is written where it belongs.

    Matrix products are given as two factors, gradients of embedding tables as the rows that are added up and their
    numbers. Both are summed in the buffer's dtype: a product of bf16 or fp16 factors in an fp32 buffer is not rounded
    in between. All is multiplied by `scale`, a power of two, which rounds nothing.
    """
    flat = (*lefts, *rows)[0].new_empty(size, dtype=dtype)
    for offset, length in zip(gaps[::2], gaps[1::2], strict=True):
        flat.narrow(0, offset, length).zero_()
    for left, right, at in zip(lefts, rights, product_offsets, strict=True):
        shape = left.shape[0], right.shape[1]
        view = flat.narrow(0, at, math.prod(shape)).view(shape)
        if left.dtype == dtype:  # a beta of 0: what the buffer held before is not read
            torch.addmm(view, left, right, beta=0, alpha=scale, out=view)
        else:
            torch.addmm(view, left, right, out_dtype=dtype, beta=0, alpha=scale, out=view)
    for some, numbers, at, length in zip(rows, row_numbers, table_offsets, table_rows, strict=True):
        width = some.shape[-1]
        table = flat.narrow(0, at, length * width).view(length, width).zero_()
        table.index_add_(0, numbers.reshape(-1), some.reshape(numbers.numel(), width).to(dtype), alpha=scale)
    views = [flat.narrow(0, at, part.numel()).view(part.shape) for at, part in zip(offsets, parts, strict=True)]
    if scale == 1.0:
        collectives.copy_many(views, parts)
    else:
        for view, part in zip(views, parts, strict=True):
            torch.mul(part, scale, out=view)
    return flat


@pack_products.register_fake
def _(
    parts: Sequence[torch.Tensor],
    offsets: Sequence[int],
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    product_offsets: Sequence[int],
    rows: Sequence[torch.Tensor],
    row_numbers: Sequence[torch.Tensor],
    table_offsets: Sequence[int],
    table_rows: Sequence[int],
    gaps: Sequence[int],
    size: int,
    dtype: torch.dtype,
    scale: float,
) -> torch.Tensor:
    return (*lefts, *rows)[0].new_empty(size, dtype=dtype)


PRODUCTS_OPERATION = torch.ops.mfsdp_fn.pack_products.default
