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
