"""Which leaves share a flat buffer, and how it is laid out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import layout_builder, ragged
from .by_unit import UnitSettings
from .communicators import Axis, Mesh
from .errors import PlanError, bad
from .group import GroupSpec
from .group_order import aligned_order, rotated_order, turns_of
from .group_parts import group_parts
from .layout import GlobalLayout
from .layout_choice import LayoutChoice, Wire, choose_layout, unit_of
from .placement import BlockAtomic, Placements, ShardLayout, TensorAtomic, sharded_axes
from .precision import GroupDtypes, MixedPrecisionPolicy
from .spec import LeafSpec
from .tensor_owners import shards_of_owners
from .tensor_parallel import local_of


def tie_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one memory seen the same way: tied parameters."""
    local = local_of(tensor)
    if local.device.type == "meta" or not local.numel():
        return (id(tensor),)
    return (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())


def make_groups(
    tensors: Sequence[torch.Tensor],
    leaves: tuple[LeafSpec, ...],
    settings: Mapping[str, UnitSettings],
    precision: MixedPrecisionPolicy,
    shard_layout: ShardLayout | None,
    owners: Mapping[str, int] | None,
    store_compute: bool,
    split_by_row_size: bool = False,
    use_symmetric_memory: bool = False,
) -> tuple[tuple[LeafSpec, ...], tuple[GroupSpec, ...]]:
    """Group the leaves by (unit, dtype, requires_grad), perhaps by row size too; tied leaves share one tensor.

    `settings` are by unit.
    """
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
    turns = turns_of(members, leaves)
    places = {unit: (places_on(one.mesh), one.placements) for unit, one in settings.items()}
    owner_of = shards_of_owners(owners, leaves, tied_to, places)
    groups: list[GroupSpec] = []
    slot: dict[int, tuple[int, int]] = {}
    for (unit, dtype, requires_grad), numbers in members.items():
        axes, placements = places[unit]
        dtypes = precision.resolve(dtype, requires_grad=requires_grad)
        ordered = aligned_order(numbers, leaves, dtypes)
        kind = f"{str(dtype).removeprefix('torch.')}{'' if requires_grad else ' frozen'}"
        wire = Wire.EQUAL_ONLY if use_symmetric_memory else wire_of(settings[unit].mesh)
        turned = rotated_order(ordered, leaves, dtypes, *turns[unit, dtype, requires_grad])

        def layout_of(
            part: Sequence[int],
            dtypes: GroupDtypes = dtypes,
            placements: Placements = placements,
            axes: Sequence[Axis] = axes,
            wire: Wire = wire,
        ) -> tuple[GlobalLayout, LayoutChoice]:
            width = unit_of((dtypes.compute.itemsize, dtypes.reduce.itemsize))
            owned_by = [owner_of.get(number, 0) for number in part]
            return _layout([leaves[number] for number in part], owned_by, placements, axes, shard_layout, width, wire)

        orders = [ordered] if turned == ordered else [turned, ordered]
        for rows, part, layout, choice in group_parts(orders, leaves, layout_of, split=split_by_row_size):
            groups.append(
                GroupSpec(
                    name=f"{unit or '(root)'} {kind}{rows}",
                    unit=unit,
                    number=len(groups),
                    dtype=dtype,
                    requires_grad=requires_grad,
                    paths=tuple(leaves[number].path for number in part),
                    layout=layout,
                    placements=placements,
                    dtypes=dtypes,
                    grad_scale=settings[unit].grad_scale,
                    store_compute=store_compute,
                    mesh=settings[unit].mesh,
                    axes=axes,
                    choice=choice,
                )
            )
            slot.update((number, (len(groups) - 1, index)) for index, number in enumerate(part))
    placed = tuple(
        dataclasses.replace(leaf, group=slot[first][0], index=slot[first][1])
        for leaf, first in zip(leaves, tied_to, strict=True)
    )
    return placed, tuple(groups)


def places_on(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes of a mesh as this rank sees them, communicators left out."""
    return tuple(Axis(mesh.size(axis), coordinate) for axis, coordinate in enumerate(mesh.get_coordinate() or ()))


def wire_of(mesh: Mesh) -> Wire:
    """How uneven segments travel over `mesh` in eager code. Meshes without processes stand for NCCL's.

    The debug mode, in which NCCL's are padded too, is left out: a layout must not depend on it.
    """
    if isinstance(mesh, DeviceMesh) and not (mesh.device_type == "cuda" and ragged.is_nccl(mesh.get_group(0))):
        return Wire.PADDED
    return Wire.AS_THEY_ARE


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
    if first.leading_dims != second.leading_dims:
        raise PlanError(
            bad(
                "leading_dims",
                f"{first.leading_dims} for {first.path!r} and {second.leading_dims} for {second.path!r}, one tensor",
                "one number for tied tensors",
                "choose patterns that match both paths, or none",
            )
        )
    if first.parallel != second.parallel:
        raise PlanError(
            bad(
                "params",
                f"one memory at {first.path!r} and {second.path!r}, of which one lies otherwise over other axes",
                "tied DTensors with one placement",
                "tie the tensor itself, or copy it",
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


def _layout(
    leaves: Sequence[LeafSpec],
    owners: Sequence[int],
    placements: Placements,
    axes: Sequence[Axis],
    shard_layout: ShardLayout | None,
    unit: int,
    wire: Wire,
) -> tuple[GlobalLayout, LayoutChoice]:
    """The layout of one group over all the shards that its finest placement makes, and why it is that one."""
    order = sharded_axes(placements.optimizer)
    shards = math.prod(axes[axis].size for axis in order)
    shapes = [leaf.shape for leaf in leaves]
    if any(isinstance(placements.optimizer[axis], TensorAtomic) for axis in order):
        layout = layout_builder.build_for_tensor_atomic(shapes, shards, tensor_owners=owners)
        return layout, LayoutChoice("owners", "each tensor whole at its owner")
    blocks = {p.block_size if isinstance(p, BlockAtomic) else 1 for p in placements.optimizer if p.is_sharded}
    depths = tuple(leaf.leading_dims for leaf in leaves)
    return choose_layout(
        tuple(shapes),
        shards,
        block_size=math.lcm(*blocks) if blocks else 1,
        shard_layout=shard_layout,
        unit=unit,
        leading_dims=depths if any(depth > 1 for depth in depths) else (),
        wire=wire,
    )
