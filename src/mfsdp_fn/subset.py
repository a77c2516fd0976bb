"""Some tensors of a plan as a plan of their own, so that an optimizer can run on those alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence

import torch

from . import tree
from .collectives import copy_many
from .group import GroupSpec
from .layout import GlobalLayout
from .spec import ShardSpec, ready
from .state import ShardState, with_main


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements that lie together both in a local buffer of the whole plan and in the subset's."""

    start: int
    start_in_subset: int
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class Subset:
    """A plan for some tensors of another one.

    Its groups are those groups that have any of the tensors, in order; a group whose tensors are all in it keeps
    its layout, so that buffers need no copy. Every buffer lies in the optimizer placement and main dtype: syncing
    a state of the subset does nothing.

    Args:
        whole: the plan.
        spec: the subset's plan.
        numbers: for each group of the subset, its number in the plan.
        runs: for each group of the subset, where this rank's elements lie.
        entire: for each group of the subset, whether it is all of the plan's group.
    """

    whole: ShardSpec
    spec: ShardSpec
    numbers: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    entire: tuple[bool, ...]

    def take(self, main: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The subset's local buffers: copies, but for entire groups the buffers themselves."""
        taken = []
        for number, runs, entire in zip(self.numbers, self.runs, self.entire, strict=True):
            parts = [main[number].narrow(0, run.start, run.size) for run in runs]
            taken.append(main[number] if entire else torch.cat(parts) if parts else main[number].new_empty(0))
        return tuple(taken)

    def state(self, like: ShardState, main: Sequence[torch.Tensor]) -> ShardState:
        """A state of the subset with local buffers `main` of its own."""
        return with_main(dataclasses.replace(like, spec=self.spec), tuple(main))

    def put(self, taken: Sequence[torch.Tensor], main: list[torch.Tensor]) -> None:
        """The way back: writes runs to the buffers `main`; an entire group's buffer takes its place there."""
        for number, runs, entire, buffer in zip(self.numbers, self.runs, self.entire, taken, strict=True):
            if entire:
                main[number] = buffer
                continue
            copy_many(
                [main[number].narrow(0, run.start, run.size) for run in runs],
                [buffer.narrow(0, run.start_in_subset, run.size) for run in runs],
            )


# Not cached by spec: plans over other ranks, and those of other ranks, compare equal.
def subset(spec: ShardSpec, paths: frozenset[str]) -> Subset:
    """The plan of the tensors at `paths` (a tied tensor by any of its paths) and of no others.

    Communicates nothing.

    >>> import torch, mfsdp_fn as mf
    >>> params = {name: torch.ones(4, requires_grad=True) for name in "abc"}
    >>> spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3())
    >>> part = subset(spec, frozenset("ac"))
    >>> part.spec.groups[0].paths, part.runs[0]
    (('a', 'c'), (Run(start=0, start_in_subset=0, size=4), Run(start=8, start_in_subset=4, size=4)))
    """
    slots = {(leaf.group, leaf.index) for leaf in spec.leaves if leaf.path in paths}
    kept = [[i for i in range(len(g.paths)) if (g.number, i) in slots] for g in spec.groups]
    numbers = tuple(group.number for group in spec.groups if kept[group.number])
    groups = tuple(_group(spec.groups[n], kept[n], position) for position, n in enumerate(numbers))
    places = {(n, index): (p, i) for p, n in enumerate(numbers) for i, index in enumerate(kept[n])}
    leaf_numbers = [n for n, leaf in enumerate(spec.leaves) if (leaf.group, leaf.index) in slots]
    leaves = tuple(
        dataclasses.replace(leaf, group=place[0], index=place[1])
        for leaf in (spec.leaves[n] for n in leaf_numbers)
        for place in [places[leaf.group, leaf.index]]
    )
    present = {leaf.unit for leaf in leaves}
    optimizer = spec.placements.optimizer
    part = dataclasses.replace(
        spec,
        leaves=leaves,
        groups=groups,
        units=tuple(unit for unit in spec.units if unit in present),
        template=_renumbered(tree.prune(spec.template, leaf_numbers), {n: i for i, n in enumerate(leaf_numbers)}),
        placements=dataclasses.replace(spec.placements, parameter=optimizer, gradient=optimizer),
        text_digest=hashlib.sha256(repr((spec.digest(), sorted(slots))).encode()).hexdigest(),
    )
    runs = tuple(_runs(spec.groups[n], group, kept[n]) for n, group in zip(numbers, groups, strict=True))
    entire = tuple(len(kept[n]) == len(spec.groups[n].paths) for n in numbers)
    return Subset(spec, ready(part), numbers, runs, entire)


def _group(group: GroupSpec, kept: Sequence[int], number: int) -> GroupSpec:
    optimizer = group.placements.optimizer
    return dataclasses.replace(
        group,
        number=number,
        paths=tuple(group.paths[index] for index in kept),
        layout=group.layout if len(kept) == len(group.paths) else _packed(group.layout, kept),
        placements=dataclasses.replace(group.placements, parameter=optimizer, gradient=optimizer),
        dtypes=dataclasses.replace(group.dtypes, compute=group.dtypes.main),
    )


def _packed(layout: GlobalLayout, kept: Collection[int]) -> GlobalLayout:
    """The layout without padding and other tensors; each rank holds the rows that it held."""
    spans = [(span.start, span.stop) for span in map(layout.tensor_range, kept)]

    def before(position: int) -> int:
        return sum(max(min(stop, position) - start, 0) for start, stop in spans)

    return GlobalLayout(
        tensor_shapes=tuple(layout.tensor_shapes[index] for index in kept),
        tensor_to_offset=tuple(before(layout.tensor_to_offset[index]) for index in kept),
        size=before(layout.size),
        rank_to_offset=tuple(before(offset) for offset in layout.rank_to_offset),
        leading_dims=tuple(layout.leading_dims[index] for index in kept) if layout.leading_dims else (),
    )


def _runs(group: GroupSpec, part: GroupSpec, kept: Sequence[int]) -> tuple[Run, ...]:
    starts = {kept[index]: start for index, start, _ in part.main_pieces}
    runs: list[Run] = []
    for index, start, stop in group.main_pieces:
        if index not in starts:
            continue
        last = runs[-1] if runs else None
        if last and last.start + last.size == start and last.start_in_subset + last.size == starts[index]:
            runs[-1] = dataclasses.replace(last, size=last.size + stop - start)
        else:
            runs.append(Run(start, starts[index], stop - start))
    return tuple(runs)


def _renumbered(template: tree.Template, numbers: dict[int, int]) -> tree.Template:
    if isinstance(template, tree.Leaf):
        return tree.Leaf(numbers[template.index])
    if isinstance(template, tree.Node):
        return dataclasses.replace(template, children=tuple(_renumbered(child, numbers) for child in template.children))
    return template
