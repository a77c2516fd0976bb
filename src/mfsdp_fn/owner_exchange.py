"""The packed exchange with owners: what moves, and its two directions as launch and wait.

One ``all_to_all_single`` with split sizes for any set of groups. Only tensors that more than one rank holds travel,
and of them only the parts that aren't the owner's own. The wire is bytes, so groups of several dtypes share an
exchange and a rank that holds nothing needs no dtype.

Between GPUs nothing is packed if the values travel in their own dtype: each part goes from where it is to where it
belongs (`messages.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import collectives, communicators
from .errors import StateError, bad
from .labels import labelled
from .messages import PendingMessages
from .owner_layout import GroupOwnerLayout
from .owner_packing import empty_full, flat_fulls, flat_shards

Tensors = Mapping[int, torch.Tensor]


Place = tuple[int, int]  # (number of the group in the exchange, tensor index)


@dataclasses.dataclass(frozen=True)
class Route:
    """What one gather over some groups moves; a scatter moves it back.

    `mine` are this rank's shards of tensors that others own, `theirs` the others' parts (with their place in the
    flattened tensor) of tensors that this rank owns; both ordered by peer, group, tensor, as the wire is.
    """

    mine: tuple[tuple[int, Place, int], ...]  # (peer, place, elements)
    theirs: tuple[tuple[int, Place, int, int], ...]  # (peer, place, start, elements)
    messages: int  # of all ranks together, one a part
    peers: communicators.Peers

    @property
    def moves(self) -> bool:
        """Whether any rank sends anything."""
        return self.messages > 0


def communicators_of(layouts: Sequence[GroupOwnerLayout]) -> tuple[str | None, ...]:
    """By name, what layouts exchange over: equal layouts of a process group's next life have others."""
    return tuple(layout.peers.group for layout in layouts)


def by_ranks(layouts: Sequence[GroupOwnerLayout]) -> list[tuple[int, ...]]:
    """Positions of the layouts over the same ranks: those share an exchange. In one order on every rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, layout in enumerate(layouts):
        found.setdefault(layout.ranks, []).append(number)
    return [tuple(numbers) for numbers in found.values()]


def route_of(layouts: tuple[GroupOwnerLayout, ...]) -> Route:
    """Computed once for a set of layouts, from integers alone: every rank finds the same `moves`."""
    return _route_of(layouts, communicators_of(layouts))


@functools.lru_cache(maxsize=256)
def _route_of(layouts: tuple[GroupOwnerLayout, ...], communicators: tuple[str | None, ...]) -> Route:
    first = layouts[0]
    for layout in layouts:
        if layout.ranks != first.ranks:
            raise StateError(
                bad(
                    "owner_layout",
                    f"groups over ranks {first.ranks} and {layout.ranks}",
                    "groups that the same ranks share, in the same order",
                    "make one call for each set of ranks",
                )
            )
    order = {rank: number for number, rank in enumerate(first.peers.group_order)}
    mine, theirs = [], []
    for number, layout in enumerate(layouts):
        for index, piece in layout.mine.items():
            owner = layout.tensor_to_owner[index]
            if owner != layout.this_rank:
                mine.append((order[owner], (number, index), piece.size))
        for index in layout.owned:
            for piece in layout.pieces[index]:
                if piece.rank != layout.this_rank:
                    theirs.append((order[piece.rank], (number, index), piece.start, piece.size))
    messages = sum(
        piece.rank != owner
        for layout in layouts
        for index, owner in layout.tensor_to_owner.items()
        for piece in layout.pieces[index]
    )
    return Route(tuple(sorted(mine)), tuple(sorted(theirs)), messages, first.peers)


# More of them are slower one by one than packed, and NCCL has a limit.
_MOST_MESSAGES = 512


def _is_unpacked(route: Route, layouts: Sequence[GroupOwnerLayout], wire_dtype: torch.dtype | None) -> bool:
    """Whether parts travel as they are. The same answer on every rank."""
    few = wire_dtype is None and 0 < route.messages <= _MOST_MESSAGES
    return few and collectives.takes_messages(route.peers, communicators.device_of(layouts[0].mesh))


def _launch(
    parts: Sequence[torch.Tensor],
    wires: Sequence[torch.dtype],
    send: Sequence[tuple[int, int]],
    receive: Sequence[tuple[int, int]],
    route: Route,
    layouts: Sequence[GroupOwnerLayout],
    phase: str,
) -> collectives.PendingCollective | None:
    """Launch the exchange of flat parts, ordered by peer; `send` and `receive` are (peer, bytes)."""
    if not route.moves:
        return None
    sizes = [[0] * len(route.peers.group_order) for _ in range(2)]
    for row, pairs in zip(sizes, (send, receive), strict=True):
        for peer, nbytes in pairs:
            row[peer] += nbytes
    if not parts:
        wire = torch.empty(0, dtype=torch.uint8, device=communicators.device_of(layouts[0].mesh))
    elif len({part.dtype for part in parts}) == 1 and len(set(wires)) == 1:
        wire = torch.cat(tuple(parts)).to(wires[0]).view(torch.uint8)
    else:
        wire = torch.cat([part.to(dtype).view(torch.uint8) for part, dtype in zip(parts, wires, strict=True)])
    with labelled("launch owner exchange", _subject(layouts), phase):
        return collectives.all_to_all(wire, sizes[1], sizes[0], route.peers)


def _finish(pending: Any, layouts: Sequence[GroupOwnerLayout], phase: str) -> Any:
    with labelled("wait for owner exchange", _subject(layouts), phase):
        return pending.wait()


def _subject(layouts: Sequence[GroupOwnerLayout]) -> str:
    return "of 1 group" if len(layouts) == 1 else f"of {len(layouts)} groups"


def _cut(wire: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """The received bytes as flat tensors of (elements, dtype), in the order of the wire."""
    parts, start = [], 0
    for numel, dtype in sizes:
        part = wire.narrow(0, start, numel * dtype.itemsize)
        # Behind a narrower dtype a part may start off its own alignment.
        parts.append((part if start % dtype.itemsize == 0 else part.clone()).view(dtype))
        start += numel * dtype.itemsize
    return parts


def _values(flat: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Detached: a view of a leaf requires grad as the leaf does, also when it is made under `torch.no_grad`."""
    return {index: tensor.detach() if tensor.requires_grad else tensor for index, tensor in flat.items()}


