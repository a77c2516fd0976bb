"""`plan`: from a tree, a mesh and placements to a spec that every rank agrees on."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import collectives, tree
from . import units as units_module
from .agreement import agree, description
from .collectives import Mesh
from .errors import PlanError, bad
from .grouping import make_groups
from .mesh import AbstractMesh, check_abstract_mesh
from .placement import Placements, ShardLayout, check_placements, with_block_size
from .precision import MixedPrecisionPolicy, check_precision
from .row_rules import check_row_rules, with_leading_dims
from .runtime import RuntimePolicy, check_runtime
from .simulated_mesh import SimulatedMesh
from .spec import LeafSpec, ShardSpec, ready
from .staging import check_symmetric_memory, with_symmetric_memory


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
    leading_dims: int | Mapping[str, int] = 1,
    split_by_row_size: bool = False,
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
        shard_layout: "padded", "unpadded", "auto", or the enum. Auto pads a group unless that makes its largest
            segment more than 1/32 longer; `spec.explain()` has both predictions. Padded segments are those of
            `build_for_row_atomic`, or shorter where another placement of the tensors allows it.
        block_size: rows that are never cut apart.
        owners: for `TensorAtomic`, the owner of every tensor, by path: a rank of the mesh (or, where only some axes
            are sharded, of the sub-mesh of those), row-major. A tied tensor's owner may stand at any of its paths.
        grad_scale: factor on every gradient, beside the mean over ranks.
        runtime: what is kept gathered and how far ahead things are launched.
        namespace: the optree namespace of the tree's registered containers.
        leading_dims: how many leading dims count the rows of a tensor that has more: a number, or numbers by pattern
            (as in `spec.select`). With 2 an (E, a, b) tensor is cut as E * a rows of b elements, inside experts.
        split_by_row_size: make several groups of one, by row size, where that saves padding and there is more than
            1/32 of it. Each is gathered and reduced by collectives of its own.

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
    elif not isinstance(mesh, (DeviceMesh, SimulatedMesh)):
        raise PlanError(bad("mesh", repr(mesh), "a DeviceMesh or an AbstractMesh", "make one with init_device_mesh(…)"))
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
            leading_dims,
            split_by_row_size,
        )
    except Exception as error:  # whatever it is: other ranks must not wait for this one
        failure = error  # told to the other ranks first: they are about to compare digests
    agree(mesh, spec, failure)
    assert spec is not None
    axes = collectives.axes_of(mesh, separate_reductions=runtime.overlap_allgather_reduction)
    groups = tuple(dataclasses.replace(group, axes=collectives.of_group(axes, group.name)) for group in spec.groups)
    spec = dataclasses.replace(spec, groups=groups)
    return ready(with_symmetric_memory(spec) if runtime.use_symmetric_memory else spec)


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
    leading_dims: int | Mapping[str, int],
    split_by_row_size: bool,
) -> ShardSpec:
    """The spec as this rank sees it, communicators left out."""
    if not isinstance(namespace, str):
        raise PlanError(bad("namespace", repr(namespace), "the name of an optree namespace", "leave it out for none"))
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
    leaves = with_leading_dims(_leaves(tensors, paths, patterns), leading_dims)
    check_row_rules(placements, shard_layout, leading_dims, split_by_row_size)
    leaves, groups = make_groups(
        tensors,
        leaves,
        mesh,
        placements,
        precision,
        shard_layout,
        owners,
        float(grad_scale),
        runtime.store_compute_weights,
        split_by_row_size,
    )
    if runtime.use_symmetric_memory:
        check_symmetric_memory(groups)
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
    lines = description(leaves, groups, mesh, runtime)
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
