"""Intervals of elements of a flat buffer."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The half-open interval ``[start, stop)`` of elements of a global buffer.

    >>> Range(4, 10).intersect(Range(8, 20))
    Range(start=8, stop=10)
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements in the interval."""
        return self.stop - self.start

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        # With `__len__` alone an empty range would be falsy, and `if r:` on a `Range | None` would mix up
        # "holds nothing" and "absent". Ask for `size`.
        return True

    def intersect(self, other: Range) -> Range:
        """The elements in both intervals.

        Args:
            other: the other interval.

        Returns:
            The common interval; when there is none, an empty one (``start == stop``) at the later start.

        >>> Range(0, 4).intersect(Range(6, 8))
        Range(start=6, stop=6)
        """
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))
