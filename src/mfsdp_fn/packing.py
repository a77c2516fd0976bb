"""Packing gradients as one operation of a graph: ``torch.ops.mfsdp_fn.pack``.

A compiler sees through a concatenation: it lets each part's producer write into the packed buffer, which then lives
from the first of them on; for the root, whose norm comes first in backward and whose embedding last, through all of
it. This is opaque: the buffer lives from here to its reduction.
"""

from __future__ import annotations

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
    gaps: Sequence[int],
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `pack`, with some parts given as two factors: the matrix products are written where they belong.

    A product of bf16 or fp16 factors in an fp32 buffer is not rounded in between where the device has such a product.
    """
    flat = lefts[0].new_empty(size, dtype=dtype)
    for offset, length in zip(gaps[::2], gaps[1::2], strict=True):
        flat.narrow(0, offset, length).zero_()
    for left, right, at in zip(lefts, rights, product_offsets, strict=True):
        rows, columns = left.shape[0], right.shape[1]
        view = flat.narrow(0, at, rows * columns).view(rows, columns)
        if left.dtype == dtype:
            torch.mm(left, right, out=view)
        elif left.is_cuda and dtype == torch.float32:
            torch.mm(left, right, out_dtype=dtype, out=view)
        else:
            view.copy_(torch.mm(left, right))
    views = [flat.narrow(0, at, part.numel()).view(part.shape) for at, part in zip(offsets, parts, strict=True)]
    collectives.copy_many(views, parts)
    return flat


@pack_products.register_fake
def _(
    parts: Sequence[torch.Tensor],
    offsets: Sequence[int],
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    product_offsets: Sequence[int],
    gaps: Sequence[int],
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return lefts[0].new_empty(size, dtype=dtype)


PRODUCTS_OPERATION = torch.ops.mfsdp_fn.pack_products.default