@dataclasses.dataclass(frozen=True)
class PendingGather:
    """A launched `gather_to_owner`; `wait` gives the full tensors by place."""

    layouts: tuple[GroupOwnerLayout, ...]
    given: Sequence[Tensors]
    shards: tuple[dict[int, torch.Tensor], ...]
    wires: tuple[torch.dtype, ...]
    route: Route
    pending: collectives.PendingCollective | PendingMessages | None
    landed: dict[Place, torch.Tensor] = dataclasses.field(default_factory=dict)  # flat and whole, if unpacked

    def wait(self, out: Sequence[Tensors] | None = None) -> dict[Place, torch.Tensor]:
        """Full tensors, in `out` where given; one that is held whole is a view of its shard otherwise."""
        received: dict[tuple[Place, int], torch.Tensor] = {}
        if isinstance(self.pending, PendingMessages):
            _finish(self.pending, self.layouts, "gather")
        elif self.pending is not None:
            theirs = self.route.theirs
            parts = _cut(
                _finish(self.pending, self.layouts, "gather"),
                [(size, self.wires[place[0]]) for _, place, _, size in theirs],
            )
            received = {(place, start): part for (_, place, start, _), part in zip(theirs, parts, strict=True)}
        fulls = {}
        for number, layout in enumerate(self.layouts):
            own, me = self.shards[number], layout.this_rank
            for index in layout.owned:
                place, pieces = (number, index), layout.pieces[index]
                if place in self.landed:
                    parts = [self.landed[place].narrow(0, piece.start, piece.size) for piece in pieces]
                else:
                    parts = [own[index] if piece.rank == me else received[place, piece.start] for piece in pieces]
                if out is not None and index in out[number]:
                    fulls[place] = out[number][index]
                    flat = fulls[place].view(-1)
                    collectives.copy_many([flat.narrow(0, piece.start, piece.size) for piece in pieces], parts)
                elif not parts:
                    fulls[place] = empty_full(layout, index, self.given[number], own)
                elif place in self.landed:
                    fulls[place] = self.landed[place].view(layout.layout.tensor_shapes[index])
                else:
                    parts = [part.to(own[index].dtype) for part in parts]
                    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
                    fulls[place] = flat.view(layout.layout.tensor_shapes[index])
        return fulls


