"""`plan`: from a tree, a mesh and placements to a spec that every rank agrees on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import collectives, layout_builder, tree
from . import units as units_module
from .collectives import Axis, Mesh
from .errors import PlanError, bad
from .explain import ALIGNMENT
from .layout import GlobalLayout
from .mesh import AbstractMesh, check_abstract_mesh
from .placement import (
    BlockAtomic,
    Placements,
    ShardLayout,
    TensorAtomic,
    check_placements,
    sharded_axes,
    with_block_size,
)
from .precision import GroupDtypes, MixedPrecisionPolicy, check_precision
from .runtime import RuntimePolicy, check_runtime
from .spec import GroupSpec, LeafSpec, ShardSpec


def plan(
    params: Any,
    mesh: Mesh,
    placements: Placements,
    *,
    units: Sequence[str] = (),
    precision: MixedPrecisionPolicy | None = None,
    shard_layout: str | ShardLayout = ShardLayout.PADDED,
    block_size: int = 1,
    owners: Mapping[str, int] | None = None,
    grad_scale: float = 1.0,
    runtime: RuntimePolicy | None = None,
    namespace: str = "",
) -> ShardSpec:
    """Plan how a pytree of tensors is sharded.

    Collective over the mesh: digests are compared (one object all-gather an axis), communicators are made and
    warmed. Nothing is allocated for the parameters; meta tensors will do.

    Args:
        params: pytree of tensors. A plain tensor is trainable only if it requires grad.
        mesh: a `DeviceMesh`, or an `AbstractMesh` for planning without processes.
        placements: a preset (`ddp`, `zero1`, `zero2`, `zero3`, `hsdp`, `hfsdp`) or `Placements`.
        units: patterns of subtrees that are gathered together; what none matches goes to the root unit ``""``.
        precision: dtypes of the buffers.
        shard_layout: "padded", "unpadded", "auto", or the enum.
        block_size: rows that are never cut apart.
        owners: for `TensorAtomic`, the owning shard of every tensor, by path.
        grad_scale: factor on every gradient, beside the mean over ranks.
        runtime: what is kept gathered and how far ahead things are launched.
        namespace: the optree namespace of the tree's registered containers.

    Returns:
        The spec: equal on every rank.

    Raises:
        PlanError: an argument that can't be served, or ranks that disagree (naming the first differing path); on
            every rank, before any collective that could hang.

    >>> import torch, mfsdp_fn as mf
    >>> params = {
    ...     "emb": torch.zeros(4, 2, requires_grad=True),
    ...     "l.0.w": torch.zeros(2, 2, requires_grad=True),
    ... }
    >>> spec = mf.plan(params, mf.AbstractMesh((2,), ("dp",)), mf.zero3(), units=("l.*",))
    >>> spec.units, [group.layout.size for group in spec.groups]
    (('', 'l.0'), [8, 4])
    """
    precision, runtime = precision or MixedPrecisionPolicy(), runtime or RuntimePolicy()
    if isinstance(mesh, AbstractMesh):
        check_abstract_mesh(mesh)
    failure: Exception | None = None
    spec: ShardSpec | None = None
    try:
        spec = _plan_alone(
            params,
            mesh,
            placements,
            units,
            precision,
            _shard_layout(shard_layout),
            block_size,
            owners,
            grad_scale,
            runtime,
            namespace,
        )
    except Exception as error:  # whatever it is: other ranks must not wait for this one
        failure = error  # told to the other ranks first: they are about to compare digests
    _agree(mesh, spec, failure)
    assert spec is not None
    axes = collectives.axes_of(mesh, separate_reductions=runtime.overlap_allgather_reduction)
    groups = tuple(dataclasses.replace(group, axes=axes) for group in spec.groups)
    return _ready(dataclasses.replace(spec, groups=groups))


def _ready(spec: ShardSpec) -> ShardSpec:
    """Fill every cached property now: steps only read, and compilers, which can't trace the caching, find values."""
    for facts in (*spec.groups, spec):
        for name, member in vars(type(facts)).items():
            if isinstance(member, functools.cached_property):
                getattr(facts, name)
    return spec


