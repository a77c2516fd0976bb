"""What a checkpoint holds: whole tensors by name, each cut into boxes, and this rank's memory for its own.

A name says nothing of groups, layouts or ranks. A rank holds a run of elements of a tensor; a run in row-major order
is a few boxes, and boxes are what storage knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch.distributed.tensor import Shard

from .checks import shown
from .combined import chunk
from .communicators import Axis
from .errors import StateError, bad
from .group import GroupSpec
from .spec import LeafSpec, ShardSpec
from .state import NOTHING, ShardState, Stage, check_state

WEIGHTS, OPTIMIZER = "params", "optimizer"
Cells = Mapping[int, tuple[int, int]]  # by id of a mesh: which of how many such sets of ranks this one is


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One box of a tensor: where it starts, and this rank's memory for it, of the box's shape."""

    offsets: tuple[int, ...]
    data: torch.Tensor
    written: bool  # by this rank; else a replica's business


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a checkpoint. `cell` is which of how many tensors of this name it is, where ranks differ."""

    path: str
    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[Part, ...]
    cell: tuple[int, int] = (0, 1)

    @property
    def name(self) -> str:
        """The name it is stored under."""
        return name_in(self.path, *self.cell)


def name_in(path: str, cell: int, cells: int) -> str:
    """The name of a tensor that is another one on each of several sets of ranks."""
    return path if cells == 1 else f"{path}@{cell + 1}of{cells}"


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that elements `start` to `stop` of a row-major tensor are, in order.

    >>> list(boxes((3, 4), 0, 8)), list(boxes((3, 4), 3, 9))
    ([((0, 0), (2, 4))], [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 1))])
    """
    while start < stop:
        if not shape:
            yield (), ()
            return
        row = math.prod(shape[1:])
        number, first = divmod(start, row)
        if first or stop - start < row:  # inside one row
            last = min(first + stop - start, row)
            for offsets, sizes in boxes(shape[1:], first, last):
                yield (number, *offsets), (1, *sizes)
            start += last - first
        else:
            rows = (stop - start) // row
            yield (number, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * row


def of_state(state: ShardState, prefix: str, cells: Cells) -> list[Entry]:
    """The tensors of a state's main buffers; frozen groups of moments, which hold nothing, are left out."""
    found, slots = [], slots_of(state.spec)
    for group, main in zip(state.spec.groups, state.main, strict=True):
        if tuple(main.shape) == NOTHING:
            continue
        runs = {index: main.narrow(0, start, stop - start) for index, start, stop in group.main_pieces}
        for index in range(len(group.views)):
            leaf = slots[group.number, index]
            run = runs.get(index, main.new_empty(0))
            found.append(_entry(f"{prefix}.{leaf.path}", leaf, group, state.spec, run, cells))
    return found


def of_rows(path: str, tensor: torch.Tensor, leaf: LeafSpec, spec: ShardSpec, cells: Cells) -> Entry:
    """A tensor that holds this rank's rows of a parameter."""
    return _entry(path, leaf, spec.groups[leaf.group], spec, tensor.reshape(-1), cells)


def of_whole(path: str, tensor: torch.Tensor, *, first: bool) -> Entry:
    """A tensor that every rank has; the first one writes it."""
    return Entry(path, tensor.shape, tensor.dtype, (Part((0,) * tensor.dim(), tensor, first),))


def is_rows(tensor: torch.Tensor, leaf: LeafSpec, spec: ShardSpec) -> bool:
    """Whether a tensor under a parameter's path has the shape of this rank's rows of it.

    By chance it may, on some ranks: it holds rows if it has that shape on all.
    """
    group = spec.groups[leaf.group]
    held = sum(stop - start for index, start, stop in group.main_pieces if index == leaf.index)
    row = group.layout.row_shape(leaf.index)
    if not leaf.shape and held:
        return not tensor.shape
    return tuple(tensor.shape) == (held // max(math.prod(row), 1), *row)


def slots_of(spec: ShardSpec) -> dict[tuple[int, int], LeafSpec]:
    """Tensors by group and index; tied ones as the first by name, as the order of a tree is no part of a name."""
    found: dict[tuple[int, int], LeafSpec] = {}
    for leaf in sorted(spec.leaves, key=lambda leaf: leaf.path):
        found.setdefault((leaf.group, leaf.index), leaf)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class OptLeaf:
    """One leaf of an optimizer's state: its name, and the parameter whose path it lies under, if it does."""

    name: str
    value: Any
    parameter: LeafSpec | None


def opt_leaves(opt_state: Any, spec: ShardSpec) -> tuple[list[OptLeaf], Any]:
    """The leaves of an optimizer's state, and how to rebuild it. A ShardState is one leaf.

    Raises:
        StateError: a state of another plan or one that isn't finished, a leaf that is no tensor or number, by name.
    """
    made_for = getattr(opt_state, "spec", spec)
    if isinstance(made_for, ShardSpec) and made_for != spec:
        raise StateError(
            bad("opt_state", f"a state made for {made_for!r}", f"one made for {spec!r}", "pass what belongs to `state`")
        )
    paths, leaves, treespec = optree.tree_flatten_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, ShardState), namespace=spec.namespace
    )
    if paths == [()] and not isinstance(leaves[0], ShardState):
        raise StateError(
            bad(
                "opt_state", shown(leaves[0]), "an optimizer's state, or None", "pass what init(state) or step returned"
            )
        )
    slots = slots_of(spec)
    parameters = {leaf.path: slots[leaf.group, leaf.index] for leaf in spec.leaves}
    found: dict[str, OptLeaf] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        where = ".".join(map(str, ("opt_state", *path)))
        if isinstance(leaf, ShardState):
            _check_moment(leaf, where, spec)
        elif not isinstance(leaf, (torch.Tensor, bool, int, float, str)):
            raise StateError(
                bad(where, shown(leaf), "ShardStates, tensors and numbers", "keep other things in the optimizer")
            )
        elif isinstance(leaf, torch.Tensor) and (type(leaf) is not torch.Tensor or leaf.is_meta):
            raise StateError(bad(where, f"a {type(leaf).__name__} on {leaf.device}", "a plain tensor", "convert it"))
        under = parameters.get(path[-1]) if path and isinstance(path[-1], str) else None
        keys = path if under is None else (*path[:-1], under.path)
        name = ".".join(map(str, (OPTIMIZER, *keys)))
        if name in found:
            raise StateError(bad("opt_state", f"two leaves named {name!r}", "one a name", "rename a key with dots"))
        found[name] = OptLeaf(name, leaf, under)
    return list(found.values()), treespec


