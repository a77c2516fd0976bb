"""A denser padded packing than the chunk rule's: search for the smallest segment that cuts no block. Integers only.

The chunk rule (`chunk_packing`) makes segments whole multiples of the least common multiple of all blocks. That is
more than is needed. What is needed is that each rank boundary that falls inside a tensor is a whole number of blocks
from the tensor's start. A tensor that only one boundary cuts can be placed for that; only a tensor so long that two
boundaries fall inside it wherever it lies ties the segment to its block. So segments must be multiples of the blocks
of the longest tensors (more than about two segments), and of nothing else.

For one segment size tensors are placed one after the other. Where the next one would be cut, the tensor is chosen
that leaves the smallest gap before it, and tensors smaller than the largest block are kept back to fill such gaps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from .chunk_packing import round_up

_TRIES = 8  # segment sizes tried on the way up, and
_REFINEMENTS = 8  # on the way back down, until
_CLOSE = 8192  # what could still be gained is no more than this part of it
_CHOICES = 64  # kinds of tensors that may be cut by a boundary, and
_PAIRS = 16  # that may be put before the one that is cut: bounds the time where all tensors differ

Kind = tuple[int, int]  # elements of a tensor, and of one of its blocks


def pack_segments(
    numels: tuple[int, ...], aligns: tuple[int, ...], ranks: int, unit: int, limit: int
) -> tuple[tuple[int, ...], int] | None:
    """Place tensors so that equal segments of less than `limit` elements cut no block.

    Args:
        numels: elements of each tensor, in the order in which they are placed where all else is equal.
        aligns: elements of one block of each; the last block of a tensor may be short.
        ranks: number of segments.
        unit: segments, and tensors of at least this many elements, start on multiples of it (a tensor that a
            boundary cuts does so if its block is a multiple).
        limit: sizes from here on are not wanted.

    Returns:
        The offset of each tensor (0 for those without elements) and the size of a segment, a multiple of `unit`; None
        if the search finds none below `limit`.

    >>> pack_segments((10, 14), (5, 7), 2, 1, 35)  # rows of 5 and 7; the chunk rule needs 35 a rank
    ((0, 14), 14)
    """
    kinds = {(numel, align) for numel, align in zip(numels, aligns, strict=True) if numel}
    if not kinds:
        return None
    least = max(-(-sum(numels) // ranks), *(min(kind) for kind in kinds))
    sizes = _Sizes(kinds, least, unit, limit)
    best: tuple[tuple[int, ...], int] | None = None
    size = failed = sizes.at_least(least)
    step = 1
    for _ in range(_TRIES):
        if size >= limit:
            return None
        offsets, end = _place(numels, aligns, size, unit)
        if end <= size * ranks:
            best = (tuple(offsets), size)
            break
        step = max(2 * step, -(-end // ranks) - size)  # another size has other gaps: what was lacking may not do
        failed, size = size, sizes.at_least(size + step)
    if best is None:
        return None
    for _ in range(_REFINEMENTS):  # the last step up may have been too long
        size = sizes.at_least((failed + best[1]) // 2)
        if not failed < size < best[1] or (best[1] - failed) * _CLOSE <= best[1]:
            break
        offsets, end = _place(numels, aligns, size, unit)
        if end <= size * ranks:
            best = (tuple(offsets), size)
        else:
            failed = size
    return best


class _Sizes:
    """The segment sizes for which every tensor has some place."""

    def __init__(self, kinds: Iterable[Kind], least: int, unit: int, limit: int) -> None:
        self._long = sorted(kind for kind in kinds if kind[0] > least)
        self._unit, self._limit = unit, limit

    def at_least(self, size: int) -> int:
        """The smallest that is not below `size`; anything from the limit on if there is none below it."""
        while size < self._limit:
            step, freed = self._unit, self._limit
            for numel, align in self._long:
                if numel <= size + size // align * align:
                    continue  # one boundary cuts it at most, if it begins in a fresh segment
                if step < self._limit:
                    step = math.lcm(step, align)
                blocks = (numel - align) // (2 * align) + 1
                freed = min(freed, max(blocks * align, numel - blocks * align))
            wanted = round_up(size, step)
            if wanted == size or wanted < freed:
                return wanted
            size = freed  # from there on some tensor no longer counts
        return size


class _Queue:
    """Tensors to be placed: in order, or the next one of a kind."""

    def __init__(self, ids: Sequence[int], numels: Sequence[int], aligns: Sequence[int]) -> None:
        self._ids, self._numels, self._aligns = ids, numels, aligns
        self._placed: set[int] = set()
        self._next = 0
        self.kinds: dict[Kind, list[int]] = {}
        for index in reversed(ids):
            self.kinds.setdefault((numels[index], aligns[index]), []).append(index)
        # Kinds come in the order of their first tensors.
        self.kinds = dict(reversed(self.kinds.items()))

    def head(self) -> Kind | None:
        """The kind of the next tensor in order; None at the end."""
        while self._next < len(self._ids) and self._ids[self._next] in self._placed:
            self._next += 1
        if self._next == len(self._ids):
            return None
        index = self._ids[self._next]
        return self._numels[index], self._aligns[index]

    def take(self, kind: Kind) -> int:
        """Remove the first tensor of a kind."""
        index = self.kinds[kind].pop()
        if not self.kinds[kind]:
            del self.kinds[kind]
        self._placed.add(index)
        return index


class _Fragments:
    """Tensors kept back to fill gaps, largest first."""

    def __init__(self, ids: Iterable[int], numels: Sequence[int]) -> None:
        self._ids = sorted(ids, key=lambda index: -numels[index])  # stable: equal ones stay in order
        self._sizes = [-numels[index] for index in self._ids]

    def fill(self, start: int, stop: int, unit: int) -> Iterator[tuple[int, int]]:
        """(tensor, offset) of what goes into [start, stop)."""
        position = 0
        while start < stop:
            position = bisect_left(self._sizes, start - stop, position)
            if position == len(self._ids):
                return
            numel = -self._sizes[position]
            offset = round_up(start, unit) if numel >= unit else start
            if offset + numel > stop:
                position += 1
                continue
            yield self._ids[position], offset
            start = offset + numel
            del self._ids[position], self._sizes[position]

    def rest(self) -> list[int]:
        """What has not been placed, in id order."""
        return sorted(self._ids)


def _place(numels: Sequence[int], aligns: Sequence[int], size: int, unit: int) -> tuple[list[int], int]:
    """Offsets for segments of `size`, and the end of the last tensor."""
    offsets = [0] * len(numels)
    present = [index for index, numel in enumerate(numels) if numel]
    gap = max((aligns[index] for index in present if aligns[index] < numels[index]), default=0)
    fragments = _Fragments((index for index in present if numels[index] < gap), numels)
    end = _fill(_Queue([i for i in present if numels[i] >= gap], numels, aligns), fragments, offsets, 0, size, unit)
    rest = _Queue(fragments.rest(), numels, aligns)
    return offsets, _fill(rest, _Fragments((), numels), offsets, end, size, unit)


def _fill(queue: _Queue, fragments: _Fragments, offsets: list[int], end: int, size: int, unit: int) -> int:
    """Place a queue from `end` on; return the end of its last tensor."""
    while (head := queue.head()) is not None:
        start = round_up(end, unit) if head[0] >= unit else end
        room = size - start % size
        if head[0] <= room:
            offsets[queue.take(head)] = start
            end = start + head[0]
            continue
        gap, kind, fits = _choose(queue.kinds, room, size, unit)
        if kind is None or not fits:
            # What rounding up left behind counts too, unless it ends the segment: a fragment would straddle.
            for index, offset in fragments.fill(end if start % size else start, start + gap, unit):
                offsets[index] = offset
            start += gap
        end = start
        if kind is not None:
            offsets[queue.take(kind)] = start
            end += kind[0]
    return end


def _choose(kinds: dict[Kind, list[int]], room: int, size: int, unit: int) -> tuple[int, Kind | None, bool]:
    """What comes next where the next tensor in order would be cut: (gap before it, kind, whether it is not cut).

    A tensor that fits is chosen if what can be cut after it leaves a smaller gap. No kind: nothing can go here, and
    the gap is the rest of the segment.
    """
    best: tuple[int, Kind | None, bool] = (room, None, False)
    for kind in islice(kinds, _CHOICES):
        if kind[0] > room:
            gap = _gap(kind, room, size)
            if gap is not None and (gap < best[0] or best[1] is None):
                best = (gap, kind, False)
                if not gap:
                    return best
    near = list(islice(kinds, _PAIRS))
    for kind in near:
        left = room - round_up(kind[0], unit)
        if kind[0] > room:
            continue
        gaps = [max(left, 0), *(_gap(other, left, size) for other in near if other[0] > left > 0)]
        least = min(gap for gap in gaps if gap is not None)
        if least < best[0]:
            best = (least, kind, True)
    return best


def _gap(kind: Kind, room: int, size: int) -> int | None:
    """What must be left empty so that a boundary after `room` elements cuts a tensor between blocks."""
    numel, align = kind
    before = room // align * align
    if size % align and numel - before > size:
        return None  # the next boundary would cut a block
    return room - before
