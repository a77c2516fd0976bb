"""Owner assignment, and the packing of what travels to owners and back (seed: owner_planning).

Owners and peer dictionaries use global process ranks, also where a mesh's ranks don't start at 0.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from . import collectives
from .collectives import Mesh
from .errors import StateError, bad
from .layout import GlobalLayout, Range
from .owner_balance import CostFn, OwnerWork, greedy, ns_cost_fn, refine, select_ge_2d_params, works_of
from .owner_layout import EligibleFn, GroupOwnerLayout, checked_indices, checked_ranks, eligible, made
from .placement import sharded_axes
from .spec import GroupSpec, ShardSpec

__all__ = [
    "GroupOwnerLayout",
    "OwnerGatherPlan",
    "OwnerScatterPlan",
    "assign_owner_work",
    "ns_cost_fn",
    "owner_loads",
    "plan_owners",
    "select_ge_2d_params",
]


def assign_owner_work(
    layout: GlobalLayout,
    mesh: Mesh,
    tensor_indices: Iterable[int],
    cost_fn: CostFn | None = None,
    *,
    initial_loads: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Give each participating tensor to a global rank that holds part of it.

    Tensors with one holder come first, then the others in descending cost, each to its least-loaded holder. Ties
    follow buffer order. A tensor without elements has no holder and gets no owner. Communicates nothing.

    Args:
        layout: layout of a buffer that is sharded over every axis of `mesh`.
        mesh: the mesh, or sub-mesh; its size is the layout's number of ranks.
        tensor_indices: the participating tensors.
        cost_fn: positive cost of a tensor's full shape; by default Newton-Schulz with five iterations.
        initial_loads: loads that ranks have already, by global rank, such as `owner_loads` of the groups before.

    Returns:
        Owner by tensor index.

    Raises:
        PlanError: mesh and layout of different sizes, an index or cost that can't be.

    Source: `owner_planning` of Megatron-FSDP v2.

    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> layout = build_for_row_atomic([(6, 4), (4, 4)], 2)
    >>> mesh = AbstractMesh((2,), ("dp",))
    >>> assign_owner_work(layout, mesh, [0, 1])
    {0: 0, 1: 1}
    >>> assign_owner_work(layout, mesh, [0, 1], initial_loads={0: 1000})
    {0: 1, 1: 1}
    """
    ranks = checked_ranks(mesh, layout, None)
    indices = checked_indices(layout, tensor_indices, "tensor_indices")
    return greedy(works_of(layout, ranks, indices, cost_fn), dict(initial_loads or {}))


