"""Who owns which tensor of a TensorAtomic plan: from `plan`'s `owners` to shards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from .communicators import Axis
from .errors import PlanError, bad
from .placement import Placements, TensorAtomic, sharded_axes
from .spec import LeafSpec


def shards_of_owners(
    owners: Mapping[str, int] | None,
    leaves: Sequence[LeafSpec],
    tied_to: Sequence[int],
    places: Mapping[str, tuple[Sequence[Axis], Placements]],
) -> dict[int, int]:
    """The shard that each tensor's owner holds, by the number of the tensor's first leaf.

    Args:
        owners: owner by path, as given to `plan`.
        leaves: the plan's leaves.
        tied_to: for each leaf, the number of the first leaf that is the same tensor.
        places: by unit, its mesh's axes and its placements.

    Returns:
        Nothing without a TensorAtomic placement.

    Raises:
        PlanError: a tensor without an owner, an unknown path, an owner that is no rank, tied paths that disagree,
            or owners where no placement asks for them.
    """
    shards = {unit: _shard_numbers(*place) for unit, place in places.items() if _is_by_tensor(*place)}
    if not shards:
        if owners is None:
            return {}
        raise PlanError(
            bad(
                "owners",
                "owners",
                "None without a TensorAtomic placement",
                "shard with TensorAtomic(), or use plan_owners for owner compute on row shards",
            )
        )
    if owners is not None and not isinstance(owners, Mapping):
        raise PlanError(bad("owners", repr(owners), "a dict {path: rank}", "write {'blocks.0.w': 1}"))
    given = owners or {}
    known = {leaf.path for leaf in leaves}
    for path in given:
        if path not in known:
            raise PlanError(bad("owners", repr(path), "paths of planned tensors", "see spec.leaves for the paths"))
    found: dict[int, int] = {}
    where: dict[int, str] = {}
    for leaf, first in zip(leaves, tied_to, strict=True):
        if leaf.path not in given:
            continue
        owner, shard_of = given[leaf.path], shards.get(leaf.unit)
        if shard_of is None:
            raise PlanError(
                bad(
                    "owners",
                    f"an owner for {leaf.path!r}, whose unit is not sharded by tensors",
                    "owners for tensors of units with a TensorAtomic placement",
                    "leave it out",
                )
            )
        if type(owner) is not int or not 0 <= owner < len(shard_of):
            raise PlanError(
                bad(
                    "owners",
                    f"{owner!r} for {leaf.path!r}",
                    f"a rank in [0, {len(shard_of)})",
                    "count the ranks of the sharded axes, row-major",
                )
            )
        if found.setdefault(first, shard_of[owner]) != shard_of[owner]:
            raise PlanError(
                bad(
                    "owners",
                    f"{owner} for {leaf.path!r} and another for {where[first]!r}",
                    "one owner for a tied tensor",
                    "give it under one of its paths",
                )
            )
        where.setdefault(first, leaf.path)
    missing = [leaves[n] for n in dict.fromkeys(tied_to) if n not in found and leaves[n].unit in shards]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise PlanError(
            bad(
                "owners",
                f"no owner for {missing[0].path!r}{others}",
                f"a rank in [0, {len(shards[missing[0].unit])}) for every tensor",
                "add it to owners",
            )
        )
    return found


def _is_by_tensor(axes: Sequence[Axis], placements: Placements) -> bool:
    return any(isinstance(placements.optimizer[axis], TensorAtomic) for axis in sharded_axes(placements.optimizer))


def _shard_numbers(axes: Sequence[Axis], placements: Placements) -> list[int]:
    """For each rank of the sub-mesh of the sharded axes, row-major, the number of the shard that it holds.

    Shards count the inner axis as the most significant digit (`buffer.segment`), ranks as the least.
    """
    numbers, order = [], sharded_axes(placements.optimizer)
    for place in itertools.product(*(range(axes[axis].size) for axis in sorted(order))):
        digit = dict(zip(sorted(order), place, strict=True))
        number = 0
        for axis in order:
            number = number * axes[axis].size + digit[axis]
        numbers.append(number)
    return numbers
