"""Who computes what: costs, the greedy rule, and its refinement. Integers and floats only; no process group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .checks import as_number, check_function, check_mapping, is_integer, shown
from .errors import PlanError, bad
from .layout import GlobalLayout

CostFn = Callable[[torch.Size], float]

_MAX_EJECTIONS = 64  # targets tried for each cost
_MAX_ROUNDS = 4096  # of refinement; each strictly evens out two loads, so this only bounds the time


def select_ge_2d_params(param: torch.Tensor) -> bool:
    """Whether a tensor has two dimensions or more: the default choice of what is owned.

    Args:
        param: the tensor; a meta tensor will do.

    >>> select_ge_2d_params(torch.empty(2, 3)), select_ge_2d_params(torch.empty(3))
    (True, False)
    """
    if not isinstance(param, torch.Tensor):
        raise PlanError(bad("param", shown(param), "a tensor", "a meta tensor of its shape will do"))
    return param.ndim >= 2


def ns_cost_fn(num_ns_steps: int) -> Callable[[torch.Size], int]:
    """A cost function: Newton-Schulz work from a tensor's full shape, in relative units.

    The tensor is seen as a matrix ``(shape[0], shape[1:].numel())``. A step is three products of
    ``numel * min(rows, cols)`` each; normalisation and elementwise work add a term linear in the elements.

    Args:
        num_ns_steps: iterations a matrix.

    Returns:
        ``shape -> numel * (min(rows, cols) * num_ns_steps + 1)``.

    Raises:
        PlanError: `num_ns_steps` is not a positive integer.

    Source: `owner_planning` of Megatron-FSDP v2.

    >>> ns_cost_fn(5)(torch.Size([4, 3, 2]))
    504
    """
    if not is_integer(num_ns_steps) or num_ns_steps < 1:
        raise PlanError(bad("num_ns_steps", shown(num_ns_steps), "a positive integer", "Muon's own default is 5"))

    def cost(shape: torch.Size) -> int:
        if not isinstance(shape, (tuple, list)) or not all(is_integer(n) and n >= 0 for n in shape):
            raise PlanError(bad("shape", shown(shape), "a tensor's shape", "write torch.Size((4, 3))"))
        rows, cols = (shape[0] if shape else 1), math.prod(shape[1:])
        return rows * cols * (min(rows, cols) * num_ns_steps + 1)

    return cost


@dataclasses.dataclass(frozen=True)
class OwnerWork:
    """A tensor's cost, and the ranks that hold part of it, in buffer order."""

    tensor_index: int
    cost: float
    candidates: tuple[int, ...]


def holders(layout: GlobalLayout, index: int) -> tuple[int, ...]:
    """The layout's ranks that hold elements of a tensor, ascending (inside its range some may hold nothing)."""
    return tuple(rank for rank in layout.ranks_of(index) if layout.local_range(index, rank).size)


def works_of(
    layout: GlobalLayout, ranks: Sequence[int], tensor_indices: Iterable[int], cost_fn: CostFn | None
) -> list[OwnerWork]:
    """The work of each participating tensor with elements, in buffer order; `ranks` name the layout's ranks.

    Raises:
        PlanError: a cost that isn't a positive number.
    """
    cost_fn = checked_cost_fn(cost_fn)
    works = []
    for index in sorted(set(tensor_indices), key=lambda i: (layout.tensor_range(i).start, i)):
        candidates = tuple(ranks[rank] for rank in holders(layout, index))
        if not candidates:  # without elements nobody holds it, and there is nothing to compute
            continue
        works.append(OwnerWork(index, cost_fn(layout.tensor_shapes[index]), candidates))
    return works


def checked_cost_fn(cost_fn: Any) -> CostFn:
    """`cost_fn`, or Newton-Schulz with five iterations for None, as a function whose costs are positive numbers.

    Raises:
        PlanError: not a function; and by the function, a cost that isn't a positive number.
    """
    if cost_fn is None:
        return ns_cost_fn(5)
    check_function("cost_fn", cost_fn, "lambda shape: shape.numel()", PlanError)

    def cost(shape: torch.Size) -> float:
        found = cost_fn(shape)
        if not 0 < (number := as_number(found)) < math.inf:
            raise PlanError(
                bad(
                    "cost_fn",
                    f"{shown(found)} for shape {tuple(shape)}",
                    "a positive number",
                    "return a cost of at least 1, or leave the tensor out with `eligible_fn`",
                )
            )
        return number

    return cost


def checked_loads(loads: Any) -> dict[int, float]:
    """A copy of `initial_loads`; of None an empty dict.

    Raises:
        PlanError: not loads by rank.
    """
    if loads is None:
        return {}
    expected, fix = "loads by global rank", "pass what owner_loads returned, or {0: 1000.0}"
    check_mapping("initial_loads", loads, expected, fix, PlanError)
    for rank, load in loads.items():
        if not is_integer(rank) or rank < 0 or not 0 <= as_number(load) < math.inf:
            raise PlanError(
                bad("initial_loads", f"{shown(load)} for rank {shown(rank)}", f"{expected}, finite and >= 0", fix)
            )
    return dict(loads)


def greedy(works: Sequence[OwnerWork], loads: dict[int, float]) -> dict[int, int]:
    """Owners by the seed's rule; adds to `loads`.

    Tensors with a single holder first, then the others in descending cost, each to its least-loaded holder. Ties
    follow buffer order, among tensors and among holders.
    """
    single = [work for work in works if len(work.candidates) == 1]
    several = sorted((work for work in works if len(work.candidates) > 1), key=lambda work: -work.cost)
    owners = {}
    for work in (*single, *several):
        owner = min(work.candidates, key=lambda rank: loads.get(rank, 0))
        owners[work.tensor_index] = owner
        loads[owner] = loads.get(owner, 0) + work.cost
    return dict(sorted(owners.items()))


