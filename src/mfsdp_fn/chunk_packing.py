"""The padded rule: where tensors go in equal chunks so that little is left empty. Integers and their structures."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def pack_chunks(numels: Sequence[int], aligns: Sequence[int], chunk: int) -> tuple[list[int], int]:
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
        end = round_up(gap_start, chunk)
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
        start = round_up(start, self.align)
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
                self._offsets[index] = round_up(start, lane.align)
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
                self._offsets[index] = round_up(end, self._aligns[index])
                end = self._offsets[index] + self._numels[index]
        return end


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple
