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
from .placement import sharded_axes
from .state import NOTHING, ShardState, Stage, check_state


def to_dtensors(state: ShardState) -> dict[str, DTensor]:
    """The main buffers' tensors by path, as DTensors whose values are right when redistributed.

    A DTensor's plain ``Shard(0)`` fixes which rows each rank holds. Where a group's layout gives every rank just
    those, its DTensors are views of the state's buffer and nothing is communicated. Elsewhere (rows 1 and 3 on two
    ranks, say) the group is gathered (one all-gather a sharded axis, one group at a time) and each rank keeps its
    rows. 0-D tensors are replicated. A unit on a mesh of its own gives DTensors over that. Frozen groups of gradients
    and moments, which hold nothing, are left out.

    Raises:
        StateError: not a finished state, or one planned on an `AbstractMesh`.
    """
    check_state(state, "state")
    spec = state.spec
    if state.stage is not Stage.FINAL:
        raise StateError(
            bad("state", "accumulating gradients", "a finished state", "call finish_grad_sync(grads) first")
        )
    if not isinstance(spec.mesh, DeviceMesh):
        raise StateError(bad("state", "a state on an AbstractMesh", "one on a DeviceMesh", "plan with a real mesh"))
    found: dict[tuple[int, int], DTensor] = {}
    for group, main in zip(spec.groups, state.main, strict=True):
        if tuple(main.shape) == NOTHING:  # the same answer on every rank, also where a segment is empty
            continue
        assert isinstance(group.mesh, DeviceMesh)  # all are of one kind
        locals_ = _rows_held(group, main) if _is_plain(group) else _rows_wanted(group, main)
        for index, (_, shape, _) in enumerate(group.views):
            found[group.number, index] = DTensor.from_local(
                locals_[index],
                group.mesh,
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
                held = group.layout.local_shape(index, rank)[0]
                row = shape[1:].numel()
                start = max(group.layout.rank_range(rank).start - offset, 0) // row if row else 0
                if held != rows or (rows and start != first):
                    return False
    return True


def _rows_held(group: GroupSpec, main: torch.Tensor) -> list[torch.Tensor]:
    views = group.local_views(main, group.main_range)
    return [views.get(i, main.new_empty((0, *shape[1:]))) for i, (_, shape, _) in enumerate(group.views)]


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