def launch_gather(
    layouts: tuple[GroupOwnerLayout, ...], shards: Sequence[Tensors], wire_dtype: torch.dtype | None, route: Route
) -> PendingGather:
    """Launch the gather of several groups; see `gather_to_owner`. `route` is ``route_of(layouts)``."""
    flat = tuple(_values(flat_shards(layout, mine, "shards")) for layout, mine in zip(layouts, shards, strict=True))
    wires = tuple(wire_dtype or next((s.dtype for s in mine.values()), torch.uint8) for mine in flat)
    if _is_unpacked(route, layouts, wire_dtype):
        return _send_shards(layouts, shards, flat, wires, route)
    parts = [flat[number][index] for _, (number, index), _ in route.mine]
    going = [wires[number] for _, (number, _), _ in route.mine]
    send = [(peer, size * wires[place[0]].itemsize) for peer, place, size in route.mine]
    receive = [(peer, size * wires[place[0]].itemsize) for peer, place, _, size in route.theirs]
    pending = _launch(parts, going, send, receive, route, layouts, "gather")
    return PendingGather(layouts, shards, flat, wires, route, pending)


def _send_shards(
    layouts: tuple[GroupOwnerLayout, ...],
    given: Sequence[Tensors],
    flat: tuple[dict[int, torch.Tensor], ...],
    wires: tuple[torch.dtype, ...],
    route: Route,
) -> PendingGather:
    """Each shard straight into its place in the full tensor; the owner's own is copied while they travel."""
    landed = {
        (number, index): flat[number][index].new_empty(layout.layout.tensor_range(index).size)
        for number, layout in enumerate(layouts)
        for index in layout.owned
        if any(piece.rank != layout.this_rank for piece in layout.pieces[index])
    }
    sends = [(peer, flat[number][index]) for peer, (number, index), _ in route.mine]
    receives = [(peer, landed[place].narrow(0, start, size)) for peer, place, start, size in route.theirs]
    with labelled("launch owner exchange", _subject(layouts), "gather"):
        pending = collectives.send_and_receive(sends, receives, route.peers, communicators.device_of(layouts[0].mesh))
    for (number, index), full in landed.items():
        for piece in layouts[number].pieces[index]:
            if piece.rank == layouts[number].this_rank:
                full.narrow(0, piece.start, piece.size).copy_(flat[number][index])
    return PendingGather(layouts, given, flat, wires, route, pending, landed)


@dataclasses.dataclass(frozen=True)
class PendingScatter:
    """A launched `scatter_from_owner`; `wait` gives this rank's flat shards by place."""

    layouts: tuple[GroupOwnerLayout, ...]
    fulls: tuple[dict[int, torch.Tensor], ...]
    dtypes: tuple[torch.dtype, ...]
    wires: tuple[torch.dtype, ...]
    route: Route
    pending: collectives.PendingCollective | PendingMessages | None
    landed: dict[Place, torch.Tensor] = dataclasses.field(default_factory=dict)  # flat shards, if unpacked

    def wait(self) -> dict[Place, torch.Tensor]:
        """Flat shards: views of the full results, or of what was received, in the wire's dtype."""
        found: dict[Place, torch.Tensor] = dict(self.landed)
        if isinstance(self.pending, PendingMessages):
            _finish(self.pending, self.layouts, "scatter")
        elif self.pending is not None:
            mine = self.route.mine
            parts = _cut(
                _finish(self.pending, self.layouts, "scatter"),
                [(size, self.wires[place[0]]) for _, place, size in mine],
            )
            found = {place: part for (_, place, _), part in zip(mine, parts, strict=True)}
        for number, layout in enumerate(self.layouts):
            for index, full in self.fulls[number].items():
                piece = layout.mine[index]
                found[number, index] = full.narrow(0, piece.start, piece.size)
        return found


