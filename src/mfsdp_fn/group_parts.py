"""The groups that tensors of one kind make: in which order, and whether parted by row size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .layout import GlobalLayout
from .layout_choice import THRESHOLD, LayoutChoice
from .row_rules import split_by_rows
from .spec import LeafSpec

Part = tuple[str, list[int], GlobalLayout, LayoutChoice]


def group_parts(
    orders: Sequence[list[int]],
    leaves: Sequence[LeafSpec],
    choose: Callable[[Sequence[int]], tuple[GlobalLayout, LayoutChoice]],
    *,
    split: bool,
) -> list[Part]:
    """Lay leaves out in the first of some orders that costs no more padding than the last; perhaps in several groups.

    Args:
        orders: of leaf numbers, the preferred one first, the plain one last.
        leaves: all leaves.
        choose: the layout of some leaves, in order.
        split: whether to part them by row size where that saves padding and there is more than 1/32 of it.

    Returns:
        For each group what is added to its name, its leaves, its layout, and why it is that one.
    """
    tried = [(order, *choose(order)) for order in orders]
    least = tried[-1][2].padding
    order, layout, choice = next(one for one in tried if one[2].padding <= least)
    whole: list[Part] = [("", order, layout, choice)]
    numels = {number: leaves[number].shape.numel() for number in order}
    # Every group adds collectives: that is worth it only where padding is more than little.
    if not split or choice.padding <= THRESHOLD * sum(numels.values()):
        return whole
    rows = {number: leaves[number].shape[leaves[number].leading_dims :].numel() for number in order}
    parts: list[Part] = [
        (f" rows of {size}", numbers, *choose(numbers)) for size, numbers in split_by_rows(order, rows, numels)
    ]
    return parts if sum(part[3].padding for part in parts) < choice.padding else whole
