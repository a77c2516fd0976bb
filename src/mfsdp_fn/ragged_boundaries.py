"""Rank boundaries of layouts without padding, moved to 16 bytes where a row or block ends nearby. Integers only."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right

from .layout import GlobalLayout

_SHARE = 64  # a boundary moves by at most this part of an even segment


def on_aligned_boundaries(layout: GlobalLayout, block_size: int, unit: int) -> GlobalLayout:
    """A layout without padding whose rank boundaries are multiples of `unit` where that makes segments little longer.

    A boundary goes to the multiple nearest to the even split among the row or block ends of the tensor that the
    split falls in, if that is nearer than 1/64 of an even segment to where it was; others stay.

    Args:
        layout: from `build_for_row_atomic_unpadding`.
        block_size: rows that are never cut apart.
        unit: what boundaries should be a multiple of.

    >>> from mfsdp_fn import build_for_row_atomic_unpadding
    >>> layout = build_for_row_atomic_unpadding([(1001, 3)], 2)
    >>> layout.rank_to_offset, on_aligned_boundaries(layout, 1, 4).rank_to_offset
    ((0, 1500, 3003), (0, 1500, 3003))
    >>> on_aligned_boundaries(layout, 1, 8).rank_to_offset
    (0, 1512, 3003)
    """
    ranks, size = layout.dp_size, layout.size
    spans = sorted(
        (offset, index) for index, offset in enumerate(layout.tensor_to_offset) if 0 not in layout.tensor_shapes[index]
    )
    starts = [start for start, _ in spans]
    moved = [0]
    for rank in range(1, ranks):
        was = layout.rank_to_offset[rank]
        if was % unit and size:
            start, index = spans[bisect_right(starts, rank * size // ranks) - 1]
            block = block_size * layout.row_shape(index).numel()
            aligned = _nearest(start, start + layout.tensor_shapes[index].numel(), block, unit, rank * size, ranks)
            if aligned is not None and abs(aligned - was) * ranks * _SHARE <= size:
                was = aligned
        moved.append(max(was, moved[-1]))
    return dataclasses.replace(layout, rank_to_offset=(*moved, size))


def _nearest(start: int, stop: int, block: int, unit: int, split: int, ranks: int) -> int | None:
    """The multiple of `unit` nearest to ``split / ranks`` among a tensor's start, stop and block ends."""
    common = math.gcd(block, unit)
    ends = [end for end in (start, stop) if end % unit == 0]
    if start % common == 0:
        # start + k * block is a multiple of unit for one k in each `period`.
        period = unit // common
        first = -(start // common) * pow(block // common, -1, period) % period if period > 1 else 0
        step, origin = period * block, start + first * block
        below = origin + (split // ranks - origin) // step * step
        ends += [end for end in (below, below + step) if start <= end <= stop]
    return min(sorted(ends), key=lambda end: abs(end * ranks - split), default=None)
