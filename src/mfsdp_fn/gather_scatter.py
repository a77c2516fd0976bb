"""Gather whole tensors to their owners and scatter results back (seed: gather_scatter).

One packed exchange (``all_to_all_single`` with split sizes) for any set of groups. Only tensors that more than one
rank holds travel, and of them only the parts that aren't the owner's own. The wire is bytes, so groups of several
dtypes share an exchange and a rank that holds nothing needs no dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from . import collectives
from .errors import StateError, bad
from .owner_layout import GroupOwnerLayout
from .owner_planning import flat_fulls, flat_shards

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
    moves: bool
    peers: collectives.Peers


@functools.lru_cache(maxsize=256)
def route_of(layouts: tuple[GroupOwnerLayout, ...]) -> Route:
    """Computed once for a set of layouts, from integers alone: every rank finds the same `moves`."""
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
    moves = any(layout.traffic() for layout in layouts)
    return Route(tuple(sorted(mine)), tuple(sorted(theirs)), moves, first.peers)


def _launch(
    parts: Sequence[torch.Tensor],
    wires: Sequence[torch.dtype],
    send: Sequence[tuple[int, int]],
    receive: Sequence[tuple[int, int]],
    route: Route,
    device: torch.device,
) -> collectives.Pending | None:
    """Launch the exchange of flat parts, ordered by peer; `send` and `receive` are (peer, bytes)."""
    if not route.moves:
        return None
    sizes = [[0] * len(route.peers.group_order) for _ in range(2)]
    for row, pairs in zip(sizes, (send, receive), strict=True):
        for peer, nbytes in pairs:
            row[peer] += nbytes
    if not parts:
        wire = torch.empty(0, dtype=torch.uint8, device=device)
    elif len({part.dtype for part in parts}) == 1 and len(set(wires)) == 1:
        wire = torch.cat(tuple(parts)).to(wires[0]).view(torch.uint8)
    else:
        wire = torch.cat([part.to(dtype).view(torch.uint8) for part, dtype in zip(parts, wires, strict=True)])
    return collectives.all_to_all(wire, sizes[1], sizes[0], route.peers)


def _cut(wire: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """The received bytes as flat tensors of (elements, dtype), in the order of the wire."""
    parts, start = [], 0
    for numel, dtype in sizes:
        part = wire.narrow(0, start, numel * dtype.itemsize)
        # Behind a narrower dtype a part may start off its own alignment.
        parts.append((part if start % dtype.itemsize == 0 else part.clone()).view(dtype))
        start += numel * dtype.itemsize
    return parts


@dataclasses.dataclass(frozen=True)
class PendingGather:
    """A launched `gather_to_owner`; `wait` gives the full tensors by place."""

    layouts: tuple[GroupOwnerLayout, ...]
    shards: tuple[dict[int, torch.Tensor], ...]
    wires: tuple[torch.dtype, ...]
    route: Route
    pending: collectives.Pending | None

    def wait(self, out: Sequence[Tensors] | None = None) -> dict[Place, torch.Tensor]:
        """Full tensors, in `out` where given; one that is held whole is a view of its shard otherwise."""
        received: dict[tuple[Place, int], torch.Tensor] = {}
        if self.pending is not None:
            theirs = self.route.theirs
            parts = _cut(self.pending.wait(), [(size, self.wires[place[0]]) for _, place, _, size in theirs])
            received = {(place, start): part for (_, place, start, _), part in zip(theirs, parts, strict=True)}
        fulls = {}
        for number, layout in enumerate(self.layouts):
            own, me = self.shards[number], layout.this_rank
            for index in layout.owned:
                place, pieces = (number, index), layout.pieces[index]
                parts = [own[index] if piece.rank == me else received[place, piece.start] for piece in pieces]
                if out is not None:
                    fulls[place] = out[number][index]
                    flat = fulls[place].view(-1)
                    collectives.copy_many([flat.narrow(0, piece.start, piece.size) for piece in pieces], parts)
                elif not parts:
                    shape, device = layout.layout.tensor_shapes[index], collectives.device_of(layout.mesh)
                    fulls[place] = torch.empty(shape, dtype=layout.dtype, device=device)
                else:
                    parts = [part.to(own[index].dtype) for part in parts]
                    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
                    fulls[place] = flat.view(layout.layout.tensor_shapes[index])
        return fulls


def launch_gather(
    layouts: tuple[GroupOwnerLayout, ...], shards: Sequence[Tensors], wire_dtype: torch.dtype | None, route: Route
) -> PendingGather:
    """Launch the gather of several groups; see `gather_to_owner`. `route` is ``route_of(layouts)``."""
    flat = tuple(flat_shards(layout, mine, "shards") for layout, mine in zip(layouts, shards, strict=True))
    wires = tuple(wire_dtype or next((s.dtype for s in mine.values()), torch.uint8) for mine in flat)
    parts = [flat[number][index] for _, (number, index), _ in route.mine]
    going = [wires[number] for _, (number, _), _ in route.mine]
    send = [(peer, size * wires[place[0]].itemsize) for peer, place, size in route.mine]
    receive = [(peer, size * wires[place[0]].itemsize) for peer, place, _, size in route.theirs]
    device = collectives.device_of(layouts[0].mesh)
    return PendingGather(layouts, flat, wires, route, _launch(parts, going, send, receive, route, device))


@dataclasses.dataclass(frozen=True)
class PendingScatter:
    """A launched `scatter_from_owner`; `wait` gives this rank's flat shards by place."""

    layouts: tuple[GroupOwnerLayout, ...]
    fulls: tuple[dict[int, torch.Tensor], ...]
    dtypes: tuple[torch.dtype, ...]
    wires: tuple[torch.dtype, ...]
    route: Route
    pending: collectives.Pending | None

    def wait(self) -> dict[Place, torch.Tensor]:
        """Flat shards: views of the full results, or of what was received, in the wire's dtype."""
        found: dict[Place, torch.Tensor] = {}
        if self.pending is not None:
            mine = self.route.mine
            parts = _cut(self.pending.wait(), [(size, self.wires[place[0]]) for _, place, size in mine])
            found = {place: part for (_, place, _), part in zip(mine, parts, strict=True)}
        for number, layout in enumerate(self.layouts):
            for index, full in self.fulls[number].items():
                piece = layout.mine[index]
                found[number, index] = full.narrow(0, piece.start, piece.size)
        return found


