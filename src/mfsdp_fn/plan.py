"""`plan`: from a tree, a mesh and placements to a spec that every rank agrees on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import communicators, tensor_parallel, tree
from . import units as units_module
from .agreement import agree, description
from .by_unit import check_keep_gathered, default_mesh, settings_of
from .communicators import Mesh
from .errors import PlanError, bad
from .grouping import make_groups, places_on
from .placement import Placements, ShardLayout
from .precision import MixedPrecisionPolicy, check_precision
from .row_rules import check_row_rules, with_leading_dims
from .runtime import RuntimePolicy, check_runtime
from .spec import LeafSpec, ShardSpec, ready
from .staging import check_symmetric_memory, with_symmetric_memory


def plan(
    params: Any,
    mesh: Mesh | Mapping[str, Mesh],
    placements: Placements | Mapping[str, Placements],
    *,
    units: Sequence[str] = (),
    precision: MixedPrecisionPolicy | None = None,
    shard_layout: str | ShardLayout = ShardLayout.PADDED,
    block_size: int = 1,
    owners: Mapping[str, int] | None = None,
    grad_scale: float | Mapping[str, float] = 1.0,
    runtime: RuntimePolicy | None = None,
    namespace: str = "",
    leading_dims: int | Mapping[str, int] = 1,
    split_by_row_size: bool = False,
) -> ShardSpec:
    """Plan how a pytree of tensors is sharded.

    Collective over the mesh: digests are compared (one object all-gather an axis), communicators are made and
    warmed. Nothing is allocated for the parameters; meta tensors will do.

    `mesh`, `placements` and `grad_scale` may be given by unit: a dict from unit patterns to values. A pattern applies
    to the units that it matches and to those inside them, the longest wins, and ``""`` is the default. So expert
    parallelism is one plan: every rank's `params` hold its own experts only, and
    ``mesh={"": dp, "blocks.*.experts": ep_mesh["edp"]}`` shards those over the ranks that hold the same ones. Then

    - the default mesh is the widest: the other meshes' ranks are among its ranks, and it falls into their cells, which
      hold different tensors (each rank's own) of the same shapes;
    - a gradient is the mean over its own unit's ranks times `grad_scale`. Tokens that come from `ep` ranks add up in an
      expert's gradient: ``grad_scale={"blocks.*.experts": 1 / ep}`` makes it the mean over the whole batch.

    Parameters that are DTensors already, over other axes (after `parallelize_module`, say), keep those: this rank's
    parts of them are sharded over `mesh`, which must not have those axes, and `unshard` gives DTensors again. Plain
    tensors beside them count as replicated over those axes.

    Args:
        params: pytree of tensors. A plain tensor is trainable only if it requires grad.
        mesh: a `DeviceMesh`, or an `AbstractMesh` for planning without processes; or such meshes by unit.
        placements: a preset (`ddp`, `zero1`, `zero2`, `zero3`, `hsdp`, `hfsdp`) or `Placements`; or these by unit.
        units: patterns of subtrees that are gathered together; what none matches goes to the root unit ``""``.
        precision: dtypes of the buffers.
        shard_layout: "padded", "unpadded", "auto", or the enum. Auto pads a group unless that makes its largest
            segment more than 1/32 longer, or else all that is gathered more than 1/8 (and 64 KiB) longer where uneven
            segments travel as they are: over NCCL, and so planned for an `AbstractMesh`. `spec.explain()` has the
            predictions. Padded segments are those of `build_for_row_atomic`, or shorter where another placement of
            the tensors allows it. Other values than "padded" are refused where no rows are cut (`ddp`, `TensorAtomic`).
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
    >>> meshes = {"": mf.AbstractMesh((4,), ("dp",)), "l.*": mf.AbstractMesh((2,), ("edp",))}
    >>> spec = mf.plan(params, meshes, mf.zero3(), units=("l.*",), grad_scale={"l.*": 1 / 2})
    >>> [(group.ranks, group.scale) for group in spec.groups]
    [(4, 0.25), (2, 0.25)]
    """
    precision = MixedPrecisionPolicy() if precision is None else precision
    runtime = RuntimePolicy() if runtime is None else runtime
    over_all = default_mesh(mesh)
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
    agree(over_all, spec, failure)
    assert spec is not None
    spec = _with_communicators(spec, separate_reductions=runtime.overlap_allgather_reduction)
    return ready(with_symmetric_memory(spec) if runtime.use_symmetric_memory else spec)


def _with_communicators(spec: ShardSpec, *, separate_reductions: bool) -> ShardSpec:
    """The spec with every mesh's communicators, made in one order on every rank."""
    found = {id(mesh): communicators.axes_of(mesh, separate_reductions=separate_reductions) for mesh in spec.meshes}
    groups = tuple(
        dataclasses.replace(group, axes=communicators.of_group(found[id(group.mesh)], group.name))
        for group in spec.groups
    )
    parallel = _first_parallel(spec.leaves)
    beside = () if parallel is None else communicators.axes_of(parallel.mesh, separate_reductions=False)
    axes = communicators.of_group(found[id(spec.mesh)], "")
    return dataclasses.replace(spec, groups=groups, axes=axes, parallel_axes=beside)


def _first_parallel(leaves: Sequence[LeafSpec]) -> tensor_parallel.TensorParallel | None:
    return next((leaf.parallel for leaf in leaves if leaf.parallel is not None), None)


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
    mesh: Any,
    placements: Any,
    patterns: Sequence[str],
    precision: MixedPrecisionPolicy,
    shard_layout: ShardLayout | None,
    block_size: int,
    owners: Mapping[str, int] | None,
    grad_scale: Any,
    runtime: RuntimePolicy,
    namespace: str,
    leading_dims: int | Mapping[str, int],
    split_by_row_size: bool,
) -> ShardSpec:
    """The spec as this rank sees it, communicators left out."""
    if not isinstance(namespace, str):
        raise PlanError(bad("namespace", repr(namespace), "the name of an optree namespace", "leave it out for none"))
    check_precision(precision)
    check_runtime(runtime)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise PlanError(bad("block_size", block_size, "a positive integer", "leave it out for single rows"))
    tensors, paths, template = tree.flatten(params, namespace)
    tree.check_paths(paths)
    leaves = with_leading_dims(_leaves(tensors, paths, patterns), leading_dims)
    present = dict.fromkeys(leaf.unit for leaf in leaves)
    order = (*(unit for unit in present if not unit), *(unit for unit in present if unit))
    default, settings = settings_of(order, mesh, placements, grad_scale, block_size)
    _check_parallel(leaves, default.mesh)
    used = [settings[unit].placements for unit in order]
    check_row_rules(used, shard_layout, leading_dims, split_by_row_size)
    leaves, groups = make_groups(
        tensors,
        leaves,
        settings,
        precision,
        shard_layout,
        owners,
        runtime.store_compute_weights,
        split_by_row_size,
        runtime.use_symmetric_memory,
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
    check_keep_gathered(runtime.keep_gathered, settings)
    if tree.is_mixed(template):
        for unit in order:
            _check_unit_is_one_subtree(unit, leaves, template)
    lines = description(leaves, groups, default.mesh, runtime)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return ShardSpec(
        leaves=leaves,
        groups=groups,
        units=order,
        template=template,
        mesh=default.mesh,
        axes=places_on(default.mesh),
        placements=default.placements,
        runtime=runtime,
        namespace=namespace,
        text_digest=digest,
        parallel_axes=places_on(parallel.mesh) if (parallel := _first_parallel(leaves)) else (),
        anchor=torch.zeros((), device=communicators.device_of(default.mesh), requires_grad=True),
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
        parallel = tensor_parallel.planned(tensor, where)
        shape = tensor_parallel.local_of(tensor).shape
        leaves.append(LeafSpec(where, shape, tensor.dtype, tensor.requires_grad, unit, parallel=parallel))
    return tuple(leaves)


def _check_parallel(leaves: Sequence[LeafSpec], mesh: Mesh) -> None:
    """DTensors lie over one mesh, and over other axes than data-parallel ones."""
    first: LeafSpec | None = None
    for leaf in leaves:
        if leaf.parallel is None:
            continue
        tensor_parallel.check_beside(leaf.parallel, mesh, leaf.path)
        first = first or leaf
        assert first.parallel is not None
        if not tensor_parallel.same_mesh(leaf.parallel.mesh, first.parallel.mesh):
            raise PlanError(
                bad(
                    "params",
                    f"DTensors over two meshes, at {first.path!r} and {leaf.path!r}",
                    "one mesh for all of them",
                    "put both on a mesh with the axes of both, replicated where they aren't sharded",
                )
            )


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
