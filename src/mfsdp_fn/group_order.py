"""In which order `plan` lays out the tensors of a group."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from .layout_choice import ALIGNMENT
from .precision import GroupDtypes
from .spec import LeafSpec

K = TypeVar("K", bound=Hashable)


def aligned_order(numbers: Sequence[int], leaves: Sequence[LeafSpec], dtypes: GroupDtypes) -> list[int]:
    """Tensors that keep the next one on a 16-byte boundary first, odd-sized ones last, otherwise in order."""
    return sorted(numbers, key=lambda number: not _keeps_alignment(leaves[number], dtypes))


def turns_of(members: Mapping[K, Sequence[int]], leaves: Sequence[LeafSpec]) -> dict[K, tuple[int, int]]:
    """(turn, turns) of each group: its place among those with the same shapes, and how many there are."""
    alike: dict[tuple[Hashable, ...], list[K]] = {}
    for key, numbers in members.items():
        kinds = ((leaves[n].shape, leaves[n].dtype, leaves[n].requires_grad, leaves[n].leading_dims) for n in numbers)
        alike.setdefault(tuple(kinds), []).append(key)
    return {key: (turn, len(keys)) for keys in alike.values() for turn, key in enumerate(keys)}


def rotated_order(
    ordered: Sequence[int], leaves: Sequence[LeafSpec], dtypes: GroupDtypes, turn: int, turns: int
) -> list[int]:
    """The same with the matrices rotated, by `turn` of `turns` parts of their elements as near as can be.

    Layers that look alike would put the same matrix on the same ranks, so that its owners could only be few: some
    ranks would own all the small matrices and others none. Laid out in turn, each matrix visits all ranks. Only
    matrices that keep the next tensor aligned change places, and only among themselves.

    >>> import torch
    >>> leaves = [LeafSpec(str(i), torch.Size([rows, 4]), torch.float32, True, "") for i, rows in enumerate((1, 4, 3))]
    >>> dtypes = GroupDtypes(*[torch.float32] * 4)
    >>> [rotated_order([0, 1, 2], leaves, dtypes, turn, 3) for turn in range(3)]
    [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    """
    places = [
        place
        for place, number in enumerate(ordered)
        if len(leaves[number].shape) > 1 and _keeps_alignment(leaves[number], dtypes)
    ]
    ends = [0, *accumulate(leaves[ordered[place]].shape.numel() for place in places)]
    first = min(range(len(ends)), key=lambda index: (abs(ends[index] * turns - turn * ends[-1]), index))
    order = list(ordered)
    for place, other in zip(places, [*places[first:], *places[:first]], strict=True):
        order[place] = ordered[other]
    return order


def _keeps_alignment(leaf: LeafSpec, dtypes: GroupDtypes) -> bool:
    return leaf.shape.numel() * min(dtypes.compute.itemsize, dtypes.main.itemsize) % ALIGNMENT == 0
