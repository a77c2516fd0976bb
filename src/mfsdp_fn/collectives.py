"""The only file that talks to `torch.distributed`, with two that it launches through: `ragged.py` and `symmetric.py`.

With these, `session.py`, `autodiff.py` and the compiled path they are also the only ones that use private torch API.

Collectives are asynchronous functional ops (``torch.ops._c10d_functional``: private, but what
`torch.distributed._functional_collectives` and every compiler pass are built on): a launch returns a tensor
that must be waited for, in eager code and in compiled graphs alike.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Private: groups travel by name, as the functional operators take them, and the list collectives want the group.
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)

from . import ragged
from .errors import PlanError, StateError, bad
from .mesh import AbstractMesh
from .simulated_mesh import SimulatedMesh
from .simulation import Arrival, Communicator
from .symmetric import Staged, Staging

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
        found = _new_group(dist.get_process_group_ranks(group))
        _reduction_groups[group] = weakref.ref(found)
    return found


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    made = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


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
class PendingCollective:
    """A launched collective. `wait` gives its result; one that is dropped unwaited leaks its buffers.

    `sizes` are the true sizes of an uneven gather's segments, where they were padded to the largest. `work` is what
    to wait for where it isn't the tensor itself; `source` what the transfer reads, alive until then. Over one rank
    nothing is `on_wire`.
    """

    raw: torch.Tensor | Arrival | Staged
    sizes: tuple[int, ...] | None
    dtype: torch.dtype
    work: dist.Work | None = None
    source: torch.Tensor | None = None
    on_wire: bool = True

    def wait(self) -> torch.Tensor:
        """The result, ordered after the collective on the current stream."""
        if isinstance(self.raw, (Arrival, Staged)):
            done = self.raw.wait()
        elif not self.on_wire:
            done = self.raw
        elif self.work is None:
            done = _ops.wait_tensor(self.raw)
        else:
            self.work.wait()
            done = self.raw
        if self.sizes is not None:
            done = ragged.without_padding(done, self.sizes)
        return done if done.dtype == self.dtype else done.view(self.dtype)


# Gloo and NCCL agree on these; anything else (float8, int16, …) travels as bytes.
_WIRE_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_WIRE_DTYPES |= {torch.int8, torch.uint8, torch.int32, torch.int64}


def _group(name: str | None, what: str) -> str:
    if name is None:
        raise StateError(bad("mesh", "an AbstractMesh", f"a DeviceMesh to {what} over", "plan again with a real mesh"))
    return name


def _ragged_group(wire: torch.Tensor, name: str) -> dist.ProcessGroup | None:
    """The group, if it takes uneven segments as they are."""
    if torch.compiler.is_compiling() or wire.device.type != "cuda":
        return None
    group = _resolve_process_group(name)  # pyright: ignore[reportArgumentType]  # newer releases have a type of names
    return group if ragged.takes_lists(group, wire.device) else None


def _alone(tensor: torch.Tensor) -> PendingCollective:
    """What any collective over an axis of one rank is: a copy, and nothing is sent."""
    return PendingCollective(tensor.clone(), None, tensor.dtype, on_wire=False)


def all_gather(local: torch.Tensor, sizes: Sequence[int], axis: Axis) -> PendingCollective:
    """Launch an all-gather of 1-D segments of `sizes[rank]` elements over `axis`.

    Bytes received a rank: (sum of sizes - own) times the element size. Uneven sizes: NCCL writes each segment where
    it belongs; on other backends, and in compiled graphs, the wire carries the largest size for everyone.
    """
    if axis.size == 1:
        return _alone(local)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.all_gather(local, sizes), None, local.dtype)
    name = _group(axis.gather_group, "all-gather")
    wire = local if local.dtype in _WIRE_DTYPES else local.view(torch.uint8)
    scale = local.dtype.itemsize // wire.dtype.itemsize
    widest = max(sizes)
    if all(size == widest for size in sizes):
        if axis.gather_staging is not None and (staged := axis.gather_staging.all_gather(wire, axis.size, name)):
            return PendingCollective(staged, None, local.dtype)
        return PendingCollective(_even_gather(wire, axis.size, name), None, local.dtype)
    group = _ragged_group(wire, name)
    if group is not None:
        flat, work = ragged.gather(wire, [size * scale for size in sizes], group)
        return PendingCollective(flat, None, local.dtype, work, wire)
    padded = ragged.with_padding(wire, [wire.numel()], widest * scale)
    return PendingCollective(_even_gather(padded, axis.size, name), tuple(s * scale for s in sizes), local.dtype)


def _even_gather(wire: torch.Tensor, size: int, name: str) -> torch.Tensor:
    if wire.device.type == "cpu" and not torch.compiler.is_compiling():
        # Gloo runs the plain functional op as a *coalesced* all-gather, whose name its two worker threads write to
        # one unguarded string when they finish together: rare heap corruption (seen with torch 2.13). The out
        # variant is an ordinary all-gather there.
        return _ops.all_gather_into_tensor_out(wire, size, name, out=wire.new_empty(wire.numel() * size))
    return _ops.all_gather_into_tensor(wire, size, name)


def reduce_scatter(full: torch.Tensor, sizes: Sequence[int], axis: Axis) -> PendingCollective:
    """Launch a sum reduce-scatter of a 1-D buffer into segments of `sizes[rank]` elements over `axis`.

    Bytes sent a rank: (sum of sizes - own) times the element size. Uneven sizes: as in `all_gather`.
    """
    if axis.size == 1:
        return _alone(full)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.reduce_scatter(full, sizes), None, full.dtype)
    name = _group(axis.reduce_group, "reduce")
    widest = max(sizes)
    if all(size == widest for size in sizes):
        if axis.reduce_staging is not None and (staged := axis.reduce_staging.reduce_scatter(full, axis.size, name)):
            return PendingCollective(staged, None, full.dtype)
        return PendingCollective(_ops.reduce_scatter_tensor(full, "sum", axis.size, name), None, full.dtype)
    group = _ragged_group(full, name)
    if group is not None:
        part, work = ragged.reduce_scatter(full, sizes, axis.rank, group)
        return PendingCollective(part, None, full.dtype, work, full)
    padded = ragged.with_padding(full, sizes, widest)
    raw = _ops.reduce_scatter_tensor(padded, "sum", axis.size, name)
    return PendingCollective(raw, (sizes[axis.rank],), full.dtype)


def all_reduce(full: torch.Tensor, axis: Axis) -> PendingCollective:
    """Launch a sum all-reduce of `full` over `axis` (out of place)."""
    if axis.size == 1:
        return _alone(full)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.all_reduce(full), None, full.dtype)
    name = _group(axis.reduce_group, "reduce")
    if axis.reduce_staging is not None and (staged := axis.reduce_staging.all_reduce(full, name)):
        return PendingCollective(staged, None, full.dtype)
    return PendingCollective(_ops.all_reduce(full, "sum", name), None, full.dtype)


def broadcast(tensor: torch.Tensor, axis: Axis) -> PendingCollective:
    """Launch a broadcast of the first rank's `tensor` over `axis` (out of place)."""
    if axis.size == 1:
        return _alone(tensor)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.broadcast(tensor), None, tensor.dtype)
    wire = tensor if tensor.dtype in _WIRE_DTYPES else tensor.view(torch.uint8)
    return PendingCollective(_ops.broadcast(wire, 0, _group(axis.gather_group, "broadcast")), None, tensor.dtype)


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
            joint = _new_group(list(key))
            made[key] = weakref.ref(joint)
        group = joint
    return Peers(ranks, this_rank(mesh), tuple(dist.get_process_group_ranks(group)), group.group_name)


def all_to_all(wire: torch.Tensor, receive: Sequence[int], send: Sequence[int], peers: Peers) -> PendingCollective:
    """Launch an exchange of 1-D segments: `send[i]` elements of `wire` go to, `receive[i]` come from, peer `i`.

    Peers are counted in `Peers.group_order`. Bytes sent a rank: what `send` says, each peer's part straight to it.
    """
    if peers.simulated is not None:
        return PendingCollective(peers.simulated.all_to_all(wire, receive, send), None, wire.dtype)
    name = _group(peers.group, "exchange")
    raw = _ops.all_to_all_single(wire, list(receive), list(send), name)
    return PendingCollective(raw, None, wire.dtype)


def copy_many(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, casting, in as few kernels as there are dtype pairs.

    `torch._foreach_copy_` is private; there is no public fused form of many copies.
    """
    if destinations:
        # Pyright takes underscored names of a typed package for private, which this one is: see above.
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            list(destinations), list(sources)
        )


def add_many(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add each source to its destination, casting to the destination's dtype."""
    for destination, source in zip(destinations, sources, strict=True):
        destination.add_(source)
