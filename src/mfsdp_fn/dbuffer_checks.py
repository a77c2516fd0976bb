"""What a `DBuffer` is made of, refused where it can't be: mesh, layout, placements, dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .checks import shown
from .communicators import Mesh
from .errors import LayoutError, PlanError, StateError, bad
from .layout import GlobalLayout, validate_row_atomic
from .mesh import AbstractMesh, check_abstract_mesh
from .placement import BlockAtomic, Placement, TensorAtomic, check_placement, sharded_axes


def checked_placements(layout: GlobalLayout, placements: Sequence[Placement], mesh: Mesh) -> tuple[Placement, ...]:
    """The placements as a tuple, checked against mesh and layout.

    Raises:
        PlanError: something that is no placement or no mesh.
        StateError: not one placement an axis.
        LayoutError: a layout that is none or doesn't fit the placements.
    """
    check_layout(layout)
    if not isinstance(mesh, Mesh):
        raise PlanError(bad("mesh", shown(mesh), "a DeviceMesh or an AbstractMesh", "pass the plan's mesh"))
    if isinstance(mesh, AbstractMesh):
        check_abstract_mesh(mesh)
    if not isinstance(placements, (tuple, list)) or len(placements) != mesh.ndim:
        raise StateError(
            bad("placements", repr(placements), f"one placement for each of {mesh.ndim} axes", "outer to inner")
        )
    for axis, placement in enumerate(placements):
        check_placement("placements", axis, placement)
    parts = 1
    for axis in sharded_axes(tuple(placements)):
        parts *= mesh.size(axis)
        if layout.dp_size % parts:
            raise LayoutError(
                bad(
                    "layout",
                    f"{layout.dp_size} ranks",
                    f"a multiple of the {parts} shards that {tuple(placements)} make",
                    "build it for as many ranks as the sharded axes have together",
                )
            )
        _check_boundaries(layout.coarsen(layout.dp_size // parts), placements[axis])
    return tuple(placements)


def check_layout(layout: Any) -> None:
    """Refuse what isn't a layout.

    Raises:
        LayoutError: naming the argument.
    """
    if not isinstance(layout, GlobalLayout):
        raise LayoutError(bad("layout", shown(layout), "a GlobalLayout", "pass group.layout, or build one"))


def check_dtype(dtype: Any) -> None:
    """Refuse what is neither a dtype nor None.

    Raises:
        StateError: naming the argument.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise StateError(bad("dtype", shown(dtype), "a torch.dtype or None", "write torch.float32, say"))


def _check_boundaries(layout: GlobalLayout, placement: Placement) -> None:
    """Refuse rank boundaries inside what `placement` keeps together."""
    if not isinstance(placement, TensorAtomic):
        validate_row_atomic(layout, placement.block_size if isinstance(placement, BlockAtomic) else 1)
        return
    for index, shape in enumerate(layout.tensor_shapes):
        span = layout.tensor_range(index)
        holders = [rank for rank in layout.ranks_of(index) if layout.local_range(index, rank).size]
        if math.prod(shape) and len(holders) > 1:
            raise LayoutError(
                bad(
                    "layout",
                    f"tensor {index} at [{span.start}, {span.stop}) on ranks {holders}",
                    "whole tensors on each rank, for TensorAtomic",
                    "pass layout=build_for_tensor_atomic(shapes, ranks, tensor_owners=…)",
                )
            )
