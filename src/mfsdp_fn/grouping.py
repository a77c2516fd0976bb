"""Which leaves share a flat buffer, and how it is laid out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import layout_builder
from .collectives import Axis, Mesh
from .errors import PlanError, bad
from .group import GroupSpec
from .layout import GlobalLayout
from .layout_choice import ALIGNMENT, THRESHOLD, LayoutChoice, choose_layout, unit_of
from .placement import BlockAtomic, Placements, ShardLayout, TensorAtomic, sharded_axes
from .precision import GroupDtypes, MixedPrecisionPolicy
from .row_rules import split_by_rows
from .spec import LeafSpec


def tie_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one memory seen the same way: tied parameters."""
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def make_groups(
    tensors: Sequence[torch.Tensor],
    leaves: tuple[LeafSpec, ...],
    mesh: Mesh,
    placements: Placements,
    precision: MixedPrecisionPolicy,
    shard_layout: ShardLayout | None,
    owners: Mapping[str, int] | None,
    grad_scale: float,
    store_compute: bool,
    split_by_row_size: bool = False,
) -> tuple[tuple[LeafSpec, ...], tuple[GroupSpec, ...]]:
    """Group the leaves by (unit, dtype, requires_grad), perhaps by row size too; tied leaves share one tensor."""
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
        kind = f"{str(dtype).removeprefix('torch.')}{'' if requires_grad else ' frozen'}"
        for rows, members_, layout, choice in _parts(
            [leaves[number] for number in ordered],
            placements,
            axes,
            shard_layout,
            owners,
            unit_of((dtypes.compute.itemsize, dtypes.reduce.itemsize)),
            split_by_row_size,
        ):
            groups.append(
                GroupSpec(
                    name=f"{unit or '(root)'} {kind}{rows}",
                    unit=unit,
                    number=len(groups),
                    dtype=dtype,
                    requires_grad=requires_grad,
                    paths=tuple(leaves[ordered[place]].path for place in members_),
                    layout=layout,
                    placements=placements,
                    dtypes=dtypes,
                    grad_scale=grad_scale,
                    store_compute=store_compute,
                    mesh=mesh,
                    axes=axes,
                    choice=choice,
                )
            )
            slot.update((ordered[place], (len(groups) - 1, index)) for index, place in enumerate(members_))
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
    if first.leading_dims != second.leading_dims:
        raise PlanError(
            bad(
                "leading_dims",
                f"{first.leading_dims} for {first.path!r} and {second.leading_dims} for {second.path!r}, one tensor",
                "one number for tied tensors",
                "choose patterns that match both paths, or none",
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


Part = tuple[str, list[int], GlobalLayout, LayoutChoice]


def _parts(
    leaves: Sequence[LeafSpec],
    placements: Placements,
    axes: Sequence[Axis],
    shard_layout: ShardLayout | None,
    owners: Mapping[str, int] | None,
    unit: int,
    split_by_row_size: bool,
) -> list[Part]:
    """The groups that some leaves make: what to add to the name, which of the leaves, their layout and why it is."""
    order = sharded_axes(placements.optimizer)
    shards = math.prod(axes[axis].size for axis in order)
    everything = list(range(len(leaves)))
    if any(isinstance(placements.optimizer[axis], TensorAtomic) for axis in order):
        layout = _owned_layout(leaves, shards, owners)
        return [("", everything, layout, LayoutChoice("owners", "each tensor whole at its owner"))]
    blocks = {p.block_size if isinstance(p, BlockAtomic) else 1 for p in placements.optimizer if p.is_sharded}
    block_size = math.lcm(*blocks) if blocks else 1

    def choose(places: Sequence[int]) -> tuple[GlobalLayout, LayoutChoice]:
        depths = tuple(leaves[place].leading_dims for place in places)
        return choose_layout(
            [leaves[place].shape for place in places],
            shards,
            block_size=block_size,
            shard_layout=shard_layout,
            unit=unit,
            leading_dims=depths if any(depth > 1 for depth in depths) else (),
        )

    layout, choice = choose(everything)
    numels = {place: leaf.shape.numel() for place, leaf in enumerate(leaves)}
    # What more collectives cost is worth paying only where padding is more than little.
    if split_by_row_size and choice.padding > THRESHOLD * sum(numels.values()):
        rows = {place: leaf.shape[leaf.leading_dims :].numel() for place, leaf in enumerate(leaves)}
        parts = [
            (f" rows of {row}", places, *choose(places)) for row, places in split_by_rows(everything, rows, numels)
        ]
        if sum(part[3].padding for part in parts) < choice.padding:
            return parts
    return [("", everything, layout, choice)]


def _owned_layout(leaves: Sequence[LeafSpec], shards: int, owners: Mapping[str, int] | None) -> GlobalLayout:
    missing = [leaf.path for leaf in leaves if leaf.path not in (owners or {})]
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
    shapes = [leaf.shape for leaf in leaves]
    return layout_builder.build_for_tensor_atomic(shapes, shards, tensor_owners=[owners[leaf.path] for leaf in leaves])


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
