"""Build global layouts from tensor shapes. Pure integer arithmetic: no process group is needed.

Every rank runs these functions on the same shapes and must get the same layout, so nothing here depends on
hash order, floats or the environment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from .chunk_packing import pack_chunks, round_up
from .errors import LayoutError, bad
from .layout import GlobalLayout, row_numel
from .placement import ShardLayout


def build_row_atomic_layout(
    shapes: Iterable[Sequence[int]],
    dp_size: int,
    *,
    block_size: int = 1,
    shard_layout: ShardLayout = ShardLayout.PADDED,
) -> GlobalLayout:
    """Build a layout in which no row (or run of `block_size` rows) is cut, padded or not.

    Args:
        shapes: tensor shapes, in tensor-id order.
        dp_size: number of ranks that share the buffer.
        block_size: number of consecutive rows kept on one rank; 1 for single rows.
        shard_layout: `ShardLayout.PADDED` for equal rank segments, `ShardLayout.UNPADDED` for no padding.

    Returns:
        What `build_for_row_atomic` or `build_for_row_atomic_unpadding` returns.

    Raises:
        LayoutError: an argument is not as described.

    >>> build_row_atomic_layout([(3, 2)], 2).rank_to_offset
    (0, 4, 8)
    >>> build_row_atomic_layout([(3, 2)], 2, shard_layout=ShardLayout.UNPADDED).rank_to_offset
    (0, 2, 6)
    """
    if shard_layout is ShardLayout.PADDED:
        return build_for_row_atomic(shapes, dp_size, block_size=block_size)
    if shard_layout is ShardLayout.UNPADDED:
        return build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size)
    raise LayoutError(
        bad(
            "shard_layout",
            repr(shard_layout),
            "a member of ShardLayout",
            "pass ShardLayout.PADDED or ShardLayout.UNPADDED",
        )
    )


def build_for_row_atomic(shapes: Iterable[Sequence[int]], dp_size: int, *, block_size: int = 1) -> GlobalLayout:
    """Build equal rank segments that never cut a row or block, padding where needed.

    The chunk is the least common multiple of all tensors' block sizes in elements, and segments are whole
    chunks. Tensors of a chunk or more start on a chunk boundary, or end on one in the last, partly used chunk
    of an earlier tensor; smaller ones fill what is left between those two, largest first, and then the tail.

    Args:
        shapes: tensor shapes, in tensor-id order.
        dp_size: number of ranks that share the buffer.
        block_size: number of consecutive rows kept on one rank. A tensor's last block may be short.

    Returns:
        A layout whose size is a multiple of ``chunk * dp_size``. Tensors without elements are at offset 0.

    Raises:
        LayoutError: an argument is not as described.

    >>> layout = build_for_row_atomic([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5)
    >>> layout.tensor_to_offset, layout.size
    ((0, 12, 32, 28, 48), 60)
    """
    tensor_shapes, numels = _check_shapes(shapes)
    dp_size, block_size = _check_positive("dp_size", dp_size), _check_positive("block_size", block_size)
    aligns = _alignments(tensor_shapes, block_size)
    chunk = _lcm(align for align, numel in zip(aligns, numels, strict=True) if numel)  # no elements: no constraint
    offsets, used = pack_chunks(numels, aligns, chunk)
    segment = round_up(used, chunk * dp_size) // dp_size
    boundaries = tuple(rank * segment for rank in range(dp_size + 1))
    return GlobalLayout(tensor_shapes, tuple(offsets), segment * dp_size, boundaries)


def build_for_row_atomic_unpadding(
    shapes: Iterable[Sequence[int]], dp_size: int, *, block_size: int = 1
) -> GlobalLayout:
    """Build rank segments without padding, each boundary at the row or block end nearest to the even split.

    Tensors lie back to back in tensor-id order. A boundary halfway between two allowed positions takes the
    lower one.

    Args:
        shapes: tensor shapes, in tensor-id order.
        dp_size: number of ranks that share the buffer.
        block_size: number of consecutive rows kept on one rank. A tensor's last block may be short.

    Returns:
        A layout whose size is the sum of the tensors' elements. Each segment differs from
        ``size / dp_size`` by at most one row or block, and may be empty.

    Raises:
        LayoutError: an argument is not as described.

    >>> build_for_row_atomic_unpadding([(2, 6), (4, 4), (1, 2)], 2).rank_to_offset
    (0, 16, 30)
    """
    tensor_shapes, numels = _check_shapes(shapes)
    dp_size, block_size = _check_positive("dp_size", dp_size), _check_positive("block_size", block_size)
    *offsets, size = accumulate(numels, initial=0)
    aligns = _alignments(tensor_shapes, block_size)

    def boundary(rank: int) -> int:
        # The last tensor that starts at or before the target has elements: those without share the start of
        # their successor, and the target is below the end of the buffer.
        target = rank * size // dp_size
        index = bisect_right(offsets, target) - 1
        start, align = offsets[index], aligns[index]
        below = start + (target - start) // align * align
        above = min(below + align, start + numels[index])
        # Distances to the exact split rank * size / dp_size, times dp_size to stay with integers.
        return below if rank * size - below * dp_size <= above * dp_size - rank * size else above

    # The nearest of a fixed set of positions, ties always down, cannot decrease as the target grows.
    inner = (boundary(rank) if size else 0 for rank in range(1, dp_size))
    return GlobalLayout(tensor_shapes, tuple(offsets), size, (0, *inner, size))


def build_for_tensor_atomic(
    shapes: Iterable[Sequence[int]], dp_size: int, *, tensor_owners: Iterable[int]
) -> GlobalLayout:
    """Build rank segments that hold exactly the tensors each rank owns, whole and without padding.

    Tensors are packed by ascending owner, and in tensor-id order within an owner.

    Args:
        shapes: tensor shapes, in tensor-id order.
        dp_size: number of ranks that share the buffer.
        tensor_owners: owner of each tensor, in tensor-id order.

    Returns:
        A layout whose size is the sum of the tensors' elements; segments are in general unequal.

    Raises:
        LayoutError: an argument is not as described.

    >>> layout = build_for_tensor_atomic([(4, 4), (2, 6), (1, 2)], 2, tensor_owners=(1, 0, 1))
    >>> layout.tensor_to_offset, layout.rank_to_offset
    ((12, 0, 28), (0, 12, 30))
    """
    tensor_shapes, numels = _check_shapes(shapes)
    dp_size = _check_positive("dp_size", dp_size)
    owners = _check_owners(tensor_owners, len(numels), dp_size)
    offsets = [0] * len(numels)
    held = [0] * dp_size
    position = 0
    for index in sorted(range(len(numels)), key=owners.__getitem__):  # stable: ids stay in order
        offsets[index] = position
        position += numels[index]
        held[owners[index]] += numels[index]
    return GlobalLayout(tensor_shapes, tuple(offsets), position, tuple(accumulate(held, initial=0)))


def _alignments(tensor_shapes: Iterable[torch.Size], block_size: int) -> list[int]:
    """Elements of one block of each tensor; 0 only for tensors without elements."""
    return [block_size * row_numel(shape) for shape in tensor_shapes]


def _lcm(values: Iterable[int]) -> int:
    """Least common multiple, 1 of nothing. By halves, or each value would pay for the growing result."""
    left = sorted(set(values))
    while len(left) > 1:
        left = [math.lcm(*left[i : i + 2]) for i in range(0, len(left), 2)]
    return left[0] if left else 1


def _check_positive(argument: str, value: int) -> int:
    if type(value) is not int or value <= 0:  # `type`, because True is an int and not a size
        what = {
            "dp_size": "number of ranks that share the buffer",
            "block_size": "number of rows to keep together",
        }
        raise LayoutError(bad(argument, repr(value), "a positive integer", f"pass the {what[argument]}"))
    return value


def _check_shapes(shapes: Iterable[Sequence[int]]) -> tuple[tuple[torch.Size, ...], list[int]]:
    """The shapes as `torch.Size`, and their numbers of elements."""
    checked: list[torch.Size] = []
    mend = "pass one shape a tensor, such as [p.shape for p in params]"
    try:
        items = list(shapes)
    except TypeError:
        raise LayoutError(bad("shapes", repr(shapes), "an iterable of shapes", mend)) from None
    for index, shape in enumerate(items):
        if not isinstance(shape, (tuple, list)) or not all(type(d) is int and d >= 0 for d in shape):
            expected = "a tuple of non-negative integers for every tensor"
            raise LayoutError(bad("shapes", f"{shape!r} for tensor {index}", expected, mend))
        checked.append(torch.Size(shape))
    return tuple(checked), [math.prod(shape) for shape in checked]


def _check_owners(tensor_owners: Iterable[int], num_tensors: int, dp_size: int) -> list[int]:
    mend = "pass one owner rank a tensor, in tensor-id order"
    try:
        owners = list(tensor_owners)
    except TypeError:
        expected = f"an iterable of {num_tensors} ranks"
        raise LayoutError(bad("tensor_owners", repr(tensor_owners), expected, mend)) from None
    if len(owners) != num_tensors:
        expected = f"{num_tensors}, as many as `shapes`"
        raise LayoutError(bad("tensor_owners", f"{len(owners)} owners", expected, mend))
    for index, owner in enumerate(owners):
        if type(owner) is not int or not 0 <= owner < dp_size:
            got, expected = f"{owner!r} for tensor {index}", f"an integer in [0, dp_size={dp_size})"
            raise LayoutError(bad("tensor_owners", got, expected, mend))
    return owners
