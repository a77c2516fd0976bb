"""What a row is, and which rows share a buffer: `plan`'s `leading_dims` and `split_by_row_size`."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from . import units
from .errors import PlanError, bad
from .placement import Placements, RowAtomic, ShardLayout
from .spec import LeafSpec, path_windows

T = TypeVar("T", bound=Hashable)


def with_leading_dims(leaves: tuple[LeafSpec, ...], wanted: int | Mapping[str, int]) -> tuple[LeafSpec, ...]:
    """The leaves, each with the number of leading dims that count its rows.

    Args:
        leaves: of the plan.
        wanted: a number, for every leaf of more dims; or numbers by pattern (one that matches some consecutive
            components of the path, as in `spec.select`; the longest that matches wins).

    Raises:
        PlanError: not a positive number, a pattern without a match, or a match of too few dims.
    """
    if not isinstance(wanted, Mapping):
        depth = _checked("leading_dims", wanted)
        return tuple(
            dataclasses.replace(leaf, leading_dims=depth) if len(leaf.shape) > depth else leaf for leaf in leaves
        )
    units.check_patterns("leading_dims", tuple(wanted))
    matched: dict[int, str] = {}
    for pattern in sorted(wanted, key=lambda pattern: len(units.split(pattern))):
        name = f"leading_dims[{pattern!r}]"
        depth, found = _checked(name, wanted[pattern]), False
        for number, leaf in enumerate(leaves):
            if any(units.matches(pattern, part) for part in path_windows(leaf.path, pattern)):
                found, matched[number] = True, pattern
                if len(leaf.shape) <= depth:
                    got = f"{depth} for {leaf.path!r} of shape {tuple(leaf.shape)}"
                    raise PlanError(
                        bad(name, got, "fewer than the tensor's dims", "leave a dim for the elements of a row")
                    )
        if not found:
            raise PlanError(
                bad("leading_dims", repr(pattern), "patterns that match some path", "mend the pattern or leave it out")
            )
    return tuple(
        dataclasses.replace(leaf, leading_dims=wanted[matched[number]]) if number in matched else leaf
        for number, leaf in enumerate(leaves)
    )


def _checked(name: str, depth: object) -> int:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise PlanError(
            bad(
                name,
                repr(depth),
                "a positive integer",
                "2 lets boundaries fall inside the experts of an (E, a, b) tensor",
            )
        )
    return depth


def check_row_rules(
    placements: Iterable[Placements],
    shard_layout: ShardLayout | None,
    leading_dims: object,
    split_by_row_size: object,
) -> None:
    """Refuse rules about rows where there is nothing that they could change: in no unit.

    Raises:
        PlanError: naming the argument.
    """
    if not isinstance(split_by_row_size, bool):
        raise PlanError(bad("split_by_row_size", repr(split_by_row_size), "True or False", "leave it out for False"))
    if split_by_row_size and shard_layout is ShardLayout.UNPADDED:
        raise PlanError(
            bad("split_by_row_size", "True", "False without padding", "pass shard_layout='padded' or 'auto'")
        )
    finest = [placement for one in placements for placement in one.optimizer if placement.is_sharded]
    if any(isinstance(placement, RowAtomic) for placement in finest):
        return
    rules = [("split_by_row_size", "True")] if split_by_row_size else []
    rules += [("leading_dims", repr(leading_dims))] if leading_dims != 1 else []
    if shard_layout is ShardLayout.UNPADDED:
        rules.append(("shard_layout", "'unpadded'"))
    if shard_layout is None and finest:  # where nothing is cut, any choice will do
        rules.append(("shard_layout", "'auto'"))
    for name, value in rules:
        if not finest:
            raise PlanError(
                bad(name, value, "none where nothing is cut, as under ddp()", "leave it out, or shard something")
            )
        raise PlanError(
            bad(name, value, "none with TensorAtomic, which cuts no tensor", "leave it out, or use RowAtomic()")
        )


def split_by_rows(items: Sequence[T], rows: Mapping[T, int], numels: Mapping[T, int]) -> list[tuple[int, list[T]]]:
    """Part items so that in each part one row size is a multiple of all others: (that size, items), first come first.

    A row size that divides several of the largest goes with the one that has most elements.

    >>> split_by_rows("abcd", {"a": 6, "b": 1, "c": 4, "d": 2}, {"a": 60, "b": 1, "c": 80, "d": 20})
    [(6, ['a']), (4, ['b', 'c', 'd'])]
    """
    weight: dict[int, int] = {}
    for item in items:
        if numels[item]:
            weight[rows[item]] = weight.get(rows[item], 0) + numels[item]
    largest = [size for size in weight if not any(other % size == 0 and other != size for other in weight)]
    largest.sort(key=lambda size: (-weight[size], -size))
    parts: dict[int, list[T]] = {}
    for item in items:
        homes = [size for size in largest if numels[item] and size % rows[item] == 0]
        parts.setdefault((homes or largest or [0])[0], []).append(item)
    return list(parts.items())
