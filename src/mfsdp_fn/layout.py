"""Where every tensor of a group and every rank's segment lie in one flat buffer: integers only."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch

from .checks import is_integer, shown
from .errors import LayoutError, bad
from .ranges import Range


def row_numel(shape: Sequence[int]) -> int:
    """Number of elements of one row (a slice along dim 0); the row of a 0-D tensor is its one element.

    Args:
        shape: shape of the tensor.

    Returns:
        The product of ``shape[1:]``.

    >>> row_numel((4, 3, 2)), row_numel((7,)), row_numel(())
    (6, 1, 1)
    """
    return math.prod(shape[1:])


@dataclasses.dataclass(frozen=True)
class GlobalLayout:
    """One flat buffer: where each tensor starts in it, and which segment of it each rank holds.

    Layouts come from the builders in `layout_builder`; the constructor itself checks nothing
    (`validate_row_atomic` does). Tensors are named by their index in `tensor_shapes`.

    Args:
        tensor_shapes: shape of each tensor.
        tensor_to_offset: first element of each tensor in the buffer.
        size: number of elements of the buffer, padding included.
        rank_to_offset: ``dp_size + 1`` ascending offsets; rank ``r`` holds from entry ``r`` to ``r + 1``.
        leading_dims: for each tensor, how many leading dims count its rows; () for 1 each. With 2, a row of an
            (E, a, b) tensor is of b elements, and a rank's part of it is a (rows, b) tensor.

    >>> layout = GlobalLayout((torch.Size([3, 4]), torch.Size([2])), (0, 12), 16, (0, 8, 16))
    >>> layout.rank_range(1), layout.tensor_range(1)
    (Range(start=8, stop=16), Range(start=12, stop=14))
    >>> layout.local_shape(0, 1), layout.padding(1)
    (torch.Size([1, 4]), (Range(start=14, stop=16),))
    """

    tensor_shapes: tuple[torch.Size, ...]
    tensor_to_offset: tuple[int, ...]
    size: int
    rank_to_offset: tuple[int, ...]
    leading_dims: tuple[int, ...] = ()

    @property
    def dp_size(self) -> int:
        """Number of ranks that share the buffer."""
        return len(self.rank_to_offset) - 1

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all rank segments have one size."""
        pairs = zip(self.rank_to_offset, self.rank_to_offset[1:], strict=False)
        return len({stop - start for start, stop in pairs}) <= 1

    @functools.cached_property
    def _in_buffer_order(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Indices, starts and stops of the tensors with elements, by ascending offset (so they bisect)."""
        spans = sorted(
            (offset, offset + math.prod(shape), index)
            for index, (offset, shape) in enumerate(zip(self.tensor_to_offset, self.tensor_shapes, strict=True))
            if 0 not in shape
        )
        return tuple(s[2] for s in spans), tuple(s[0] for s in spans), tuple(s[1] for s in spans)

    def rank_range(self, rank: int) -> Range:
        """The segment of the buffer that a rank holds.

        Args:
            rank: the rank, from 0 to ``dp_size - 1``.

        Returns:
            Its segment, in buffer coordinates.

        Raises:
            LayoutError: there is no such rank.
        """
        if not is_integer(rank) or not 0 <= rank < self.dp_size:
            raise LayoutError(
                bad(
                    "rank",
                    shown(rank),
                    f"a rank of this layout, 0 <= rank < {self.dp_size}",
                    "pass the rank inside the mesh axis that the layout is for, not the global rank",
                )
            )
        return Range(self.rank_to_offset[rank], self.rank_to_offset[rank + 1])

    def tensor_range(self, index: int) -> Range:
        """The elements of the buffer that a tensor takes.

        Args:
            index: index of the tensor in `tensor_shapes`.

        Returns:
            Its interval, in buffer coordinates; empty for a tensor without elements.

        Raises:
            LayoutError: there is no such tensor.
        """
        if not is_integer(index) or not 0 <= index < len(self.tensor_shapes):
            raise LayoutError(
                bad(
                    "index",
                    shown(index),
                    f"a tensor of this layout, 0 <= index < {len(self.tensor_shapes)}",
                    "pass the tensor's position in the shapes that the layout was built from",
                )
            )
        start = self.tensor_to_offset[index]
        return Range(start, start + math.prod(self.tensor_shapes[index]))

    def row_shape(self, index: int) -> torch.Size:
        """The shape of one row of a tensor; that of a 0-D tensor is its own.

        Args:
            index: index of the tensor.

        >>> GlobalLayout((torch.Size([2, 3, 4]),), (0,), 24, (0, 12, 24), (2,)).row_shape(0)
        torch.Size([4])
        """
        return self.tensor_shapes[index][self.leading_dims[index] if self.leading_dims else 1 :]

    def local_range(self, index: int, rank: int) -> Range:
        """The elements of a tensor that a rank holds, in buffer coordinates.

        Args:
            index: index of the tensor.
            rank: the rank.

        Returns:
            The intersection of the tensor and the rank's segment; empty when they are disjoint.

        Raises:
            LayoutError: there is no such tensor or rank.
        """
        return self.tensor_range(index).intersect(self.rank_range(rank))

    def local_shape(self, index: int, rank: int) -> torch.Size:
        """The shape of a rank's part of a tensor: the number of rows held, then `row_shape`.

        A 0-D tensor is ``Size([])`` on the rank that holds it and ``Size([0])`` elsewhere. A tensor without
        elements is held by nobody: dim 0 becomes 0 on every rank, for a ``(3, 0)`` tensor too, so that the
        parts have no rows that all ranks would claim at once.

        Args:
            index: index of the tensor.
            rank: the rank.

        Returns:
            The local shape. Means something only when no boundary cuts a row.

        Raises:
            LayoutError: there is no such tensor or rank.

        >>> layout = GlobalLayout((torch.Size([]), torch.Size([3, 0])), (0, 1), 1, (0, 1, 1))
        >>> [layout.local_shape(0, rank) for rank in (0, 1)], layout.local_shape(1, 0)
        ([torch.Size([]), torch.Size([0])], torch.Size([0, 0]))
        """
        held = self.local_range(index, rank).size
        shape = self.tensor_shapes[index]
        if not shape:
            return shape if held else torch.Size((0,))
        row = self.row_shape(index)
        return torch.Size((held // row.numel() if held else 0, *row))

    def ranks_of(self, index: int) -> range:
        """The ranks that hold elements of a tensor, in O(log dp_size).

        The first and the last rank hold at least one element each. A rank between them holds none only if its
        whole segment is empty, as when rows are fewer than ranks in a layout without padding.

        Args:
            index: index of the tensor.

        Returns:
            The ranks; an empty range for a tensor without elements.

        Raises:
            LayoutError: there is no such tensor.

        >>> GlobalLayout((torch.Size([3, 4]),), (0,), 12, (0, 4, 12, 12)).ranks_of(0)
        range(0, 2)
        """
        span = self.tensor_range(index)
        if not span.size:
            return range(0)
        first = bisect_right(self.rank_to_offset, span.start) - 1
        return range(first, bisect_left(self.rank_to_offset, span.stop))

    def local_tensors(self, rank: int) -> tuple[int, ...]:
        """The tensors of which a rank holds elements.

        Args:
            rank: the rank.

        Returns:
            Their indices, in the order in which they lie in the buffer.

        Raises:
            LayoutError: there is no such rank.

        >>> GlobalLayout((torch.Size([4]), torch.Size([2])), (2, 0), 6, (0, 3, 6)).local_tensors(0)
        (1, 0)
        """
        segment = self.rank_range(rank)
        if not segment.size:
            return ()
        indices, starts, stops = self._in_buffer_order
        return indices[bisect_right(stops, segment.start) : bisect_left(starts, segment.stop)]

    def padding(self, rank: int) -> tuple[Range, ...]:
        """The parts of a rank's segment that belong to no tensor.

        Args:
            rank: the rank.

        Returns:
            Non-empty ranges in buffer coordinates, ascending.

        Raises:
            LayoutError: there is no such rank.

        >>> GlobalLayout((torch.Size([2]), torch.Size([2])), (0, 4), 8, (0, 8)).padding(0)
        (Range(start=2, stop=4), Range(start=6, stop=8))
        """
        segment = self.rank_range(rank)
        gaps = []
        position = segment.start
        for index in self.local_tensors(rank):
            span = self.tensor_range(index)
            if span.start > position:
                gaps.append(Range(position, span.start))
            position = span.stop
        if position < segment.stop:
            gaps.append(Range(position, segment.stop))
        return tuple(gaps)

    def coarsen(self, k: int) -> GlobalLayout:
        """Merge each `k` consecutive rank segments into one; tensors stay where they are.

        Args:
            k: how many segments become one; a divisor of `dp_size`.

        Returns:
            A layout of the same buffer over ``dp_size // k`` ranks.

        Raises:
            LayoutError: `k` is not a positive divisor of `dp_size`.

        >>> GlobalLayout((torch.Size([8]),), (0,), 8, (0, 2, 4, 6, 8)).coarsen(2).rank_to_offset
        (0, 4, 8)
        """
        if type(k) is not int or k <= 0 or self.dp_size % k:
            raise LayoutError(
                bad(
                    "k",
                    repr(k),
                    f"a positive integer that divides the layout's {self.dp_size} ranks",
                    "pass the size of the mesh axis whose ranks' segments are to be merged",
                )
            )
        return dataclasses.replace(self, rank_to_offset=self.rank_to_offset[::k])


def validate_row_atomic(layout: GlobalLayout, block_size: int = 1) -> None:
    """Check that tensors and rank segments fit together and that no rank boundary cuts a row or block.

    Args:
        layout: the layout to check.
        block_size: number of consecutive rows, from each tensor's first, that must stay on one rank.

    Raises:
        LayoutError: segments don't tile the buffer, tensors overlap or leave it, or a boundary cuts a block.

    >>> validate_row_atomic(GlobalLayout((torch.Size([2, 4]),), (0,), 8, (0, 4, 8)))
    >>> validate_row_atomic(GlobalLayout((torch.Size([2, 4]),), (0,), 8, (0, 3, 8)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    mfsdp_fn.errors.LayoutError: `layout` got a rank boundary at 3, inside a row of tensor 0 at [0, 8); ...
    """
    if type(block_size) is not int or block_size <= 0:
        raise LayoutError(bad("block_size", repr(block_size), "a positive integer", "pass 1 for single rows"))

    def problem(got: str, expected: str) -> LayoutError:
        return LayoutError(bad("layout", got, expected, "make layouts with the functions of layout_builder"))

    shapes, offsets, ranks = layout.tensor_shapes, layout.tensor_to_offset, layout.rank_to_offset
    if len(offsets) != len(shapes):
        raise problem(f"{len(offsets)} offsets for {len(shapes)} tensors", "one offset a tensor")
    if len(ranks) < 2 or ranks[0] != 0 or ranks[-1] != layout.size or list(ranks) != sorted(ranks):
        raise problem(
            f"rank_to_offset with {len(ranks)} entries that don't tile the buffer",
            f"ascending offsets, one more than ranks, from 0 to the size {layout.size}",
        )
    for index, (offset, shape) in enumerate(zip(offsets, shapes, strict=True)):
        stop = offset + math.prod(shape)
        if offset < 0 or stop > layout.size:
            raise problem(f"tensor {index} at [{offset}, {stop})", f"every tensor inside [0, {layout.size})")

    indices, starts, stops = layout._in_buffer_order
    for k in range(1, len(indices)):
        if stops[k - 1] > starts[k]:
            both = f"tensors {indices[k - 1]} and {indices[k]}, both with element {starts[k]}"
            raise problem(both, "tensors that don't overlap")
    what = "row" if block_size == 1 else f"block of {block_size} rows"
    for boundary in ranks[1:-1]:
        k = bisect_right(starts, boundary) - 1
        if k < 0 or boundary >= stops[k]:
            continue
        if (boundary - starts[k]) % (block_size * layout.row_shape(indices[k]).numel()):
            tensor = f"tensor {indices[k]} at [{starts[k]}, {stops[k]})"
            raise problem(
                f"a rank boundary at {boundary}, inside a {what} of {tensor}",
                f"boundaries that don't cut a {what}",
            )
