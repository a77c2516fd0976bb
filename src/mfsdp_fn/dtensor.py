"""States as DTensors, for whatever speaks them (checkpoints, inspection, resharding)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TensorPlacement

from .buffer import launch_gather
from .collectives import Axis
from .errors import StateError, bad
from .group import GroupSpec
from .mesh import AbstractMesh
from .placement import sharded_axes
from .state import NOTHING, ShardState, Stage, check_state


def to_dtensors(state: ShardState) -> dict[str, DTensor]:
    """The main buffers' tensors by path, as DTensors whose values are right when redistributed.

    A DTensor's plain ``Shard(0)`` fixes which rows each rank holds. Where a group's layout gives every rank just
    those, its DTensors are views of the state's buffer and nothing is communicated. Elsewhere (rows 1 and 3 on two
    ranks, say, or whole tensors on their owners) the group is gathered (one all-gather a sharded axis, one group at a
    time) and each rank keeps its rows. 0-D tensors are replicated. Frozen groups of gradients and moments, which hold
    nothing, are left out.

    Raises:
        StateError: not a finished state, or one planned on an `AbstractMesh` or a simulated one.
    """
    check_state(state, "state")
    spec = state.spec
    if state.stage is not Stage.FINAL:
        raise StateError(
            bad("state", "accumulating gradients", "a finished state", "call finish_grad_sync(grads) first")
        )
    if not isinstance(spec.mesh, DeviceMesh):
        kind = "an AbstractMesh" if isinstance(spec.mesh, AbstractMesh) else "a simulated mesh"
        raise StateError(bad("state", f"a state on {kind}", "one on a DeviceMesh", "plan with a real mesh"))
    found: dict[tuple[int, int], DTensor] = {}
    for group, main in zip(spec.groups, state.main, strict=True):
        if tuple(main.shape) == NOTHING:  # the same answer on every rank, also where a segment is empty
            continue
        locals_ = _rows_held(group, main) if _is_plain(group) else _rows_wanted(group, main)
        for index, (_, shape, _) in enumerate(group.views):
            found[group.number, index] = DTensor.from_local(
                locals_[index],
                spec.mesh,
                _placements(group, shape),
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
    return {leaf.path: found[leaf.group, leaf.index] for leaf in spec.leaves if (leaf.group, leaf.index) in found}


def _placements(group: GroupSpec, shape: torch.Size) -> tuple[TensorPlacement, ...]:
    sharded = sharded_axes(group.placements.optimizer) if shape else ()
    return tuple(Shard(0) if axis in sharded else Replicate() for axis in range(len(group.axes)))


def _chunk(rows: int, axes: list[Axis], ranks: list[int]) -> tuple[int, int]:
    """First row and number of rows of a plain ``Shard(0)`` over `axes`, outer to inner, at the places `ranks`."""
    start = 0
    for axis, rank in zip(axes, ranks, strict=True):
        size = -(-rows // axis.size)
        first = min(size * rank, rows)
        start, rows = start + first, min(size, rows - first)
    return start, rows


def _is_plain(group: GroupSpec) -> bool:
    """Whether every rank holds just the rows that ``Shard(0)`` gives it. The same answer on every rank."""
    order = sharded_axes(group.placements.optimizer)
    if len(order) > 1 or any(not shape for _, shape, _ in group.views):
        return not order
    for index, (offset, shape, _) in enumerate(group.views):
        for axis in order:
            for rank in range(group.axes[axis].size):
                first, rows = _chunk(shape[0], [group.axes[axis]], [rank])
                held, row = group.layout.local_range(index, rank), shape[1:].numel()
                if (rows and not row) or held.size != rows * row:
                    return False
                if rows and held.start != offset + first * row:
                    return False
    return True


def _rows_held(group: GroupSpec, main: torch.Tensor) -> list[torch.Tensor]:
    views = group.local_views(main, group.main_range)
    found = []
    for index, (_, shape, numel) in enumerate(group.views):
        if index in views:  # whole rows of dim 0, whatever a row of the layout is
            found.append(views[index].view(-1, *shape[1:]) if shape else views[index])
        else:
            found.append(main.new_empty((0, *shape[1:]) if numel else shape))
    return found


def _rows_wanted(group: GroupSpec, main: torch.Tensor) -> list[torch.Tensor]:
    flat = launch_gather(main, group.sync_gathers + group.gathers).wait()
    axes = [group.axes[axis] for axis in sorted(sharded_axes(group.placements.optimizer))]
    wanted = []
    for offset, shape, numel in group.views:
        whole = flat.narrow(0, offset, numel).view(shape)
        if shape:
            first, rows = _chunk(shape[0], axes, [axis.rank for axis in axes])
            whole = whole.narrow(0, first, rows)
        wanted.append(whole.clone())
    return wanted
