"""What `RuntimePolicy.use_symmetric_memory` does to a plan: whether it can be had, how much of it, and who gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from . import symmetric
from .communicators import Axis, device_of, reduction_group
from .errors import PlanError, bad
from .group import GroupSpec
from .spec import ShardSpec

Bytes = tuple[int, int]  # of a whole message, and of a rank's part of it


def check_symmetric_memory(groups: Sequence[GroupSpec]) -> None:
    """Refuse symmetric memory where it can't be.

    Raises:
        PlanError: saying why, or which group is ragged.
    """
    for group in groups:
        moves = (*group.gathers, *group.sync_gathers, *group.grad_scatters, *group.deferred_scatters)
        ragged = next((move.sizes for move in moves if len(set(move.sizes)) > 1), None)
        if ragged is not None:
            raise PlanError(
                bad(
                    "runtime.use_symmetric_memory",
                    f"True with ragged segments {ragged} in group {group.name!r}",
                    "groups of equal segments",
                    "plan with shard_layout='padded', or without symmetric memory",
                )
            )
        reason = symmetric.why_not(group.mesh)
        if reason is not None:
            raise PlanError(
                bad(
                    "runtime.use_symmetric_memory",
                    f"True, but {reason}",
                    "a CUDA mesh of several ranks over NCCL 2.27 or newer",
                    "leave it out",
                )
            )


def largest_messages(groups: Sequence[GroupSpec]) -> list[tuple[Bytes, Bytes]]:
    """For each axis of the groups' one mesh the largest gather and the largest reduction of a step.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"a": torch.ones(8, requires_grad=True), "l.b": torch.ones(2, requires_grad=True)}
    >>> spec = mf.plan(params, mf.AbstractMesh((1, 2), ("outer", "inner")), mf.hsdp(), units=("l",))
    >>> largest_messages(spec.groups)
    [((0, 0), (16, 0)), ((32, 16), (32, 16))]
    """
    ndim = len(groups[0].axes)
    gather: list[Bytes] = [(0, 0)] * ndim
    reduce: list[Bytes] = [(0, 0)] * ndim
    for group in groups:
        compute, wire = group.dtypes.compute.itemsize, group.dtypes.reduce.itemsize
        launches = [
            (gather, move.axis, sum(move.sizes) * compute, max(move.sizes) * compute)
            for move in (*group.gathers, *group.sync_gathers)
        ]
        if group.requires_grad:
            for move in (*group.grad_scatters, *group.deferred_scatters):
                launches.append((reduce, move.axis, sum(move.sizes) * wire, max(move.sizes) * wire))
            launches += [(reduce, axis, group.main_range.size * wire, 0) for axis in group.deferred_all_reduces]
        for most, axis, whole, part in launches:
            number = next(n for n, one in enumerate(group.axes) if one is axis)  # axes of one size compare equal
            most[number] = (max(most[number][0], whole), max(most[number][1], part))
    return list(zip(gather, reduce, strict=True))


def with_symmetric_memory(spec: ShardSpec) -> ShardSpec:
    """The spec whose communicators have symmetric memory for its messages.

    Collective over each axis with several ranks, unless there is enough of it already.
    """
    by_mesh: dict[int, list[GroupSpec]] = {}
    for group in spec.groups:
        by_mesh.setdefault(id(group.mesh), []).append(group)
    axes = {key: _staged_axes(groups) for key, groups in by_mesh.items()}
    groups = tuple(dataclasses.replace(group, axes=axes[id(group.mesh)]) for group in spec.groups)
    return dataclasses.replace(spec, groups=groups)


def _staged_axes(groups: Sequence[GroupSpec]) -> tuple[Axis, ...]:
    mesh = groups[0].mesh
    assert isinstance(mesh, DeviceMesh)  # `check_symmetric_memory` saw to it
    device, staged = device_of(mesh), []
    for number, (axis, (gather, reduce)) in enumerate(zip(groups[0].axes, largest_messages(groups), strict=True)):
        group = mesh.get_group(number)
        if axis.size == 1:
            staged.append(axis)
        elif axis.gather_group == axis.reduce_group:
            both = symmetric.staging_of(group, *map(max, gather, reduce), device=device)
            staged.append(dataclasses.replace(axis, gather_staging=both, reduce_staging=both))
        else:
            gathers = symmetric.staging_of(group, *gather, device=device)
            reductions = symmetric.staging_of(reduction_group(group), *reduce, device=device)
            staged.append(dataclasses.replace(axis, gather_staging=gathers, reduce_staging=reductions))
    return tuple(staged)
