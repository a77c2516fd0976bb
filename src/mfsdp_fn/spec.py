"""Specs: everything about a sharded tree that is known before any of its values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from . import tree, units
from .buffer import Move, moves, segment
from .collectives import Axis, Mesh, device_of
from .errors import PlanError, bad
from .layout import GlobalLayout, Range
from .placement import Placement, Placements
from .precision import GroupDtypes
from .runtime import RuntimePolicy


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf of the planned tree: what it is, and which tensor of which group holds it."""

    path: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    unit: str
    group: int = -1
    index: int = -1


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """The tensors of one (unit, dtype, requires_grad), laid out in one flat buffer.

    `paths` and `layout` are in buffer-planning order: matrices that keep the next one aligned come first. A tied
    tensor counts once, under the path it has first. `axes` are this rank's communicators over `mesh`.
    """

    name: str
    unit: str
    number: int
    dtype: torch.dtype
    requires_grad: bool
    paths: tuple[str, ...]
    layout: GlobalLayout
    placements: Placements
    dtypes: GroupDtypes
    grad_scale: float
    store_compute: bool
    mesh: Mesh = dataclasses.field(compare=False, repr=False)
    axes: tuple[Axis, ...] = dataclasses.field(compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.name, self.layout.size))

    @functools.cached_property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    @functools.cached_property
    def scale(self) -> float:
        """The factor on each gradient contribution: the mean over ranks, times `grad_scale`."""
        return self.grad_scale / self.ranks

    def range_of(self, placement: tuple[Placement, ...]) -> Range:
        """The part of the buffer that this rank holds under `placement`."""
        return segment(self.layout, placement, self.axes)

    @functools.cached_property
    def main_range(self) -> Range:
        """This rank's part of main weights, moments and finished gradients."""
        return self.range_of(self.placements.optimizer)

    @functools.cached_property
    def compute_range(self) -> Range:
        """This rank's part of compute weights."""
        return self.range_of(self.placements.parameter)

    @functools.cached_property
    def grad_range(self) -> Range:
        """This rank's part of gradients while they accumulate."""
        return self.range_of(self.placements.gradient)

    @functools.cached_property
    def main_pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(index, start, stop) of each tensor's part of this rank's main buffer, in order; padding is in none."""
        held, found = self.main_range, []
        for index, (offset, _, numel) in sorted(enumerate(self.views), key=lambda item: item[1][0]):
            start, stop = max(offset, held.start), min(offset + numel, held.stop)
            if start < stop:
                found.append((index, start - held.start, stop - held.start))
        return tuple(found)

    @functools.cached_property
    def main_runs(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the maximal runs without padding in this rank's main buffer."""
        runs: list[tuple[int, int]] = []
        for _, start, stop in self.main_pieces:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return tuple(runs)

    @functools.cached_property
    def has_compute(self) -> bool:
        """Whether compute weights need a buffer of their own beside the main weights."""
        if self.placements.parameter != self.placements.optimizer:
            return True
        return self.dtypes.compute != self.dtypes.main and (self.store_compute or not self.gathers)

    @functools.cached_property
    def gathers(self) -> tuple[Move, ...]:
        """The gathers of an `unshard`."""
        whole = tuple(_WHOLE for _ in self.axes)
        return moves(self.layout, self.placements.parameter, whole, self.axes)

    @functools.cached_property
    def sync_gathers(self) -> tuple[Move, ...]:
        """The gathers from main to compute weights, once a step."""
        return moves(self.layout, self.placements.optimizer, self.placements.parameter, self.axes)

    @functools.cached_property
    def grad_scatters(self) -> tuple[Move, ...]:
        """The reduce-scatters of every microbatch, in order."""
        whole = tuple(_WHOLE for _ in self.axes)
        return moves(self.layout, self.placements.gradient, whole, self.axes)[::-1]

    @functools.cached_property
    def deferred_scatters(self) -> tuple[Move, ...]:
        """The reduce-scatters that wait for the last microbatch, in order."""
        return moves(self.layout, self.placements.optimizer, self.placements.gradient, self.axes)[::-1]

    @functools.cached_property
    def deferred_all_reduces(self) -> tuple[Axis, ...]:
        """The axes over which the last microbatch all-reduces."""
        pairs = zip(self.placements.gradient, self.placements.optimizer, self.axes, strict=True)
        return tuple(axis for grad, optimizer, axis in pairs if not grad.is_sharded and not optimizer.is_sharded)

    @functools.cached_property
    def defers(self) -> bool:
        """Whether accumulated gradients differ from finished ones."""
        return bool(self.deferred_scatters or self.deferred_all_reduces)

    @functools.cached_property
    def views(self) -> tuple[tuple[int, torch.Size, int], ...]:
        """(offset, shape, numel) of each tensor in the whole buffer."""
        pairs = zip(self.layout.tensor_to_offset, self.layout.tensor_shapes, strict=True)
        return tuple((offset, shape, shape.numel()) for offset, shape in pairs)

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of the padding in the whole buffer."""
        found, end = [], 0
        for offset, _, numel in sorted((view for view in self.views if view[2]), key=lambda view: view[0]):
            if offset > end:
                found.append((end, offset - end))
            end = offset + numel
        if self.layout.size > end:
            found.append((end, self.layout.size - end))
        return tuple(found)

    def local_views(self, buffer: torch.Tensor, held: Range) -> dict[int, torch.Tensor]:
        """The rows of each tensor inside `buffer`, which holds `held`; tensors with none of theirs are left out."""
        found = {}
        if buffer.dim() != 1:  # a frozen group of gradients or moments holds nothing
            return found
        for index, (offset, shape, numel) in enumerate(self.views):
            start, stop = max(offset, held.start), min(offset + numel, held.stop)
            if start < stop:
                rows = buffer.narrow(0, start - held.start, stop - start)
                found[index] = rows.view(shape if not shape else (-1, *shape[1:]))
        return found


class _Whole(Placement):
    """Stands for any placement that is not sharded."""


_WHOLE = _Whole()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardSpec:
    """The frozen plan of a sharded tree; make it with `plan`.

    Hashable, compared by `digest`. It is the static part of every state pytree, so trees with different plans
    can't be mixed by accident.
    """

    leaves: tuple[LeafSpec, ...]
    groups: tuple[GroupSpec, ...]
    units: tuple[str, ...]
    template: tree.Template
    mesh: Mesh
    placements: Placements
    runtime: RuntimePolicy
    namespace: str
    text_digest: str
    # 0-D, requires grad: what lets buffers that don't enter autograd. A compiler takes such a tensor only as an input.
    anchor: torch.Tensor

    def digest(self) -> str:
        """A hexadecimal digest of everything that ranks must agree on."""
        return self.text_digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardSpec) and self.text_digest == other.text_digest

    def __hash__(self) -> int:
        return hash(self.text_digest)

    def __repr__(self) -> str:
        return f"ShardSpec({len(self.leaves)} leaves, {len(self.units)} units, digest={self.text_digest[:8]})"

    def units_matching(self, pattern: str) -> tuple[str, ...]:
        """The units whose name matches a dotted pattern, in order of registration.

        Raises:
            PlanError: none does.
        """
        found = tuple(unit for unit in self.units if units.matches(pattern, units.split(unit)))
        if not found:
            raise PlanError(
                bad(
                    "pattern",
                    repr(pattern),
                    f"a pattern that matches some of the units {list(self.units[:6])}",
                    "mend the pattern, or name it in plan(..., units=…)",
                )
            )
        return found

    def group_of(self, path: str) -> GroupSpec:
        """The group that holds the leaf at `path`.

        Raises:
            PlanError: there is no such leaf.
        """
        return self.groups[self.leaf(path).group]

    def leaf(self, path: str) -> LeafSpec:
        """The leaf at `path`.

        Raises:
            PlanError: there is no such leaf.
        """
        if path not in self._by_path:
            raise PlanError(bad("path", repr(path), f"one of the {len(self.leaves)} planned paths", "see spec.leaves"))
        return self._by_path[path]

    @functools.cached_property
    def _by_path(self) -> dict[str, LeafSpec]:
        return {leaf.path: leaf for leaf in self.leaves}

    def unit_groups(self, unit: str) -> tuple[int, ...]:
        """Numbers of the groups of a unit.

        Raises:
            PlanError: there is no such unit.
        """
        if unit not in self._unit_groups:
            raise PlanError(
                bad(
                    "unit",
                    repr(unit),
                    f"one of {list(self.units[:8])}",
                    "see spec.units; plan(..., units=…) makes them",
                )
            )
        return self._unit_groups[unit]

    @functools.cached_property
    def _unit_groups(self) -> dict[str, tuple[int, ...]]:
        return {unit: tuple(group.number for group in self.groups if group.unit == unit) for unit in self.units}

    def unit_template(self, unit: str) -> tree.Template:
        """What `unshard` of a unit rebuilds."""
        return self._unit_templates[unit]

    @functools.cached_property
    def _unit_templates(self) -> dict[str, tree.Template]:
        templates = {}
        for unit in self.units:
            keep = {i for i, leaf in enumerate(self.leaves) if leaf.unit == unit}
            templates[unit] = tree.subtree(self.template, units.split(unit), keep)
        return templates

    @functools.cached_property
    def unit_leaves(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """(leaf, group, index in group) of every leaf, by unit."""
        found: dict[str, list[tuple[int, int, int]]] = {unit: [] for unit in self.units}
        for number, leaf in enumerate(self.leaves):
            found[leaf.unit].append((number, leaf.group, leaf.index))
        return {unit: tuple(rows) for unit, rows in found.items()}

    @functools.cached_property
    def kept_units(self) -> frozenset[str]:
        """Units that stay gathered from forward to backward."""
        kept = self.runtime.keep_gathered
        return frozenset(
            unit for unit in self.units if any(units.matches(pattern, units.split(unit)) for pattern in kept)
        )

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements of all tensors, tied ones once, padding left out."""
        return sum(numel for group in self.groups for _, _, numel in group.views)

    @property
    def device(self) -> torch.device:
        """Where this rank's buffers live."""
        return device_of(self.mesh)

    def select(self, patterns: Iterable[str]) -> frozenset[str]:
        """Paths of the leaves that a pattern matches: one that matches some consecutive components of the path.

        So ``"norm*"`` selects ``blocks.0.norm1.weight``, and so do ``"blocks.*"`` and ``"weight"``.

        Raises:
            PlanError: a pattern that matches nothing.
        """
        found: set[str] = set()
        for pattern in patterns:
            depth = len(units.split(pattern))
            hits = {
                leaf.path
                for leaf in self.leaves
                if any(units.matches(pattern, part) for part in _windows(units.split(leaf.path), depth))
            }
            if not hits:
                raise PlanError(
                    bad(
                        "pattern",
                        repr(pattern),
                        "a pattern that matches consecutive components of some path",
                        "see spec.leaves for the paths",
                    )
                )
            found |= hits
        return frozenset(found)

    def explain(self) -> str:
        """The plan as a table: a line a group, with sizes, padding and alignment."""
        from .explain import explain  # a table, not a fact about the spec; kept out of this file

        return explain(self)


def _windows(path: units.Path, depth: int) -> tuple[units.Path, ...]:
    """The runs of `depth` consecutive components of a path."""
    return tuple(path[start : start + depth] for start in range(len(path) - depth + 1))