def _shard_layout(value: str | ShardLayout) -> ShardLayout | None:
    """The enum; None for "auto"."""
    if value == "auto":
        return None
    try:
        return ShardLayout(value)
    except ValueError:
        raise PlanError(
            bad("shard_layout", repr(value), "'padded', 'unpadded', 'auto' or a ShardLayout", "mend the name")
        ) from None


def _plan_alone(
    params: Any,
    mesh: Mesh,
    placements: Placements,
    patterns: Sequence[str],
    precision: MixedPrecisionPolicy,
    shard_layout: ShardLayout | None,
    block_size: int,
    owners: Mapping[str, int] | None,
    grad_scale: float,
    runtime: RuntimePolicy,
    namespace: str,
) -> ShardSpec:
    """The spec as this rank sees it, communicators left out."""
    if not isinstance(placements, Placements):
        raise PlanError(bad("placements", repr(placements), "Placements", "call a preset, such as zero3()"))
    check_placements(placements, mesh.ndim)
    check_precision(precision)
    check_runtime(runtime)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise PlanError(bad("block_size", block_size, "a positive integer", "leave it out for single rows"))
    if not isinstance(grad_scale, (int, float)) or not math.isfinite(grad_scale):
        raise PlanError(bad("grad_scale", grad_scale, "a finite number", "leave it out for the mean over ranks"))
    placements = with_block_size(placements, block_size)
    tensors, paths, template = tree.flatten(params, namespace)
    tree.check_paths(paths)
    leaves = _leaves(tensors, paths, patterns)
    leaves, groups = _groups(
        tensors,
        leaves,
        mesh,
        placements,
        precision,
        shard_layout,
        owners,
        float(grad_scale),
        runtime.store_compute_weights,
    )
    if not any(leaf.requires_grad for leaf in leaves):
        raise PlanError(
            bad(
                "params",
                f"{len(leaves)} tensors of which none requires grad",
                "something to train",
                "give nn.Parameters, or call requires_grad_() on what should be trained",
            )
        )
    present = dict.fromkeys(leaf.unit for leaf in leaves)
    order = (*(unit for unit in present if not unit), *(unit for unit in present if unit))
    units_module.check_patterns("runtime.keep_gathered", runtime.keep_gathered)
    for pattern in runtime.keep_gathered:
        if not any(units_module.matches(pattern, units_module.split(unit)) for unit in order):
            raise PlanError(
                bad(
                    "runtime.keep_gathered",
                    repr(pattern),
                    f"a pattern that matches one of the units {order[:6]}",
                    "mend the pattern or leave it out",
                )
            )
    if tree.is_mixed(template):
        for unit in order:
            _check_unit_is_one_subtree(unit, leaves, template)
    lines = _description(leaves, groups, mesh, runtime)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return ShardSpec(
        leaves=leaves,
        groups=groups,
        units=order,
        template=template,
        mesh=mesh,
        placements=placements,
        runtime=runtime,
        namespace=namespace,
        text_digest=digest,
        anchor=torch.zeros((), device=collectives.device_of(mesh), requires_grad=True),
    )


def _leaves(
    tensors: Sequence[Any], paths: Sequence[units_module.Path], patterns: Sequence[str]
) -> tuple[LeafSpec, ...]:
    """Leaves with their units; groups are still to come."""
    unit_of = units_module.assign_units(paths, patterns)
    leaves = []
    for tensor, path, unit in zip(tensors, paths, unit_of, strict=True):
        where = ".".join(path)
        if not isinstance(tensor, torch.Tensor):
            raise PlanError(
                bad(
                    "params",
                    f"a {type(tensor).__name__} at {where!r}",
                    "tensors only",
                    "leave other values out of the tree, or register its container with optree and name `namespace`",
                )
            )
        if tensor.is_sparse or tensor.layout != torch.strided:
            raise PlanError(bad("params", f"a {tensor.layout} tensor at {where!r}", "strided tensors", "densify it"))
        leaves.append(LeafSpec(where, tensor.shape, tensor.dtype, tensor.requires_grad, unit))
    return tuple(leaves)


def _check_unit_is_one_subtree(unit: str, leaves: Sequence[LeafSpec], template: tree.Template) -> None:
    keep = {number for number, leaf in enumerate(leaves) if leaf.unit == unit}
    found = set(tree.leaf_indices(tree.subtree(template, units_module.split(unit), keep)))
    if found != keep:
        raise PlanError(
            bad(
                "params",
                f"unit {unit!r} both in a nested container and in dotted keys (at {leaves[min(keep - found)].path!r})",
                "a unit in one of the two",
                "nest the dicts, or flatten them",
            )
        )