def scatter_dtypes(
    layouts: Sequence[GroupOwnerLayout],
    fulls: Sequence[Tensors],
    flat: Sequence[Mapping[int, torch.Tensor]],
    wire_dtype: torch.dtype | None,
    dtypes: Sequence[torch.dtype | None],
) -> list[torch.dtype]:
    """The dtype of each group's scattered shards.

    Raises:
        StateError: nothing tells it, or a receiver could not know it.
    """
    known = [
        told or layout.dtype or _dtype_of(layout, given, mine)
        for layout, given, mine, told in zip(layouts, fulls, flat, dtypes, strict=True)
    ]
    if wire_dtype is None:
        for layout, told, dtype in zip(layouts, dtypes, known, strict=True):
            if told is None and layout.dtype is None:
                _check_told(layout, dtype)
    return known


def launch_scatter(
    layouts: tuple[GroupOwnerLayout, ...],
    fulls: Sequence[Tensors],
    wire_dtype: torch.dtype | None,
    dtypes: Sequence[torch.dtype | None],
    route: Route,
) -> PendingScatter:
    """Launch the scatter of several groups; see `scatter_from_owner`. `dtypes` are those of `out`, where given."""
    flat = tuple(_values(flat_fulls(layout, mine, "fulls")) for layout, mine in zip(layouts, fulls, strict=True))
    known = scatter_dtypes(layouts, fulls, flat, wire_dtype, dtypes)
    wires = tuple(wire_dtype or dtype for dtype in known)
    parts = [flat[number][index].narrow(0, start, size) for _, (number, index), start, size in route.theirs]
    going = [wires[number] for _, (number, _), _, _ in route.theirs]
    if _is_unpacked(route, layouts, wire_dtype):
        sends = [(peer, part.to(wire)) for (peer, *_), part, wire in zip(route.theirs, parts, going, strict=True)]
        device = communicators.device_of(layouts[0].mesh)
        landed = {place: torch.empty(size, dtype=wires[place[0]], device=device) for _, place, size in route.mine}
        receives = [(peer, landed[place]) for peer, place, _ in route.mine]
        with labelled("launch owner exchange", _subject(layouts), "scatter"):
            pending = collectives.send_and_receive(sends, receives, route.peers, device)
        return PendingScatter(layouts, flat, tuple(known), wires, route, pending, landed)
    send = [(peer, size * wires[place[0]].itemsize) for peer, place, _, size in route.theirs]
    receive = [(peer, size * wires[place[0]].itemsize) for peer, place, size in route.mine]
    pending = _launch(parts, going, send, receive, route, layouts, "scatter")
    return PendingScatter(layouts, flat, tuple(known), wires, route, pending)


def _dtype_of(layout: GroupOwnerLayout, given: Tensors, mine: Tensors) -> torch.dtype:
    """The dtype of a group's results, where nothing but the results that this rank owns tells it.

    Raises:
        StateError: it owns tensors without elements only, and those are left out.
    """
    for full in mine.values():
        return full.dtype
    # Other owners count on this rank knowing, as it owns something.
    for index in layout.owned:
        full: Any = given.get(index)
        if isinstance(full, torch.Tensor):
            return full.dtype
    if layout.owned and layout.mine:
        raise StateError(
            bad(
                "fulls",
                f"no entry for tensor {layout.owned[0]}, which has no elements but alone tells this rank the dtype",
                "every tensor that this rank owns",
                "add it, or pass `out`, or give GroupOwnerLayout its `dtype` (from_group and plan_owners do)",
            )
        )
    return torch.get_default_dtype()


def _check_told(layout: GroupOwnerLayout, dtype: torch.dtype) -> None:
    """Refuse a dtype that a receiver without tensors of its own could not know."""
    owners = set(layout.tensor_to_owner.values())
    strangers = [holder for holder, _ in layout.traffic() if holder not in owners]
    if strangers and dtype != torch.get_default_dtype():
        raise StateError(
            bad(
                "fulls",
                f"{dtype} results for rank {strangers[0]}, which owns nothing and can't tell",
                "a dtype that every receiver knows",
                "pass `wire_dtype` or `out`, or give GroupOwnerLayout its `dtype` (from_group and plan_owners do)",
            )
        )