def refine(works: Sequence[OwnerWork], owners: Sequence[int], loads: Mapping[int, float]) -> list[int]:
    """Better owners of the same tasks: moves work from loaded ranks along chains of holders.

    Greedy choices made group by group are final, and layers that look alike crowd the same holders. A chain
    ``r0 -> r1 -> ... -> rk`` moves one task of equal cost at each step, so only the loads of its ends change. Where
    the far end would then be too full, what it can give away in turn is tried too. Source: augmenting paths and
    ejection chains, as in matching and scheduling.

    Args:
        works: all tasks, of all groups; `tensor_index` is not read.
        owners: owner of each task.
        loads: load of each rank.

    Returns:
        The owner of each task; the largest load is never larger than before.

    >>> works = [OwnerWork(0, 2.0, (0, 1)), OwnerWork(1, 2.0, (0,)), OwnerWork(2, 1.0, (1, 2))]
    >>> refine(works, [0, 0, 1], {0: 4.0, 1: 1.0, 2: 0.0})
    [1, 0, 2]
    """
    board = _Board(works, list(owners), dict(loads))
    for _ in range(_MAX_ROUNDS):
        # Not the largest alone: what makes room on a smaller one lets the next round move more.
        if not any(board.relieve(rank) for rank in sorted(board.loads, key=lambda rank: -board.loads[rank])):
            peak = max(board.loads, key=lambda rank: board.loads[rank], default=None)
            if peak is None or not board.eject(peak, board.loads[peak], _MAX_EJECTIONS):
                break
    return board.owners


Chains = dict[int, tuple[int, int]]


class _Board:
    """Tasks by owner and cost; every change is a chain of moves that can be taken back."""

    def __init__(self, works: Sequence[OwnerWork], owners: list[int], loads: dict[int, float]) -> None:
        self.works, self.owners, self.loads = works, owners, loads
        self.owned: dict[int, dict[float, list[int]]] = {}
        for number, (work, owner) in enumerate(zip(works, owners, strict=True)):
            self.loads.setdefault(owner, 0)
            for rank in work.candidates:
                self.loads.setdefault(rank, 0)
            if len(work.candidates) > 1:
                self.owned.setdefault(owner, {}).setdefault(work.cost, []).append(number)

    def costs(self, rank: int) -> list[float]:
        """The distinct costs of the movable tasks of a rank, largest first."""
        return sorted((cost for cost, tasks in self.owned.get(rank, {}).items() if tasks), reverse=True)

    def chains(self, source: int, cost: float) -> Chains:
        """Ranks that a task of `cost` can be shifted to from `source`: rank -> (rank before it, task)."""
        came_from: Chains = {source: (source, -1)}
        frontier = [source]
        while frontier:
            following = []
            for rank in frontier:
                seen: set[tuple[int, ...]] = set()  # layers that look alike have the same holders
                for number in self.owned.get(rank, {}).get(cost, ()):
                    candidates = self.works[number].candidates
                    if candidates in seen:
                        continue
                    seen.add(candidates)
                    for other in candidates:
                        if other not in came_from:
                            came_from[other] = (rank, number)
                            following.append(other)
            frontier = following
        del came_from[source]
        return came_from

    def shift(self, target: int, source: int, came_from: Chains) -> list[tuple[int, int, int]]:
        """Move along a chain; returns the moves (task, from, to)."""
        moves, rank = [], target
        while rank != source:
            before, number = came_from[rank]
            moves.append((number, before, rank))
            rank = before
        for move in moves:
            self._move(*move)
        return moves

    def take_back(self, moves: list[tuple[int, int, int]]) -> None:
        for number, before, rank in reversed(moves):
            self._move(number, rank, before)

    def _move(self, number: int, before: int, after: int) -> None:
        cost = self.works[number].cost
        self.owned[before][cost].remove(number)
        self.owned.setdefault(after, {}).setdefault(cost, []).append(number)
        self.owners[number] = after
        self.loads[before] -= cost
        self.loads[after] += cost

    def relieve(self, source: int, ceiling: float | None = None) -> list[tuple[int, int, int]]:
        """Shift one task off `source` if both ends stay below its load (or below `ceiling`); the best such chain."""
        load = self.loads[source]
        limit = load if ceiling is None else ceiling
        best, chain = (limit, 0.0, source), None
        for cost in self.costs(source):
            found = self.chains(source, cost)
            for rank in found:
                after = max(self.loads[rank] + cost, load - cost if ceiling is None else 0)
                if (after, -cost, rank) < best and after < limit:
                    best, chain = (after, -cost, rank), found
        return [] if chain is None else self.shift(best[2], source, chain)

    def eject(self, source: int, ceiling: float, tries: int) -> bool:
        """Shift a task off `source` to a rank that becomes too full, and from there whatever brings all below."""
        for cost in self.costs(source):
            found = self.chains(source, cost)
            for target in sorted(found, key=lambda rank: (self.loads[rank], rank))[:tries]:
                moves = self.shift(target, source, found)
                while self.loads[target] >= ceiling:
                    more = self.relieve(target, ceiling)
                    # Back where it came from: no gain.
                    if not more:
                        break
                    moves += more
                if self.loads[target] < ceiling and self.loads[source] < ceiling:
                    return True
                self.take_back(moves)
        return False