def tie_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one memory seen the same way: tied parameters."""
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _groups(
    tensors: Sequence[torch.Tensor],
    leaves: tuple[LeafSpec, ...],
    mesh: Mesh,
    placements: Placements,
    precision: MixedPrecisionPolicy,
    shard_layout: ShardLayout | None,
    owners: Mapping[str, int] | None,
    grad_scale: float,
    store_compute: bool,
) -> tuple[tuple[LeafSpec, ...], tuple[GroupSpec, ...]]:
    """Group the leaves by (unit, dtype, requires_grad); tied leaves share one tensor."""
    first_of: dict[tuple[Any, ...], int] = {}
    members: dict[tuple[str, torch.dtype, bool], list[int]] = {}
    tied_to: list[int] = []
    for number, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True)):
        first = first_of.setdefault(tie_key(tensor), number)
        tied_to.append(first)
        if first != number:
            _check_tie(leaves[first], leaf)
            continue
        members.setdefault((leaf.unit, leaf.dtype, leaf.requires_grad), []).append(number)
    axes = tuple(Axis(mesh.size(axis), coordinate) for axis, coordinate in enumerate(mesh.get_coordinate() or ()))
    groups: list[GroupSpec] = []
    slot: dict[int, tuple[int, int]] = {}
    for (unit, dtype, requires_grad), numbers in members.items():
        dtypes = precision.resolve(dtype, requires_grad=requires_grad)
        ordered = _aligned_order(numbers, leaves, dtypes)
        shapes = [leaves[number].shape for number in ordered]
        paths = tuple(leaves[number].path for number in ordered)
        kind = f"{str(dtype).removeprefix('torch.')}{'' if requires_grad else ' frozen'}"
        groups.append(
            GroupSpec(
                name=f"{unit or '(root)'} {kind}",
                unit=unit,
                number=len(groups),
                dtype=dtype,
                requires_grad=requires_grad,
                paths=paths,
                layout=_layout(shapes, paths, placements, axes, shard_layout, owners),
                placements=placements,
                dtypes=dtypes,
                grad_scale=grad_scale,
                store_compute=store_compute,
                mesh=mesh,
                axes=axes,
            )
        )
        slot.update((number, (len(groups) - 1, index)) for index, number in enumerate(ordered))
    _check_owners(owners, groups, placements)
    placed = tuple(
        dataclasses.replace(leaf, group=slot[first][0], index=slot[first][1])
        for leaf, first in zip(leaves, tied_to, strict=True)
    )
    return placed, tuple(groups)


def _check_tie(first: LeafSpec, second: LeafSpec) -> None:
    if first.unit != second.unit:
        raise PlanError(
            bad(
                "params",
                f"one tensor at {first.path!r} (unit {first.unit!r}) and {second.path!r} (unit {second.unit!r})",
                "tied tensors in one unit",
                "choose unit patterns that put both in the same unit, or in the root",
            )
        )
    if first.requires_grad != second.requires_grad:
        raise PlanError(
            bad(
                "params",
                f"one memory at {first.path!r} and {second.path!r}, of which one requires grad",
                "tied tensors that agree about requires_grad",
                "tie the tensor itself, or copy it",
            )
        )


def _aligned_order(numbers: Sequence[int], leaves: tuple[LeafSpec, ...], dtypes: GroupDtypes) -> list[int]:
    """Tensors that keep the next one on a 16-byte boundary first, odd-sized ones last, otherwise in order."""
    size = min(dtypes.compute.itemsize, dtypes.main.itemsize)
    return sorted(numbers, key=lambda number: leaves[number].shape.numel() * size % ALIGNMENT != 0)


def _layout(
    shapes: Sequence[torch.Size],
    paths: Sequence[str],
    placements: Placements,
    axes: Sequence[Axis],
    shard_layout: ShardLayout | None,
    owners: Mapping[str, int] | None,
) -> GlobalLayout:
    """The layout of one group over all the shards that its finest placement makes."""
    order = sharded_axes(placements.optimizer)
    shards = math.prod(axes[axis].size for axis in order)
    kinds = {type(placements.optimizer[axis]) for axis in order}
    if TensorAtomic in kinds:
        missing = [path for path in paths if path not in (owners or {})]
        if missing:
            raise PlanError(
                bad(
                    "owners",
                    f"no owner for {missing[0]!r} (and {len(missing) - 1} more)",
                    f"a shard in [0, {shards}) for every path",
                    "add it to owners",
                )
            )
        assert owners is not None
        return layout_builder.build_for_tensor_atomic(shapes, shards, tensor_owners=[owners[path] for path in paths])
    blocks = {p.block_size if isinstance(p, BlockAtomic) else 1 for p in placements.optimizer if p.is_sharded}
    block_size = math.lcm(*blocks) if blocks else 1
    padded = layout_builder.build_row_atomic_layout(
        shapes, shards, block_size=block_size, shard_layout=shard_layout or ShardLayout.PADDED
    )
    if shard_layout is not None:
        return padded
    ragged = layout_builder.build_row_atomic_layout(
        shapes, shards, block_size=block_size, shard_layout=ShardLayout.UNPADDED
    )
    widest = max(r.stop - r.start for r in map(ragged.rank_range, range(shards)))
    # Ragged segments cost a copy on backends without an uneven gather: worth it where padding exceeds 1 part in 32.
    return ragged if widest * shards * 33 < padded.size * 32 else padded


def _check_owners(owners: Mapping[str, int] | None, groups: Sequence[GroupSpec], placements: Placements) -> None:
    if owners is None:
        return
    if not any(isinstance(p, TensorAtomic) for p in placements.optimizer):
        raise PlanError(
            bad(
                "owners",
                "owners",
                "None without a TensorAtomic placement",
                "shard with TensorAtomic(), or use plan_owners for owner compute on row shards",
            )
        )
    known = {path for group in groups for path in group.paths}
    unknown = [path for path in owners if path not in known]
    if unknown:
        raise PlanError(bad("owners", repr(unknown[0]), "paths of planned tensors", "see spec.leaves for the paths"))


def _description(
    leaves: Sequence[LeafSpec], groups: Sequence[GroupSpec], mesh: Mesh, runtime: RuntimePolicy
) -> list[str]:
    """What ranks must agree on, a line a fact, leaves first."""
    lines = [
        f"leaf {leaf.path!r}: {tuple(leaf.shape)} {leaf.dtype} requires_grad={leaf.requires_grad} unit={leaf.unit!r} "
        f"group={leaf.group} index={leaf.index}"
        for leaf in leaves
    ]
    for group in groups:
        numbers = hashlib.sha256(repr((group.layout.tensor_to_offset, group.layout.rank_to_offset)).encode())
        lines.append(
            f"group {group.name!r}: size={group.layout.size} layout={numbers.hexdigest()[:16]} "
            f"{group.placements} {group.dtypes} grad_scale={group.grad_scale}"
        )
    lines.append(f"mesh {tuple(mesh.size(axis) for axis in range(mesh.ndim))} {mesh.mesh_dim_names}")
    lines.append(f"runtime {runtime}")
    return lines


def _agree(mesh: Mesh, spec: ShardSpec | None, failure: Exception | None) -> None:
    """Raise on every rank if a rank failed to plan or planned something else."""
    mine = spec.digest() if spec is not None else f"error: {failure}"
    digests = collectives.exchange_objects(mesh, mine)
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, text in enumerate(digests) if text.startswith("error: ")]
    if failed:
        rank, text = failed[0]
        raise PlanError(f"`params` could not be planned on rank {rank} of the mesh: {text.removeprefix('error: ')}")
    if all(digest == digests[0] for digest in digests):
        return
    assert spec is not None
    described = collectives.exchange_objects(mesh, _description(spec.leaves, spec.groups, spec.mesh, spec.runtime))
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = described[0], described[other]
    line = next((i for i in range(max(len(first), len(second))) if first[i : i + 1] != second[i : i + 1]), 0)
    said = [lines[line] if line < len(lines) else "nothing more" for lines in (first, second)]
    raise PlanError(
        bad(
            "params",
            f"a plan that differs between ranks: rank 0 of the mesh has «{said[0]}», rank {other} has «{said[1]}»",
            "the same tree, in the same order, and the same options on every rank",
            "build the model the same way everywhere",
        )
    )
