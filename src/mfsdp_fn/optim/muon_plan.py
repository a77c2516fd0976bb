"""What Muon needs to know of a plan: which parameters are its own, their matrices, owners and rates."""

from __future__ import annotations

import dataclasses
import math

from ..errors import StateError, bad
from ..owner_compute import Schedule, schedule_of
from ..owner_layout import GroupOwnerLayout, split_layout
from ..owner_planning import balance, ns_cost_fn
from ..spec import LeafSpec, ShardSpec
from ..subset import Subset, subset

Split = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Application:
    """A stretch of weights that takes its update at one rate.

    Args:
        number: group of the plan; `start` is in its local buffer.
        position: group of Muon's subset; `start_in_update` is in its local buffer.
        size: elements.
        shape: rows and columns of the matrices in it.
    """

    number: int
    position: int
    start: int
    start_in_update: int
    size: int
    shape: tuple[int, int]

    def ratio(self, adjust_lr_fn: str | None) -> float:
        """The factor on the learning rate, from the global shape of a matrix."""
        rows, columns = self.shape
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


@dataclasses.dataclass(frozen=True, eq=False)
class MuonPlan:
    """Computed once for a plan and the options that choose.

    Args:
        mine: Muon's parameters as a plan of their own.
        others: the fallback's; None if there are none.
        owners: for each group of `mine`, the owners of its matrices.
        applications: how updates are applied on this rank.
        schedule: which of them are evaluated when.
        chosen: what identifies the choice.
    """

    mine: Subset
    others: Subset | None
    owners: tuple[GroupOwnerLayout, ...]
    applications: tuple[Application, ...]
    schedule: Schedule
    chosen: tuple[tuple[str, ...], tuple[tuple[str, Split], ...], int]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, MuonPlan) and self.mine.whole == other.mine.whole
        return same and isinstance(other, MuonPlan) and self.chosen == other.chosen

    def __hash__(self) -> int:
        return hash((self.mine.whole, self.chosen))


def muon_plan(
    spec: ShardSpec,
    exclude: tuple[str, ...],
    split: tuple[tuple[str, Split], ...],
    ns_steps: int,
    has_fallback: bool,
    buckets: int,
) -> MuonPlan:
    """Choose Muon's parameters and balance their matrices over all groups. Sends nothing.

    With two sharded axes (hfsdp) a communicator over both is made, collectively, the first time.

    Raises:
        StateError: a parameter that is neither Muon's nor has a fallback; nothing for Muon; a split that doesn't fit.
    """
    excluded = _slots(spec, spec.select(exclude))
    trainable = [leaf for leaf in spec.leaves if leaf.requires_grad]
    matrices = [leaf for leaf in trainable if len(leaf.shape) in (2, 3) and (leaf.group, leaf.index) not in excluded]
    for leaf in matrices:
        # A stack of matrices may be cut between them.
        if leaf.parallel is not None and not leaf.parallel.is_whole((0, 1) if len(leaf.shape) == 2 else (1, 2)):
            raise StateError(
                bad(
                    "exclude",
                    f"{exclude}, which leaves {leaf.path!r}, a DTensor whose matrices are cut over other axes",
                    "whole matrices for Muon",
                    "exclude it, and give a fallback for it",
                )
            )
    chosen = frozenset(leaf.path for leaf in matrices)
    rest = [leaf for leaf in trainable if leaf.path not in chosen]
    if rest and not has_fallback:
        raise StateError(
            bad(
                "fallback",
                f"None, with {rest[0].path!r} of shape {tuple(rest[0].shape)} (and {len(rest) - 1} more) not Muon's",
                "an optimizer for what is no matrix, or is in `exclude`",
                "pass fallback=optim.adamw(lr=3e-4)",
            )
        )
    if not matrices:
        raise StateError(
            bad("exclude", f"{exclude}, which leaves no matrix", "some matrix for Muon", "use `fallback` alone instead")
        )
    mine = subset(spec, chosen)
    others = subset(spec, frozenset(leaf.path for leaf in rest)) if rest else None
    rows = _rows(spec, mine.spec, split)
    layouts = [split_layout(group.layout, rows[group.number])[0] for group in mine.spec.groups]
    jobs = [(g, layout, range(len(layout.tensor_shapes))) for g, layout in zip(mine.spec.groups, layouts, strict=True)]
    cost = ns_cost_fn(ns_steps)
    owners = tuple(balance(jobs, lambda shape: cost(shape[-2:])))
    applications = tuple(_applications(mine, owners))
    return MuonPlan(mine, others, owners, applications, schedule_of(owners, buckets), (exclude, split, buckets))


def _slots(spec: ShardSpec, paths: frozenset[str]) -> set[tuple[int, int]]:
    """Tensors by (group, index): a tied one counts by any of its paths."""
    return {(leaf.group, leaf.index) for leaf in spec.leaves if leaf.path in paths}


def _rows(
    spec: ShardSpec, mine: ShardSpec, split: tuple[tuple[str, Split], ...]
) -> dict[int, dict[int, tuple[int, ...]]]:
    """By group and tensor of `mine`, the rows of its parts: those of a 3-D tensor are single, a split's as said."""
    found: dict[int, dict[int, tuple[int, ...]]] = {group.number: {} for group in mine.groups}
    for leaf in mine.leaves:
        if len(leaf.shape) == 3:
            found[leaf.group][leaf.index] = (1,) * leaf.shape[0]
    for pattern, parts in split:
        selected = spec.select([pattern])
        matrices = [leaf for leaf in mine.leaves if leaf.path in selected]
        if not matrices:
            some = min(selected)
            raise StateError(
                bad(
                    f"split[{pattern!r}]",
                    f"a pattern of parameters that are not Muon's, such as {some!r} of shape "
                    f"{tuple(spec.leaf(some).shape)}",
                    "one that selects some matrix of Muon's",
                    "mend the pattern, or leave it out where `exclude` has the parameters",
                )
            )
        for leaf in matrices:
            found[leaf.group][leaf.index] = _parts(pattern, leaf, parts)
    return found


def _parts(pattern: str, leaf: LeafSpec, parts: Split) -> tuple[int, ...]:
    rows = leaf.shape[0]
    sizes = (rows // parts,) * parts if isinstance(parts, int) else parts
    if len(leaf.shape) != 2 or sum(sizes) != rows or not all(sizes):
        raise StateError(
            bad(
                f"split[{pattern!r}]",
                f"{parts} for {leaf.path!r} of shape {tuple(leaf.shape)}",
                "parts that add up to the rows of a 2-D tensor",
                "give the rows of each part, and a pattern that selects only what is fused",
            )
        )
    return sizes


def _applications(mine: Subset, owners: tuple[GroupOwnerLayout, ...]) -> list[Application]:
    found: list[Application] = []
    for position, (number, runs, layout) in enumerate(zip(mine.numbers, mine.runs, owners, strict=True)):
        for index, (start, size) in sorted(layout.spots.items(), key=lambda item: item[1]):
            run = next(r for r in runs if r.start_in_subset <= start < r.start_in_subset + r.size)
            rows, columns = layout.layout.tensor_shapes[index][-2:]
            there = start - run.start_in_subset + run.start
            step = Application(number, position, there, start, size, (rows, columns))
            last = found[-1] if found else None
            if (
                last is not None
                and (last.position, last.shape) == (position, step.shape)
                and last.start + last.size == step.start
                and last.start_in_update + last.size == start
            ):
                found[-1] = dataclasses.replace(last, size=last.size + size)
            else:
                found.append(step)
    return found