def launch_scatter(
    layouts: tuple[GroupOwnerLayout, ...],
    fulls: Sequence[Tensors],
    wire_dtype: torch.dtype | None,
    dtypes: Sequence[torch.dtype | None],
    route: Route,
) -> PendingScatter:
    """Launch the scatter of several groups; see `scatter_from_owner`. `dtypes` are those of `out`, where given."""
    flat = tuple(flat_fulls(layout, mine, "fulls") for layout, mine in zip(layouts, fulls, strict=True))
    known = [
        given or layout.dtype or next((full.dtype for full in mine.values()), torch.get_default_dtype())
        for layout, mine, given in zip(layouts, flat, dtypes, strict=True)
    ]
    wires = tuple(wire_dtype or dtype for dtype in known)
    if wire_dtype is None:
        for layout, mine, given in zip(layouts, flat, dtypes, strict=True):
            _check_told(layout, mine, given)
    parts = [flat[number][index].narrow(0, start, size) for _, (number, index), start, size in route.theirs]
    going = [wires[number] for _, (number, _), _, _ in route.theirs]
    send = [(peer, size * wires[place[0]].itemsize) for peer, place, _, size in route.theirs]
    receive = [(peer, size * wires[place[0]].itemsize) for peer, place, size in route.mine]
    device = collectives.device_of(layouts[0].mesh)
    return PendingScatter(
        layouts, flat, tuple(known), wires, route, _launch(parts, going, send, receive, route, device)
    )


