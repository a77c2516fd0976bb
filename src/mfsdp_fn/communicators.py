"""Communicators: a mesh's axes and the process groups behind them, the ranks that share a buffer, and what ranks tell.

Nothing of a step is launched here: that is `collectives.py`. Here groups are made and warmed, once a process.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Private: nothing public tells how many groups there are, which torch makes names of.
from torch.distributed.distributed_c10d import _world  # pyright: ignore[reportPrivateImportUsage]

from .errors import PlanError, bad
from .mesh import AbstractMesh
from .simulated_mesh import SimulatedMesh
from .simulation import Communicator
from .symmetric import Staging

Mesh = DeviceMesh | AbstractMesh | SimulatedMesh

_ops = torch.ops._c10d_functional

# A communicator's collectives run in launch order, so reductions get a communicator of their own beside the
# mesh's. One a process group, for as long as that group lives: the cache is keyed weakly by the group itself,
# because names are used again after `destroy_process_group`.
# The values are weak too: torch.distributed holds a group until it is destroyed, and its threads must end then, not
# when the mesh goes (perhaps while the interpreter shuts down).
_reduction_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_reduction_groups = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Axis:
    """One mesh axis: its size, this rank's place on it, and the names of its two communicators.

    The names are None on an `AbstractMesh`, and on a simulated one, which has `simulated` instead; the stagings
    without `use_symmetric_memory`.
    """

    size: int
    rank: int
    gather_group: str | None = dataclasses.field(default=None, compare=False)
    reduce_group: str | None = dataclasses.field(default=None, compare=False)
    simulated: Communicator | None = dataclasses.field(default=None, compare=False, repr=False)
    gather_staging: Staging | None = dataclasses.field(default=None, compare=False, repr=False)
    reduce_staging: Staging | None = dataclasses.field(default=None, compare=False, repr=False)


def axes_of(mesh: Mesh, *, separate_reductions: bool = True) -> tuple[Axis, ...]:
    """The axes of `mesh`, outer to inner, with communicators made and warmed.

    Collective over the mesh the first time (a new group an axis, one 1-element all-reduce on each group).
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(
            bad(
                "mesh",
                "a mesh without this rank",
                "a mesh that holds the calling rank",
                "call plan only on ranks of the mesh",
            )
        )
    if isinstance(mesh, AbstractMesh):
        return tuple(Axis(mesh.size(axis), coordinate[axis]) for axis in range(mesh.ndim))
    if isinstance(mesh, SimulatedMesh):
        pairs = [(Axis(mesh.size(axis), coordinate[axis]), mesh.communicator((axis,))) for axis in range(mesh.ndim)]
        return tuple(dataclasses.replace(axis, simulated=communicator) for axis, communicator in pairs)
    axes = []
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if list(ranks_of(mesh, (axis,))) != dist.get_process_group_ranks(group):
            raise PlanError(
                bad(
                    "mesh",
                    f"ranks {list(ranks_of(mesh, (axis,)))} along axis {axis}",
                    f"the order of its process group, {dist.get_process_group_ranks(group)}",
                    "give the ranks of a mesh in ascending order",
                )
            )
        reduction = reduction_group(group) if separate_reductions else group
        axes.append(Axis(mesh.size(axis), coordinate[axis], group.group_name, reduction.group_name))
    probe = torch.zeros(1, device=device_of(mesh))
    for axis in axes:  # NCCL connects at the first collective; better here than inside a step
        for name in dict.fromkeys((axis.gather_group, axis.reduce_group)):
            _ops.wait_tensor(_ops.all_reduce(probe, "sum", name))
    return tuple(axes)


def of_group(axes: Sequence[Axis], name: str) -> tuple[Axis, ...]:
    """The same axes for one group's buffers: simulated ranks compare and record of which group a collective is."""
    return tuple(
        axis
        if axis.simulated is None
        else dataclasses.replace(axis, simulated=dataclasses.replace(axis.simulated, group=name))
        for axis in axes
    )


def reduction_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The communicator for reductions beside a mesh axis' own; collective over its ranks the first time."""
    known = _reduction_groups.get(group)
    found = None if known is None else known()
    if found is None:
        found = _new_group(dist.get_process_group_ranks(group), [group])
        _reduction_groups[group] = weakref.ref(found)
    return found


