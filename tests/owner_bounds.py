"""A lower bound on the largest load of any assignment to holders, found without assigning anything."""

from __future__ import annotations

from collections.abc import Sequence

Task = tuple[float, int, int]  # cost, first holder, last holder (holders are neighbours)


def lower_bound(tasks: Sequence[Task], ranks: int) -> float:
    """The smallest largest load that mean, largest task and forced tasks don't exclude.

    Tasks are forced onto an interval of ranks if all their holders lie in it, or if the tasks of one cost that lie in
    a wider interval don't fit on the rest of it: a rank whose load is at most T holds at most T // cost of them.
    """
    costs = sorted({cost for cost, _, _ in tasks}, reverse=True)
    spans = [(a, b) for a in range(ranks) for b in range(ranks, a, -1)]
    inside = {c: {(a, b): 0 for a, b in spans} for c in costs}
    for cost, first, last in tasks:
        for a in range(first + 1):
            for b in range(last + 1, ranks + 1):
                inside[cost][a, b] += 1

    def excluded(load: float) -> bool:
        forced = dict.fromkeys(spans, 0.0)
        for cost in costs:
            room = int(load // cost)
            most: dict[tuple[int, int], int] = {}
            for a, b in spans:  # wider intervals come first
                wider = [most[w] for w in ((a - 1, b), (a, b + 1)) if w in most]
                most[a, b] = max([inside[cost][a, b] - (b - a) * room, *wider])
                forced[a, b] += cost * max(0, most[a, b] + (b - a) * room)
            if most[0, ranks] > 0:
                return True
        return any(total > (b - a) * load * (1 + 1e-12) for (a, b), total in forced.items())

    low = max(sum(cost for cost, _, _ in tasks) / ranks, costs[0])
    if not excluded(low):
        return low
    high = 2 * low
    while excluded(high):
        high *= 2
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if excluded(middle) else (low, middle)
    return low