def owner_loads(
    layout: GlobalLayout,
    tensor_to_owner: Mapping[int, int],
    cost_fn: CostFn | None = None,
    *,
    initial_loads: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """Load of each owner: what to carry to the next group as `initial_loads`.

    >>> from mfsdp_fn import build_for_row_atomic
    >>> owner_loads(build_for_row_atomic([(6, 4), (4, 4)], 2), {0: 1, 1: 1}, ns_cost_fn(1))
    {1: 200}
    """
    cost_fn, loads = cost_fn or ns_cost_fn(5), dict(initial_loads or {})
    for index, owner in tensor_to_owner.items():
        loads[owner] = loads.get(owner, 0) + cost_fn(layout.tensor_shapes[index])
    return loads


def plan_owners(
    spec: ShardSpec, *, cost_fn: CostFn | None = None, eligible_fn: EligibleFn | None = None
) -> dict[GroupSpec, GroupOwnerLayout]:
    """Owners for every trainable group, balanced over all groups together.

    Groups are assigned in order, each starting with the loads of those before it, by the rule of
    `assign_owner_work`; then tasks are shifted between holders to even out the total (`owner_balance.refine`).
    Plain integers, the same on every rank of a shard set: nothing is sent. With two sharded axes (hfsdp) a
    communicator over both is made, collectively, the first time.

    Args:
        spec: the plan.
        cost_fn: positive cost of a tensor's full shape; by default Newton-Schulz with five iterations.
        eligible_fn: whether a tensor takes part, asked with a meta tensor; by default those with two dimensions
            or more.

    Returns:
        One owner layout for each trainable group, in order of ``spec.groups``.

    Raises:
        PlanError: a cost that isn't a positive number.

    >>> import torch, mfsdp_fn as mf
    >>> params = {f"l.{i}.w": torch.zeros(4, 4, requires_grad=True) for i in range(4)}
    >>> spec = mf.plan(params, mf.AbstractMesh((2,), ("dp",)), mf.zero3(), units=("l.*",))
    >>> [owners.tensor_to_owner for owners in plan_owners(spec).values()]
    [{0: 0}, {0: 1}, {0: 0}, {0: 1}]
    """
    groups = [group for group in spec.groups if group.requires_grad]
    jobs = [(group, group.layout, eligible(group, eligible_fn)) for group in groups]
    return dict(zip(groups, balance(jobs, cost_fn), strict=True))


def balance(
    jobs: Sequence[tuple[GroupSpec, GlobalLayout, Sequence[int]]], cost_fn: CostFn | None
) -> list[GroupOwnerLayout]:
    """What `plan_owners` does, for layouts of one's own over the groups' shards.

    Args:
        jobs: group, layout (the group's, or a finer one of the same buffer) and participating tensors.
        cost_fn: as in `plan_owners`.
    """
    loads: dict[int, float] = {}
    works: list[OwnerWork] = []
    owners: list[int] = []
    counts = []
    for group, layout, indices in jobs:
        ranks = collectives.ranks_of(group.mesh, sharded_axes(group.placements.optimizer))
        mine = works_of(layout, ranks, indices, cost_fn)
        first = greedy(mine, loads)
        works += mine
        owners += [first[work.tensor_index] for work in mine]
        counts.append(len(mine))
    final = iter(zip(works, refine(works, owners, loads), strict=True))
    found = []
    for (group, layout, _), count in zip(jobs, counts, strict=True):
        by_tensor = {work.tensor_index: owner for work, owner in itertools.islice(final, count)}
        found.append(made(group, layout, dict(sorted(by_tensor.items()))))
    return found


def _flat(tensor: torch.Tensor, size: int, argument: str, index: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != size:
        got = f"{tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
        raise StateError(
            bad(argument, f"{got} for tensor {index}", f"a tensor of {size} elements", "see the layout's local_shape")
        )
    return tensor.reshape(-1)


def flat_shards(owners: GroupOwnerLayout, shards: Mapping[int, torch.Tensor], argument: str) -> dict[int, torch.Tensor]:
    """This rank's flat shards of the participating tensors; views where they are contiguous.

    Raises:
        StateError: a shard that is missing or of another size.
    """
    found = {}
    for index, piece in owners.mine.items():
        if index not in shards:
            raise StateError(
                bad(argument, f"no entry for tensor {index}", f"this rank's {piece.size} elements of it", "add it")
            )
        found[index] = _flat(shards[index], piece.size, argument, index)
    return found


def flat_fulls(owners: GroupOwnerLayout, fulls: Mapping[int, torch.Tensor], argument: str) -> dict[int, torch.Tensor]:
    """The flat full tensors that this rank owns; views where they are contiguous.

    Raises:
        StateError: one that is missing or of another size.
    """
    found = {}
    for index in owners.owned:
        size = owners.layout.tensor_range(index).size
        if not size:
            continue
        if index not in fulls:
            raise StateError(
                bad(argument, f"no entry for tensor {index}", "every tensor that this rank owns", "add it")
            )
        found[index] = _flat(fulls[index], size, argument, index)
    return found


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnerGatherPlan:
    """What one group's owner gather sends and receives, with the send buffers: for exchanges of one's own.

    `gather_to_owner` does the whole exchange, for several groups at once. An owner keeps its own shards and sends
    nothing to itself.

    Attributes:
        layout: the group's layout.
        rank_ranges: each rank's part of the buffer, by global rank, in buffer order.
        this_rank: global rank of the caller.
        send_buffers: one flat buffer for each owner that gets something, its tensors in index order.
        recv_sizes: elements to receive, by source rank; only sources that send something.
        own_shards: this rank's flat shard of each tensor that it owns.
        recv_offsets: for (tensor index, source rank), where that shard starts in the buffer from that source.

    Source: `owner_planning` of Megatron-FSDP v2.

    >>> import torch
    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> layout = build_for_row_atomic([(6, 4), (4, 4)], 2)
    >>> owners = GroupOwnerLayout(AbstractMesh((2,), ("dp",)), layout, {0: 1, 1: 1})
    >>> plan = OwnerGatherPlan.pack(owners, {0: torch.ones(5, 4)})
    >>> {owner: len(buffer) for owner, buffer in plan.send_buffers.items()}, plan.recv_sizes
    ({1: 20}, {})
    """

    layout: GlobalLayout
    rank_ranges: dict[int, Range]
    this_rank: int
    send_buffers: dict[int, torch.Tensor]
    recv_sizes: dict[int, int]
    own_shards: dict[int, torch.Tensor]
    recv_offsets: dict[tuple[int, int], int]

    @classmethod
    def pack(cls, owner_layout: GroupOwnerLayout, local_shards: Mapping[int, torch.Tensor]) -> OwnerGatherPlan:
        """Pack this rank's shards, one flat buffer an owner. Communicates nothing.

        Args:
            owner_layout: the group's owners.
            local_shards: this rank's shard, in any shape, of every participating tensor of which it holds
                elements.

        Raises:
            StateError: a shard that is missing or of another size.
        """
        flat = flat_shards(owner_layout, local_shards, "local_shards")
        sends: dict[int, list[torch.Tensor]] = {}
        own = {}
        for index, shard in flat.items():
            owner = owner_layout.tensor_to_owner[index]
            if owner == owner_layout.this_rank:
                own[index] = shard
            else:
                sends.setdefault(owner, []).append(shard)
        sizes: dict[int, int] = {}
        offsets: dict[tuple[int, int], int] = {}
        for index in owner_layout.owned:
            for piece in owner_layout.pieces[index]:
                if piece.rank != owner_layout.this_rank:
                    offsets[index, piece.rank] = sizes.get(piece.rank, 0)
                    sizes[piece.rank] = offsets[index, piece.rank] + piece.size
        return cls(
            layout=owner_layout.layout,
            rank_ranges=owner_layout.rank_ranges,
            this_rank=owner_layout.this_rank,
            send_buffers={owner: _join(sends[owner]) for owner in sorted(sends)},
            recv_sizes=dict(sorted(sizes.items())),
            own_shards=own,
            recv_offsets=offsets,
        )

    def reconstruct_full(self, param_index: int, recv_buffers: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The full flat tensor, from the shards in buffer order.

        Args:
            param_index: a tensor that this rank owns.
            recv_buffers: what came from each source rank.

        Returns:
            A flat tensor; for one that this rank holds whole its own flat shard, not a copy.

        Raises:
            StateError: not a tensor that this rank owns.
        """
        span = self.layout.tensor_range(param_index)
        if param_index not in self.own_shards:
            raise StateError(
                bad("param_index", param_index, f"a tensor that this rank owns, {sorted(self.own_shards)}", "ask there")
            )
        parts = []
        for rank, held in self.rank_ranges.items():
            size = held.intersect(span).size
            if rank == self.this_rank and size:
                parts.append(self.own_shards[param_index])
            elif size:
                parts.append(recv_buffers[rank].narrow(0, self.recv_offsets[param_index, rank], size))
        return _join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnerScatterPlan:
    """What one group's owner scatter sends and receives, with the send buffers: the way back.

    `scatter_from_owner` does the whole exchange. The owner keeps its own result shard.

    Attributes:
        layout: the group's layout.
        local_range: this rank's part of the buffer.
        send_buffers: one flat buffer for each rank that gets something, tensors in index order.
        recv_sizes: elements to receive, by owner; only owners that send something.
        recv_offsets: for (tensor index, owner), where this rank's shard starts in the buffer from that owner.

    Source: `owner_planning` of Megatron-FSDP v2.
    """

    layout: GlobalLayout
    local_range: Range
    send_buffers: dict[int, torch.Tensor]
    recv_sizes: dict[int, int]
    recv_offsets: dict[tuple[int, int], int]

    @classmethod
    def pack(cls, owner_layout: GroupOwnerLayout, full_results: Mapping[int, torch.Tensor]) -> OwnerScatterPlan:
        """Pack the full results of the tensors that this rank owns, one flat buffer a destination.

        Args:
            owner_layout: the group's owners.
            full_results: full result, in any shape, of every tensor that this rank owns.

        Raises:
            StateError: a result that is missing or of another size.
        """
        me = owner_layout.this_rank
        sends: dict[int, list[torch.Tensor]] = {}
        for index, full in flat_fulls(owner_layout, full_results, "full_results").items():
            for piece in owner_layout.pieces[index]:
                if piece.rank != me:
                    sends.setdefault(piece.rank, []).append(full.narrow(0, piece.start, piece.size))
        sizes: dict[int, int] = {}
        offsets: dict[tuple[int, int], int] = {}
        for index, piece in owner_layout.mine.items():
            owner = owner_layout.tensor_to_owner[index]
            if owner != me:
                offsets[index, owner] = sizes.get(owner, 0)
                sizes[owner] = offsets[index, owner] + piece.size
        return cls(
            layout=owner_layout.layout,
            local_range=owner_layout.rank_ranges[me],
            send_buffers={rank: _join(sends[rank]) for rank in sorted(sends)},
            recv_sizes=dict(sorted(sizes.items())),
            recv_offsets=offsets,
        )

    def unpack(self, recv_buffers: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """This rank's flat result shard of each tensor that it holds elements of but does not own.

        Args:
            recv_buffers: what came from each owner.
        """
        return {
            index: recv_buffers[owner].narrow(
                0, offset, self.layout.tensor_range(index).intersect(self.local_range).size
            )
            for (index, owner), offset in self.recv_offsets.items()
        }
