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
from .explain import ALIGNMENT
from .group import GroupSpec
from .layout import GlobalLayout
from .placement import BlockAtomic, Placements, ShardLayout, TensorAtomic, sharded_axes
from .precision import GroupDtypes, MixedPrecisionPolicy
from .spec import LeafSpec
from .tensor_owners import shards_of_owners


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
    owner_of = shards_of_owners(owners, leaves, tied_to, axes, placements)
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
                layout=_layout(shapes, [owner_of.get(n, 0) for n in ordered], placements, axes, shard_layout),
                placements=placements,
                dtypes=dtypes,
                grad_scale=grad_scale,
                store_compute=store_compute,
                mesh=mesh,
                axes=axes,
            )
        )
        slot.update((number, (len(groups) - 1, index)) for index, number in enumerate(ordered))
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
    owners: Sequence[int],
    placements: Placements,
    axes: Sequence[Axis],
    shard_layout: ShardLayout | None,
) -> GlobalLayout:
    """The layout of one group over all the shards that its finest placement makes."""
    order = sharded_axes(placements.optimizer)
    shards = math.prod(axes[axis].size for axis in order)
    if any(isinstance(placements.optimizer[axis], TensorAtomic) for axis in order):
        return layout_builder.build_for_tensor_atomic(shapes, shards, tensor_owners=owners)
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
