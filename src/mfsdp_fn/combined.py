"""DTensors over data-parallel and other axes at once, from parameters that were DTensors over the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement as TensorPlacement

from .collectives import all_gather
from .communicators import Axis, ranks_of
from .errors import StateError, bad
from .group import GroupSpec
from .spec import ShardSpec
from .tensor_parallel import TensorParallel


def chunk(rows: int, axes: Sequence[Axis], ranks: Sequence[int]) -> tuple[int, int]:
    """First row and number of rows of a plain ``Shard(0)`` over `axes`, outer to inner, at the places `ranks`."""
    start = 0
    for axis, rank in zip(axes, ranks, strict=True):
        size = -(-rows // axis.size)
        first = min(size * rank, rows)
        start, rows = start + first, min(size, rows - first)
    return start, rows


def check_combined(mesh: DeviceMesh | None, spec: ShardSpec) -> None:
    """Refuse a mesh that doesn't have just the data-parallel axes and those of DTensor parameters.

    Raises:
        StateError: naming `mesh`.
    """
    beside = [leaf for leaf in spec.leaves if leaf.parallel is not None]
    if not beside:
        if mesh is not None:
            raise StateError(
                bad("mesh", repr(mesh), "None where no parameter is a DTensor over other axes", "leave it out")
            )
        return
    leaf = beside[0]
    assert leaf.parallel is not None
    others = leaf.parallel.mesh
    for group in {leaf.group: spec.groups[leaf.group] for leaf in beside}.values():
        data = group.mesh
        assert isinstance(data, DeviceMesh)
        wanted = {
            **_axes_by_name(data, "the data-parallel mesh"),
            **_axes_by_name(others, "the DTensors' mesh"),
        }
        got = _axes_by_name(mesh, "`mesh`") if isinstance(mesh, DeviceMesh) else None
        if got != wanted:
            raise StateError(
                bad(
                    "mesh",
                    "nothing" if mesh is None else repr(mesh),
                    f"a mesh with the axes {list(wanted)}, as {leaf.path!r} is a DTensor over other axes",
                    f"pass mesh=world[{', '.join(map(repr, wanted))}]",
                )
            )


def _axes_by_name(mesh: DeviceMesh, what: str) -> dict[str, tuple[int, ...]]:
    """Global ranks along each axis through this rank, by its name."""
    if mesh.mesh_dim_names is None:
        raise StateError(bad("mesh", f"{what} without names", "named axes", "make it with mesh_dim_names=(…)"))
    return {name: ranks_of(mesh, (axis,)) for axis, name in enumerate(mesh.mesh_dim_names)}


def on_both(
    gathered: torch.Tensor,
    group: GroupSpec,
    over: Sequence[TensorPlacement],
    parallel: TensorParallel,
    beside: Sequence[Axis],
    mesh: DeviceMesh,
) -> DTensor:
    """A parameter over all axes of `mesh`.

    Args:
        gathered: this rank's part over the other axes, gathered over data-parallel ones.
        group: its group.
        over: placements on the axes of the group's mesh.
        parallel: how it lies over the other axes.
        beside: those axes.
        mesh: the mesh with both kinds of axes.
    """
    assert isinstance(group.mesh, DeviceMesh)
    names = (group.mesh.mesh_dim_names or (), parallel.mesh.mesh_dim_names or ())
    said = dict(zip(names[0], over, strict=True)) | dict(zip(names[1], parallel.placements, strict=True))
    placements = tuple(said[name] for name in mesh.mesh_dim_names or ())
    rows = Shard(0)
    local = gathered
    if rows in over and rows in parallel.placements:
        local = _with_all_rows(gathered, parallel, beside)
    order = [axis for axis, placement in enumerate(placements) if placement == rows]
    if rows in over:
        axes = [Axis(mesh.size(axis), mesh.get_local_rank(axis)) for axis in order]
        first, count = chunk(local.shape[0], axes, [axis.rank for axis in axes])
        local = local.narrow(0, first, count)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=parallel.shape, stride=parallel.stride
    )


def _with_all_rows(local: torch.Tensor, parallel: TensorParallel, axes: Sequence[Axis]) -> torch.Tensor:
    """`local` with the rows that ranks along the other axes have: one all-gather an axis that cuts them."""
    cut = [axis for axis, placement in zip(axes, parallel.placements, strict=True) if placement == Shard(0)]
    for number in reversed(range(len(cut))):  # an inner axis cuts what an outer one left
        outer, axis = cut[:number], cut[number]
        _, rows = chunk(parallel.shape[0], outer, [one.rank for one in outer])
        row = local.shape[1:].numel()
        sizes = [chunk(rows, [axis], [rank])[1] * row for rank in range(axis.size)]
        shape = (rows, *local.shape[1:])
        local = all_gather(local.reshape(-1), sizes, axis).wait() if sum(sizes) else local
        local = local.reshape(shape)
    return local
