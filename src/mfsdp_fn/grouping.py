"""Which leaves share a flat buffer, and how it is laid out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import layout_builder
from .by_unit import UnitSettings
from .collectives import Axis, Mesh
from .errors import PlanError, bad
from .explain import ALIGNMENT
from .group import GroupSpec
from .layout import GlobalLayout
from .placement import BlockAtomic, Placements, ShardLayout, TensorAtomic, sharded_axes
from .precision import GroupDtypes, MixedPrecisionPolicy
from .spec import LeafSpec
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
) -> tuple[tuple[LeafSpec, ...], tuple[GroupSpec, ...]]:
    """Group the leaves by (unit, dtype, requires_grad); tied leaves share one tensor. `settings` are by unit."""
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
    groups: list[GroupSpec] = []
    slot: dict[int, tuple[int, int]] = {}
    for (unit, dtype, requires_grad), numbers in members.items():
        mesh, placements = settings[unit].mesh, settings[unit].placements
        axes = places_on(mesh)
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
                grad_scale=settings[unit].grad_scale,
                store_compute=store_compute,
                mesh=mesh,
                axes=axes,
            )
        )
        slot.update((number, (len(groups) - 1, index)) for index, number in enumerate(ordered))
    _check_owners(owners, groups)
    placed = tuple(
        dataclasses.replace(leaf, group=slot[first][0], index=slot[first][1])
        for leaf, first in zip(leaves, tied_to, strict=True)
    )
    return placed, tuple(groups)


def places_on(mesh: Mesh) -> tuple[Axis, ...]:
    """The axes of a mesh as this rank sees them, communicators left out."""
    return tuple(Axis(mesh.size(axis), coordinate) for axis, coordinate in enumerate(mesh.get_coordinate() or ()))


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


def _check_owners(owners: Mapping[str, int] | None, groups: Sequence[GroupSpec]) -> None:
    if owners is None:
        return
    if not any(isinstance(p, TensorAtomic) for group in groups for p in group.placements.optimizer):
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