def _new_group(ranks: list[int], joined_by: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A new group of `ranks`, which the groups `joined_by` connect, made by them alone.

    Until 2.14 torch names such a group after its ranks and the number of groups that the caller has. Ranks that are in
    different numbers of groups (stages of a pipeline, experts' meshes) would wait for each other under different
    names, so those with fewer make groups of their own first. They stay: a number that falls could bring a name back.
    """
    number = most = _number_of_groups()
    for group in joined_by:
        numbers: list[Any] = [None] * group.size()
        dist.all_gather_object(numbers, most, group=group)
        most = max(numbers)
    for _ in range(most - number):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    made = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _number_of_groups() -> int:
    return len(_world.pg_names)


def device_of(mesh: Mesh) -> torch.device:
    """The device on which this rank's buffers live."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def exchange_objects(mesh: Mesh, obj: Any) -> list[Any]:
    """`obj` of every rank of the mesh, row-major; one object all-gather an axis."""
    gathered = [obj]
    if isinstance(mesh, AbstractMesh):
        return gathered
    for axis in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.size(axis)
        if isinstance(mesh, SimulatedMesh):
            parts = mesh.communicator((axis,)).exchange_objects(gathered)
        else:
            dist.all_gather_object(parts, gathered, group=mesh.get_group(axis))
        gathered = [item for part in parts for item in part]
    return gathered


@dataclasses.dataclass(frozen=True)
class Peers:
    """The ranks that share a buffer: their global ranks in buffer order, and the communicator that joins them.

    `group_order` has the same ranks in the communicator's own order, in which split sizes are given.
    """

    ranks: tuple[int, ...]
    this_rank: int
    group_order: tuple[int, ...]
    group: str | None = dataclasses.field(default=None, compare=False)
    simulated: Communicator | None = dataclasses.field(default=None, compare=False, repr=False)


def ranks_of(mesh: Mesh, axes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Global ranks of this rank's shard set, in buffer order: the first of `axes` is the most significant digit.

    Args:
        mesh: the mesh; the ranks of an `AbstractMesh` count from 0, row-major.
        axes: the axes that the buffer is sharded over, inner to outer; None for all of them.

    >>> ranks_of(AbstractMesh((2, 2), ("outer", "inner"))), ranks_of(AbstractMesh((2, 2), ("o", "i"), 3), (1,))
    ((0, 2, 1, 3), (2, 3))
    """
    order = tuple(reversed(range(mesh.ndim))) if axes is None else tuple(axes)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(
            bad("mesh", "a mesh without this rank", "a mesh that holds the calling rank", "plan on ranks of the mesh")
        )
    table = torch.arange(mesh.size()).view(mesh.shape) if isinstance(mesh, AbstractMesh) else mesh.mesh
    table = table[tuple(slice(None) if axis in order else coordinate[axis] for axis in range(mesh.ndim))]
    kept = sorted(order)  # the axes that are left, in the order in which the table has them
    return tuple(table.permute([kept.index(axis) for axis in order]).reshape(-1).tolist())


def world_of(mesh: Mesh) -> object:
    """What tells communicators over one set of ranks from another's: what is kept for a mesh is kept under it."""
    return mesh.world if isinstance(mesh, SimulatedMesh) else type(mesh)


def this_rank(mesh: Mesh) -> int:
    """Global rank of the caller, which must be on the mesh."""
    # From the mesh: where ranks are simulated in one process, `dist.get_rank()` is none of theirs.
    return mesh.rank if isinstance(mesh, AbstractMesh) else int(mesh.mesh[tuple(mesh.get_coordinate() or ())])


# Groups over several axes at once, made when an owner layout first needs one; beside the first axis' group, because
# that one's lifetime is the mesh's.
_joint_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], weakref.ref[dist.ProcessGroup]]]
_joint_groups = weakref.WeakKeyDictionary()


_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of a group before its first messages: NCCL does so at a first call that all of them must join.

    Collective over the group the first time (a 1-element all-reduce).
    """
    if group not in _connected:
        _ops.wait_tensor(_ops.all_reduce(torch.zeros(1, device=device), "sum", group.group_name))
        _connected.add(group)


def peers_of(mesh: Mesh, axes: Sequence[int] | None = None) -> Peers:
    """The ranks that share a buffer sharded over `axes`, with a communicator over all of them.

    Over one axis it is the mesh's own. Over more, collective over those ranks the first time (a new group).
    """
    ranks = ranks_of(mesh, axes)
    if isinstance(mesh, AbstractMesh):
        return Peers(ranks, this_rank(mesh), ranks)
    order = range(mesh.ndim) if axes is None else axes
    wide = [axis for axis in order if mesh.size(axis) > 1]
    if not wide:
        return Peers(ranks, ranks[0], ranks)
    if isinstance(mesh, SimulatedMesh):
        communicator = mesh.communicator(wide)
        return Peers(ranks, this_rank(mesh), communicator.ranks, simulated=communicator)
    group = mesh.get_group(wide[0])
    if len(wide) > 1:
        made = _joint_groups.setdefault(group, {})
        key = tuple(sorted(ranks))
        joint = made[key]() if key in made else None
        if joint is None:
            joint = _new_group(list(key), [mesh.get_group(axis) for axis in wide])
            made[key] = weakref.ref(joint)
        group = joint
    return Peers(ranks, this_rank(mesh), tuple(dist.get_process_group_ranks(group)), group.group_name)
