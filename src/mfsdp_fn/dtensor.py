"""States as DTensors, for whatever speaks them (checkpoints, inspection, resharding)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TensorPlacement

from .buffer import launch_gather
from .combined import check_combined, chunk, on_both
from .communicators import Axis
from .errors import StateError, bad
from .group import GroupSpec
from .mesh import AbstractMesh
from .placement import sharded_axes
from .state import NOTHING, ShardState, Stage, check_state
from .tensor_parallel import TensorParallel


def to_dtensors(state: ShardState, *, mesh: DeviceMesh | None = None) -> dict[str, DTensor]:
    """The main buffers' tensors by path, as DTensors whose values are right when redistributed.

    A DTensor's plain ``Shard(0)`` fixes which rows each rank holds. Where a group's layout gives every rank just
    those, its DTensors are views of the state's buffer and nothing is communicated. Elsewhere (rows 1 and 3 on two
    ranks, say, or whole tensors on their owners) the group is gathered (one all-gather a sharded axis, one group at a
    time) and each rank keeps its rows. 0-D tensors are replicated. A unit on a mesh of its own gives DTensors over
    that. Frozen groups of gradients and moments, which hold nothing, are left out.

    Args:
        state: a finished state.
        mesh: where parameters are DTensors over other axes, the mesh with those and the data-parallel axes:
            ``world["dp", "tp"]``. They lie over all of it. One that both cut along dim 0 is brought together over the
            other axes too (one at a time), as no plain placement says that rows are cut by those axes first.

    Raises:
        StateError: not a finished state, or one planned on an `AbstractMesh` or a simulated one; a `mesh` that is
            missing, or another.
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
    check_combined(mesh, spec)
    found: dict[tuple[int, int], DTensor] = {}
    for group, main in zip(spec.groups, state.main, strict=True):
        if tuple(main.shape) == NOTHING:  # the same answer on every rank, also where a segment is empty
            continue
        assert isinstance(group.mesh, DeviceMesh)  # all are of one kind
        beside = {leaf.index: leaf.parallel for leaf in spec.leaves if leaf.group == group.number and leaf.parallel}
        if beside and mesh is not None:
            found.update(_over_both(group, main, beside, spec.parallel_axes, mesh))
        if len(beside) == len(group.views):
            continue
        locals_ = _rows_held(group, main) if _is_plain(group) else _rows_wanted(group, main)
        for index, (_, shape, _) in enumerate(group.views):
            if index in beside:
                continue
            found[group.number, index] = DTensor.from_local(
                locals_[index],
                group.mesh,
                _placements(group, shape),
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
    return {leaf.path: found[leaf.group, leaf.index] for leaf in spec.leaves if (leaf.group, leaf.index) in found}


def _over_both(
    group: GroupSpec,
    main: torch.Tensor,
    beside: Mapping[int, TensorParallel],
    axes: Sequence[Axis],
    mesh: DeviceMesh,
) -> dict[tuple[int, int], DTensor]:
    """A group's DTensors over other axes."""
    flat = launch_gather(main, group.sync_gathers + group.gathers).wait()
    found = {}
    for index, parallel in beside.items():
        offset, shape, numel = group.views[index]
        whole = flat.narrow(0, offset, numel).view(shape)
        found[group.number, index] = on_both(whole, group, _placements(group, shape), parallel, axes, mesh)
    return found


def _placements(group: GroupSpec, shape: torch.Size) -> tuple[TensorPlacement, ...]:
    sharded = sharded_axes(group.placements.optimizer) if shape else ()
    return tuple(Shard(0) if axis in sharded else Replicate() for axis in range(len(group.axes)))


def _is_plain(group: GroupSpec) -> bool:
    """Whether every rank holds just the rows that ``Shard(0)`` gives it. The same answer on every rank."""
    order = sharded_axes(group.placements.optimizer)
    if len(order) > 1 or any(not shape for _, shape, _ in group.views):
        return not order
    for index, (offset, shape, _) in enumerate(group.views):
        for axis in order:
            for rank in range(group.axes[axis].size):
                first, rows = chunk(shape[0], [group.axes[axis]], [rank])
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
            first, rows = chunk(shape[0], axes, [axis.rank for axis in axes])
            whole = whole.narrow(0, first, rows)
        wanted.append(whole.clone())
    return wanted