def _check_moment(moment: ShardState, where: str, spec: ShardSpec) -> None:
    check_state(moment, where)
    if moment.stage is not Stage.FINAL:
        raise StateError(bad(where, "accumulating gradients", "a finished state", "call finish_grad_sync first"))
    if moment.spec == spec:
        return
    known = {leaf.path: (leaf.shape, spec.groups[leaf.group].mesh) for leaf in spec.leaves}
    for leaf in moment.spec.leaves:  # of some of the parameters, as Muon's is
        shape, mesh = known.get(leaf.path, (None, None))
        if shape != leaf.shape or mesh is not moment.spec.groups[leaf.group].mesh:
            raise StateError(
                bad(where, f"a state of {moment.spec!r}", f"a state of {spec!r}", "pass what belongs to `state`")
            )


def _entry(path: str, leaf: LeafSpec, group: GroupSpec, spec: ShardSpec, run: torch.Tensor, cells: Cells) -> Entry:
    """A parameter's tensor, of which this rank holds `run`."""
    shape, corner = _whole(leaf, spec.parallel_axes)
    replicas = [axis for axis, p in zip(group.axes, group.placements.optimizer, strict=True) if not p.is_sharded]
    beside = leaf.parallel.placements if leaf.parallel else [None] * len(spec.parallel_axes)
    # Over other axes buffers may be laid out otherwise, where DTensors are cut unevenly: the first rank writes.
    first = not any(axis.rank for axis, p in zip(spec.parallel_axes, beside, strict=True) if not isinstance(p, Shard))
    parts: list[Part] = []
    if not shape.numel():
        alone = not any(axis.rank for axis in (*group.axes, *spec.parallel_axes))
        parts.append(Part((0,) * len(shape), run.new_empty(shape), alone))
    for index, start, stop in group.main_pieces:
        if index != leaf.index:
            continue
        mine = first and _shares(replicas, _place(group, spec, (start + stop) / (2 * group.main_range.size)))
        begin, done = group.main_range.start + start - group.views[index][0], 0
        for offsets, sizes in boxes(leaf.shape, begin, begin + stop - start):
            size = math.prod(sizes)
            there = tuple(a + b for a, b in zip(corner, offsets, strict=True))
            parts.append(Part(there, run.narrow(0, done, size).view(sizes), mine))
            done += size
    return Entry(path, shape, run.dtype, tuple(parts), cells.get(id(group.mesh), (0, 1)))


def _place(group: GroupSpec, spec: ShardSpec, inside: float) -> float:
    """A place in a group's buffer, from 0 to 1, as one in all buffers. The same on ranks that hold the same."""
    sizes = [other.layout.size for other in spec.groups]
    return (sum(sizes[: group.number]) + inside * group.layout.size) / sum(sizes)


def _shares(replicas: Sequence[Axis], place: float) -> bool:
    """Whether this rank writes what lies at `place`, from 0 to 1, of what its replicas have too."""
    number, count = 0, 1
    for axis in replicas:
        number, count = number * axis.size + axis.rank, count * axis.size
    return int(place * count) == number


def _whole(leaf: LeafSpec, axes: Sequence[Axis]) -> tuple[torch.Size, list[int]]:
    """Shape of the whole tensor, and where this rank's part of a DTensor starts in it."""
    if leaf.parallel is None:
        return leaf.shape, [0] * len(leaf.shape)
    corner, left = [0] * len(leaf.shape), list(leaf.parallel.shape)
    for axis, placement in zip(axes, leaf.parallel.placements, strict=True):
        if isinstance(placement, Shard):
            first, left[placement.dim] = chunk(left[placement.dim], [axis], [axis.rank])
            corner[placement.dim] += first
    return leaf.parallel.shape, corner