def _check_told(layout: GroupOwnerLayout, fulls: Tensors, given: torch.dtype | None) -> None:
    """Refuse a dtype that a receiver without tensors of its own could not know."""
    if given is not None or layout.dtype is not None:
        return
    owners = set(layout.tensor_to_owner.values())
    strangers = [rank for _, rank in ((o, h) for h, o in layout.traffic()) if rank not in owners]
    dtype = next((full.dtype for full in fulls.values()), torch.get_default_dtype())
    if strangers and dtype != torch.get_default_dtype():
        raise StateError(
            bad(
                "fulls",
                f"{dtype} results for rank {strangers[0]}, which owns nothing and can't tell",
                "a dtype that every receiver knows",
                "pass `wire_dtype` or `out`, or give GroupOwnerLayout its `dtype` (from_group and plan_owners do)",
            )
        )


def _grouped(
    owner_layout: Any, *arguments: tuple[str, Any]
) -> tuple[list[Hashable], list[GroupOwnerLayout], list[list[Any] | None], bool]:
    """Keys, layouts and, for each argument, its entry by group; the last: whether there was one group alone."""
    if isinstance(owner_layout, GroupOwnerLayout):
        return [None], [owner_layout], [None if value is None else [value] for _, value in arguments], True
    ok = isinstance(owner_layout, Mapping)
    if not ok or not all(isinstance(layout, GroupOwnerLayout) for layout in owner_layout.values()):
        raise StateError(
            bad(
                "owner_layout",
                f"a {type(owner_layout).__name__}",
                "a GroupOwnerLayout, or a dict of them by group",
                "use what plan_owners(spec) or GroupOwnerLayout.from_group(group) returned",
            )
        )
    columns: list[list[Any] | None] = []
    for name, value in arguments:
        if value is not None and not isinstance(value, Mapping):
            raise StateError(
                bad(name, f"a {type(value).__name__}", "a dict by group, as `owner_layout`", "write {group: {…}}")
            )
        columns.append(None if value is None else [value.get(key, {}) for key in owner_layout])
    return list(owner_layout), list(owner_layout.values()), columns, False


def _check_out(out: Sequence[Tensors], wanted: Sequence[Mapping[int, int]]) -> None:
    for mine, sizes in zip(out, wanted, strict=True):
        for index, size in sizes.items():
            target = mine.get(index)
            if target is None or target.numel() != size or not target.is_contiguous():
                got = "nothing" if target is None else f"{tuple(target.shape)}, strides {target.stride()}"
                raise StateError(
                    bad("out", f"{got} for tensor {index}", f"a contiguous tensor of {size} elements", "allocate it")
                )


def gather_to_owner(
    shards: Any, owner_layout: Any, *, out: Any = None, wire_dtype: torch.dtype | None = None
) -> dict[Any, Any]:
    """Bring every participating tensor together at its owner.

    One ``all_to_all_single`` for all groups, over the ranks that share the buffers; none at all where no tensor
    straddles ranks, which every rank knows by itself. A rank sends its parts of the tensors that others own:
    elements times the wire's element size, nothing else.

    Args:
        shards: ``{index: this rank's shard}`` of the participating tensors of which it holds elements, in any
            shape; others are not read. For several groups ``{group: {index: …}}``.
        owner_layout: a `GroupOwnerLayout`, or ``{group: GroupOwnerLayout}`` in the same order on every rank.
        out: preallocated full tensors, as the result; any shape of the right size, contiguous. Written into and
            returned.
        wire_dtype: dtype of what travels; by default the shards' own.

    Returns:
        ``{index: full tensor}`` of what this rank owns, in the shards' dtype, or ``{group: {index: …}}``. A tensor
        that its owner holds whole moves nothing, and without `out` it is a view of the shard: don't write to it.

    Raises:
        StateError: a shard or `out` that is missing or of another size; before anything is sent.

    Source: `gather_scatter` of Megatron-FSDP v2; one packed exchange instead of pairs of messages.

    >>> import torch
    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> owners = GroupOwnerLayout(AbstractMesh((1,), ("dp",)), build_for_row_atomic([(2, 2)], 1), {0: 0})
    >>> gather_to_owner({0: torch.arange(4.0)}, owners)
    {0: tensor([[0., 1.], [2., 3.]])}
    """
    keys, layouts, (given, targets), single = _grouped(owner_layout, ("shards", shards), ("out", out))
    if not layouts:
        return {}
    if targets is not None:
        _check_out(targets, [{i: ol.layout.tensor_range(i).size for i in ol.owned} for ol in layouts])
    layouts = tuple(layouts)
    fulls = launch_gather(layouts, given or [{} for _ in layouts], wire_dtype, route_of(layouts)).wait(targets)
    by_group = [{index: full for (n, index), full in fulls.items() if n == number} for number in range(len(keys))]
    return by_group[0] if single else dict(zip(keys, by_group, strict=True))


