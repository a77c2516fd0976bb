"""The packing of what travels to owners and back (seed: owner_planning).

Peer dictionaries use global process ranks, also where a mesh's ranks don't start at 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from . import communicators
from .checks import check_mapping, is_integer, shown
from .errors import StateError, bad
from .layout import GlobalLayout
from .owner_layout import GroupOwnerLayout
from .ranges import Range


def _flat(tensor: torch.Tensor, size: int, argument: str, index: int) -> torch.Tensor:
    strided = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    if not strided or tensor.numel() != size:
        got = f"{tuple(tensor.shape)}" if strided else shown(tensor)
        raise StateError(
            bad(argument, f"{got} for tensor {index}", f"a tensor of {size} elements", "see the layout's local_shape")
        )
    return tensor.reshape(-1)


def flat_shards(owners: GroupOwnerLayout, shards: Mapping[int, torch.Tensor], argument: str) -> dict[int, torch.Tensor]:
    """This rank's flat shards of the participating tensors; views where they are contiguous.

    Raises:
        StateError: a shard that is missing or of another size.
    """
    check_mapping(argument, shards, "tensors by index", "write {0: shard}", StateError)
    found = {}
    for index, piece in owners.mine.items():
        if index not in shards:
            raise StateError(
                bad(argument, f"no entry for tensor {index}", f"this rank's {piece.size} elements of it", "add it")
            )
        found[index] = _flat(shards[index], piece.size, argument, index)
    return found


def empty_full(
    owners: GroupOwnerLayout, index: int, given: Mapping[int, torch.Tensor], flat: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """A whole tensor without elements, of the dtype and device of what was given for it, or else of the others."""
    shape = owners.layout.tensor_shapes[index]
    for known in (given.get(index), *flat.values()):
        if isinstance(known, torch.Tensor):
            return known.new_empty(shape)
    return torch.empty(shape, dtype=owners.dtype, device=communicators.device_of(owners.mesh))


def flat_fulls(owners: GroupOwnerLayout, fulls: Mapping[int, torch.Tensor], argument: str) -> dict[int, torch.Tensor]:
    """The flat full tensors that this rank owns; views where they are contiguous.

    Raises:
        StateError: one that is missing or of another size.
    """
    check_mapping(argument, fulls, "tensors by index", "write {0: full}", StateError)
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


def _check_layout(owner_layout: Any) -> None:
    if not isinstance(owner_layout, GroupOwnerLayout):
        raise StateError(
            bad("owner_layout", shown(owner_layout), "a GroupOwnerLayout", "make one with from_group or plan_owners")
        )


def _check_received(buffers: Any, sizes: Mapping[int, int]) -> None:
    """Refuse received buffers that are not what the plan says."""
    check_mapping("recv_buffers", buffers, "flat buffers by source rank", "receive recv_sizes elements", StateError)
    for rank, size in sizes.items():
        buffer = buffers.get(rank)
        if not isinstance(buffer, torch.Tensor) or buffer.shape != (size,):
            got = f"{'nothing' if buffer is None else shown(buffer)} from rank {rank}"
            raise StateError(bad("recv_buffers", got, f"a flat tensor of {size} elements", "see recv_sizes"))


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
        _check_layout(owner_layout)
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
            if not owner_layout.pieces[index]:  # without elements: nobody holds it, but it is owned all the same
                own[index] = empty_full(owner_layout, index, local_shards, flat).view(-1)
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
            own_shards=dict(sorted(own.items())),
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
            StateError: not a tensor that this rank owns, or a buffer that is missing or of another size.
        """
        if not is_integer(param_index) or param_index not in self.own_shards:
            raise StateError(
                bad(
                    "param_index",
                    shown(param_index),
                    f"a tensor that this rank owns, {sorted(self.own_shards)}",
                    "ask there",
                )
            )
        sources = [rank for index, rank in self.recv_offsets if index == param_index]
        _check_received(recv_buffers, {rank: self.recv_sizes[rank] for rank in sources})
        span = self.layout.tensor_range(param_index)
        parts = []
        for rank, held in self.rank_ranges.items():
            size = held.intersect(span).size
            if rank == self.this_rank and size:
                parts.append(self.own_shards[param_index])
            elif size:
                parts.append(recv_buffers[rank].narrow(0, self.recv_offsets[param_index, rank], size))
        return _join(parts or [self.own_shards[param_index]])


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
        _check_layout(owner_layout)
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

        Raises:
            StateError: a buffer that is missing or of another size.
        """
        _check_received(recv_buffers, self.recv_sizes)
        return {
            index: recv_buffers[owner].narrow(
                0, offset, self.layout.tensor_range(index).intersect(self.local_range).size
            )
            for (index, owner), offset in self.recv_offsets.items()
        }
