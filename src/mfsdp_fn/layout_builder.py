"""Build global layouts from tensor shapes. Pure integer arithmetic: no process group is needed.

Every rank runs these functions on the same shapes and must get the same layout, so nothing here depends on
hash order, floats or the environment.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

import torch

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
    offsets, used = _pack_chunks(numels, aligns, chunk)
    segment = _round_up(used, chunk * dp_size) // dp_size
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


def _pack_chunks(numels: Sequence[int], aligns: Sequence[int], chunk: int) -> tuple[list[int], int]:
    """Place tensors by the padded rule; return their offsets and the end of the last one."""
    offsets = [0] * len(numels)
    regular = [i for i, numel in enumerate(numels) if numel >= chunk]  # a chunk is at least one element
    fragments = _Fragments([i for i, numel in enumerate(numels) if 0 < numel < chunk], numels, aligns, offsets)
    # A tensor with a short last block must start on a chunk boundary: moved back by its remainder it would be
    # cut inside a block. `chunk` marks what can't be a conjugate; no remainder is as large.
    remainders = [numels[i] % chunk for i in regular]
    conjugates = _FirstAtMost(
        [r if r and r % aligns[i] == 0 else chunk for i, r in zip(regular, remainders, strict=True)], chunk
    )
    placed = bytearray(len(regular))
    end = 0
    for queued, index in enumerate(regular):
        if placed[queued]:
            continue
        conjugates.remove(queued)
        offsets[index] = end
        gap_start = end + numels[index]
        end = _round_up(gap_start, chunk)
        if gap_start == end:
            continue
        gap_stop = end
        partner = conjugates.find(chunk - remainders[queued])  # all before `queued` are removed already
        if partner is not None:
            conjugates.remove(partner)
            placed[partner] = True
            gap_stop = end - remainders[partner]
            offsets[regular[partner]] = gap_stop
            end += numels[regular[partner]] // chunk * chunk
        fragments.fill(gap_start, gap_stop, chunk)
    return offsets, fragments.append(end)


class _FirstAtMost:
    """A list of values that finds the first one not above a limit and removes any, each in O(log n)."""

    def __init__(self, values: Sequence[int], removed: int) -> None:
        self._removed = removed
        self._leaves = 1 << max(len(values) - 1, 0).bit_length()
        tree = [removed] * (2 * self._leaves)
        tree[self._leaves : self._leaves + len(values)] = values
        for node in range(self._leaves - 1, 0, -1):
            tree[node] = min(tree[2 * node], tree[2 * node + 1])
        self._tree = tree  # node n has children 2n and 2n + 1 and holds the smaller of their values

    def find(self, limit: int) -> int | None:
        """Position of the first value <= limit (a limit below the mark of removed ones), or None."""
        tree, node = self._tree, 1
        if tree[node] > limit:
            return None
        while node < self._leaves:
            node *= 2
            if tree[node] > limit:
                node += 1
        return node - self._leaves

    def remove(self, position: int) -> None:
        """Make the value at a position unfindable."""
        tree, node = self._tree, position + self._leaves
        tree[node] = self._removed
        while node > 1:
            node //= 2
            smaller = min(tree[2 * node], tree[2 * node + 1])
            if tree[node] == smaller:
                return
            tree[node] = smaller


class _Lane:
    """The fragments of one alignment, in the order in which they are tried (descending numel, then id)."""

    def __init__(self, align: int) -> None:
        self.align = align
        self.places: list[int] = []  # position of each in the order over all lanes
        self.sizes: list[int] = []  # minus numel, so that it ascends and bisects
        self.next: list[int] = []  # union-find towards the first unplaced one at or after a position
        self.last = -1

    def add(self, place: int, numel: int) -> None:
        self.last += 1
        self.places.append(place)
        self.sizes.append(-numel)
        self.next.append(self.last)

    def first(self, start: int, stop: int) -> int:
        """Position of the first unplaced fragment that fits in [start, stop), past `last` if none does."""
        start = _round_up(start, self.align)
        if start >= stop:
            return self.last + 1
        found, follow = bisect_left(self.sizes, start - stop), self.next
        while found <= self.last and follow[found] != found:
            # Halving the path keeps later searches short; the entry past the end stands for "none".
            if follow[found] <= self.last:
                follow[found] = follow[follow[found]]
            found = follow[found]
        return found

    def take(self, position: int) -> None:
        self.next[position] = position + 1
        while self.last >= 0 and self.next[self.last] != self.last:
            self.last -= 1


class _Fragments:
    """Tensors smaller than a chunk: they fill gaps, and what fits in none goes to the tail.

    A gap's rule is "try every fragment once, largest first". The free part of a gap only shrinks, so one that
    failed stays failed, and the next to be placed is simply the first that fits now. Among fragments of one
    alignment that is a bisection; there are few alignments (all divide the chunk), and a heap merges them.
    """

    def __init__(self, ids: Sequence[int], numels: Sequence[int], aligns: Sequence[int], offsets: list[int]) -> None:
        self._order = sorted(ids, key=lambda i: -numels[i])  # stable: ties stay in id order
        self._numels, self._aligns, self._offsets = numels, aligns, offsets
        lanes: dict[int, _Lane] = {}
        for place, i in enumerate(self._order):
            if aligns[i] not in lanes:
                lanes[aligns[i]] = _Lane(aligns[i])
            lanes[aligns[i]].add(place, numels[i])
        self._lanes = list(lanes.values())
        self._placed = bytearray(len(self._order))
        self._barren: dict[int, int] = {}

    def fill(self, start: int, stop: int, chunk: int) -> None:
        """Place what fits in [start, stop), which lies inside one chunk."""
        # All alignments divide the chunk, so a gap at the same place in its chunk, and no longer, than one
        # that nothing fitted in is as hopeless: fragments only get fewer.
        if stop - start <= self._barren.get(start % chunk, 0):
            return
        heap: list[tuple[int, int, _Lane]] = []
        for lane in self._lanes:
            # The smallest one left rules out most lanes without a search.
            if lane.last >= 0 and -lane.sizes[lane.last] <= stop - start:
                found = lane.first(start, stop)
                if found <= lane.last:
                    heap.append((lane.places[found], found, lane))
        heapify(heap)
        while heap:
            place, candidate, lane = heappop(heap)
            found = lane.first(start, stop)  # the gap may have shrunk since the candidate was found
            if found == candidate:
                index = self._order[place]
                self._offsets[index] = _round_up(start, lane.align)
                start = self._offsets[index] + self._numels[index]
                self._placed[place] = True
                lane.take(found)
                found = lane.first(start, stop)
            if found <= lane.last:
                heappush(heap, (lane.places[found], found, lane))
        self._barren[start % chunk] = max(stop - start, self._barren.get(start % chunk, 0))

    def append(self, end: int) -> int:
        """Place all that are left from `end` on; return the end of the last one."""
        for place, index in enumerate(self._order):
            if not self._placed[place]:
                self._offsets[index] = _round_up(end, self._aligns[index])
                end = self._offsets[index] + self._numels[index]
        return end


def _alignments(tensor_shapes: Iterable[torch.Size], block_size: int) -> list[int]:
    """Elements of one block of each tensor; 0 only for tensors without elements."""
    return [block_size * row_numel(shape) for shape in tensor_shapes]


def _lcm(values: Iterable[int]) -> int:
    """Least common multiple, 1 of nothing. By halves, or each value would pay for the growing result."""
    left = sorted(set(values))
    while len(left) > 1:
        left = [math.lcm(*left[i : i + 2]) for i in range(0, len(left), 2)]
    return left[0] if left else 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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