def scatter_from_owner(
    fulls: Any, owner_layout: Any, *, out: Any = None, wire_dtype: torch.dtype | None = None
) -> dict[Any, Any]:
    """Send the owners' full results back to the ranks that hold the shards: the transpose of `gather_to_owner`.

    One ``all_to_all_single`` for all groups, or none; the same elements travel as in the gather.

    Args:
        fulls: ``{index: full result}``, in any shape, of every tensor that this rank owns; others are not read.
            For several groups ``{group: {index: …}}``.
        owner_layout: as in `gather_to_owner`.
        out: preallocated shards, as the result; any shape of the right size, contiguous. Written into and returned.
        wire_dtype: dtype of what travels; by default that of the shards.

    Returns:
        ``{index: shard}`` of everything that this rank holds elements of, the owner's own part included, in the
        shape that ``layout.local_shape`` says, or ``{group: {index: …}}``. The dtype is that of `out`, else the
        owner layout's, else that of the results this rank owns, else torch's default dtype. Parts may be views of
        `fulls`.

    Raises:
        StateError: a result or `out` that is missing or of another size, or results of a dtype that a receiver
            could not know; before anything is sent.

    Source: `gather_scatter` of Megatron-FSDP v2.

    >>> import torch
    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> owners = GroupOwnerLayout(AbstractMesh((1,), ("dp",)), build_for_row_atomic([(2, 2)], 1), {0: 0})
    >>> scatter_from_owner({0: torch.arange(4.0)}, owners)
    {0: tensor([[0., 1.], [2., 3.]])}
    """
    keys, layouts, (given, targets), single = _grouped(owner_layout, ("fulls", fulls), ("out", out))
    if not layouts:
        return {}
    dtypes: list[torch.dtype | None] = [None] * len(layouts)
    if targets is not None:
        _check_out(targets, [{i: piece.size for i, piece in layout.mine.items()} for layout in layouts])
        dtypes = [next((tensor.dtype for tensor in mine.values()), None) for mine in targets]
    layouts = tuple(layouts)
    pending = launch_scatter(layouts, given or [{} for _ in layouts], wire_dtype, dtypes, route_of(layouts))
    found = pending.wait()
    by_group: list[dict[int, torch.Tensor]] = []
    for number, layout in enumerate(layouts):
        rank = layout.ranks.index(layout.this_rank)
        mine = {index: found[number, index] for index in layout.mine}
        if targets is not None:
            collectives.copy_many([targets[number][index].view(-1) for index in mine], list(mine.values()))
            by_group.append({index: targets[number][index] for index in mine})
        else:
            dtype = pending.dtypes[number]
            shapes = {index: layout.layout.local_shape(index, rank) for index in mine}
            by_group.append({index: flat.to(dtype).view(shapes[index]) for index, flat in mine.items()})
    return by_group[0] if single else dict(zip(keys, by_group, strict=True))
