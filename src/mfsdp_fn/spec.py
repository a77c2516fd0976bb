"""Specs: everything about a sharded tree that is known before any of its values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from . import tree, units
from .checks import shown
from .communicators import Axis, Mesh, device_of
from .errors import PlanError, bad
from .group import GroupSpec
from .placement import Placements, sharded_axes
from .runtime import RuntimePolicy
from .tensor_parallel import TensorParallel


class History:
    """Whether a call has run with a spec: CUDA graphs must not capture a first one. No result depends on it."""

    __slots__ = ("ran",)

    def __init__(self) -> None:
        self.ran = False


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf of the planned tree: what it is, and which tensor of which group holds it.

    `shape` is what this rank has of it before sharding: for a DTensor over other axes (`parallel`), its local shape.
    """

    path: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    unit: str
    group: int = -1
    index: int = -1
    leading_dims: int = 1  # how many of them count its rows
    parallel: TensorParallel | None = None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardSpec:
    """The frozen plan of a sharded tree; make it with `plan`.

    Hashable, compared by `digest`. It is the static part of every state pytree, so trees with different plans
    can't be mixed by accident. `mesh` and `placements` are the defaults, and `axes` this rank's communicators over
    `mesh`; a group has its own.
    """

    leaves: tuple[LeafSpec, ...]
    groups: tuple[GroupSpec, ...]
    units: tuple[str, ...]
    template: tree.Template
    mesh: Mesh
    axes: tuple[Axis, ...]
    placements: Placements
    runtime: RuntimePolicy
    namespace: str
    text_digest: str
    parallel_axes: tuple[Axis, ...]  # of the mesh that DTensor parameters lie over, where there are any
    # 0-D, requires grad: what lets buffers that don't enter autograd. A compiler takes such a tensor only as an input.
    anchor: torch.Tensor
    history: History = dataclasses.field(default_factory=History, compare=False, repr=False)

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
        found: tuple[str, ...] = ()
        if isinstance(pattern, str):
            found = tuple(unit for unit in self.units if units.matches(pattern, units.split(unit)))
        if not found:
            raise PlanError(
                bad(
                    "pattern",
                    shown(pattern),
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
        if not isinstance(path, str) or path not in self._by_path:
            raise PlanError(bad("path", shown(path), f"one of the {len(self.leaves)} planned paths", "see spec.leaves"))
        return self._by_path[path]

    @functools.cached_property
    def _by_path(self) -> dict[str, LeafSpec]:
        return {leaf.path: leaf for leaf in self.leaves}

    def unit_groups(self, unit: str) -> tuple[int, ...]:
        """Numbers of the groups of a unit.

        Raises:
            PlanError: there is no such unit.
        """
        if not isinstance(unit, str) or unit not in self._unit_groups:
            raise PlanError(
                bad(
                    "unit",
                    shown(unit),
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
    def meshes(self) -> tuple[Mesh, ...]:
        """The default mesh, and others that groups lie on, in order."""
        return tuple({id(mesh): mesh for mesh in (self.mesh, *(group.mesh for group in self.groups))}.values())

    @functools.cached_property
    def norm_parts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By group, the runs of this rank's main buffer that it adds to a norm over `norm_axes`.

        With one mesh and one optimizer placement: its parts of trainable groups; only axes that shard are summed
        over. Else all ranks are, and of replicas only the first counts, so that every element counts once. The same
        over the axes of DTensors, where plain tensors are replicas.
        """
        replicas = {(leaf.group, leaf.index): self._is_other_replica(leaf) for leaf in self.leaves}
        counted = []
        for group in self.groups:
            first = self._is_uniform or all(
                not axis.rank or placement.is_sharded
                for axis, placement in zip(group.axes, group.placements.optimizer, strict=True)
            )
            runs = group.runs_of({i for i in range(len(group.paths)) if not replicas[group.number, i]})
            counted.append(runs if first and group.requires_grad else ())
        return tuple(counted)

    def _is_other_replica(self, leaf: LeafSpec) -> bool:
        """Whether this rank's part of a leaf is one that a rank before it has too, over the axes of DTensors."""
        if leaf.parallel is None:
            return any(axis.rank for axis in self.parallel_axes)
        pairs = zip(self.parallel_axes, leaf.parallel.placements, strict=True)
        return any(axis.rank and not placement.is_shard() for axis, placement in pairs)

    @functools.cached_property
    def norm_axes(self) -> tuple[Axis, ...]:
        """The axes that a norm is summed over, in order."""
        if self._is_uniform:
            return tuple(self.axes[i] for i in sharded_axes(self.placements.optimizer)) + self.parallel_axes
        return self.axes[::-1] + self.parallel_axes

    @functools.cached_property
    def _is_uniform(self) -> bool:
        optimizer = self.placements.optimizer
        return all(group.mesh is self.mesh and group.placements.optimizer == optimizer for group in self.groups)

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
            PlanError: a pattern that matches nothing, or is none.
        """
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            raise PlanError(bad("patterns", shown(patterns), "dotted patterns", "write ('norm*', 'bias')"))
        found: set[str] = set()
        for pattern in patterns:
            if not isinstance(pattern, str) or not pattern:
                raise PlanError(bad("patterns", shown(pattern), "dotted patterns", "write ('norm*', 'bias')"))
            hits = {
                leaf.path
                for leaf in self.leaves
                if any(units.matches(pattern, part) for part in path_windows(leaf.path, pattern))
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
        """The plan as two tables, a line a group: what it holds, and what was predicted for its layout and why.

        "main > compute" are the dtypes of the optimizer's weights and of gathered ones; "MiB kept" is what this rank
        holds between steps, in both; "misaligned" are matrices that start off 16 bytes when gathered, "boundaries off"
        rank boundaries that do.
        """
        from .explain import explain  # a table, not a fact about the spec; kept out of this file

        return explain(self)


def ready(spec: ShardSpec) -> ShardSpec:
    """Fill every cached property now: steps only read, and compilers, which can't trace the caching, find values."""
    for facts in (*spec.groups, spec):
        for name, member in vars(type(facts)).items():
            if isinstance(member, functools.cached_property):
                getattr(facts, name)
    return spec


def path_windows(path: str, pattern: str) -> tuple[units.Path, ...]:
    """The runs of consecutive components of a path that are as long as the pattern."""
    parts, depth = units.split(path), len(units.split(pattern))
    return tuple(parts[start : start + depth] for start in range(len(parts) - depth + 1))
