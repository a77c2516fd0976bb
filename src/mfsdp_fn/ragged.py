"""Uneven segments on the wire, for backends that take them as they are.

NCCL's list collectives read and write views of a flat buffer: nothing is padded and nothing copied. (A list of uneven
tensors becomes one group of broadcasts or reduces, each from or to the rank that holds the segment.) Gloo has no such
thing, and Dynamo refuses lists, so there every segment is padded to the widest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def takes_lists(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether lists of uneven tensors on `device` are served by `group`. The same answer on all its ranks.

    Not in debug mode DETAIL, whose check that ranks agree takes shapes that differ for a fault.
    """
    # Public and documented, but torch.distributed imports them without an `__all__`.
    level = dist.get_debug_level()  # pyright: ignore[reportPrivateImportUsage]
    if device.type != "cuda" or level == dist.DebugLevel.DETAIL:  # pyright: ignore[reportPrivateImportUsage]
        return False
    return is_nccl(group)


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether `group` serves CUDA tensors by NCCL."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return backends.get("cuda") == "nccl"


def gather(local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Launch an all-gather of 1-D segments of `sizes[rank]` elements; gives the whole buffer, to be waited for.

    The work refers to the tensors until it is waited for, and waiting makes the current stream wait.
    """
    flat = local.new_empty(sum(sizes))
    work = dist.all_gather(list(flat.split(list(sizes))), local, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    return flat, work


def reduce_scatter(
    full: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work]:
    """Launch a sum reduce-scatter of a 1-D buffer; gives this rank's segment, to be waited for.

    `full` is only read.
    """
    segment = full.new_empty(sizes[rank])
    work = dist.reduce_scatter(segment, list(full.split(list(sizes))), group=group, async_op=True)
    assert work is not None
    return segment, work


def with_padding(flat: torch.Tensor, sizes: Sequence[int], widest: int) -> torch.Tensor:
    """The segments of `flat`, of `sizes` elements, each padded with zeros to `widest`."""
    padded = flat.new_zeros(widest * len(sizes))
    start = 0
    for rank, size in enumerate(sizes):
        padded.narrow(0, rank * widest, size).copy_(flat.narrow(0, start, size))
        start += size
    return padded


def without_padding(padded: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The first `sizes` elements of segments that were padded to the widest, joined."""
    widest = max(sizes)
    return torch.cat([padded.narrow(0, rank * widest, size) for rank, size in enumerate(sizes)])
