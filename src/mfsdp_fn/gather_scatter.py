"""Gather whole tensors to their owners and scatter results back (seed: gather_scatter)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from . import collectives
from .errors import StateError, bad
from .owner_exchange import Tensors, by_ranks, launch_gather, launch_scatter, route_of
from .owner_layout import GroupOwnerLayout
from .owner_packing import flat_fulls, flat_shards


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

    One ``all_to_all_single`` for all groups over the same ranks, which share the buffers (with meshes by unit, one
    for each set of ranks); none at all where no tensor straddles ranks, which every rank knows by itself. A rank
    sends its parts of the tensors that others own: elements times the wire's element size, nothing else.

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
    sets = by_ranks(layouts)
    if len(sets) > 1:  # refuse what is wrong with any before the first is sent
        for number, layout in enumerate(layouts):
            flat_shards(layout, {} if given is None else given[number], "shards")
    pendings = []
    for numbers in sets:
        some = tuple(layouts[number] for number in numbers)
        shards = [{} if given is None else given[number] for number in numbers]
        pendings.append(launch_gather(some, shards, wire_dtype, route_of(some)))
    by_group: list[dict[int, torch.Tensor]] = [{} for _ in layouts]
    for numbers, pending in zip(sets, pendings, strict=True):
        there = None if targets is None else [targets[number] for number in numbers]
        for (position, index), full in pending.wait(there).items():
            by_group[numbers[position]][index] = full
    return by_group[0] if single else dict(zip(keys, by_group, strict=True))


def scatter_from_owner(
    fulls: Any, owner_layout: Any, *, out: Any = None, wire_dtype: torch.dtype | None = None
) -> dict[Any, Any]:
    """Send the owners' full results back to the ranks that hold the shards: the transpose of `gather_to_owner`.

    One ``all_to_all_single`` for all groups over the same ranks, or none; the same elements travel as in the gather.

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
    sets = by_ranks(layouts)
    if len(sets) > 1:
        for number, layout in enumerate(layouts):
            flat_fulls(layout, {} if given is None else given[number], "fulls")
    pendings = []
    for numbers in sets:
        some = tuple(layouts[number] for number in numbers)
        mine = [{} if given is None else given[number] for number in numbers]
        pendings.append(launch_scatter(some, mine, wire_dtype, [dtypes[number] for number in numbers], route_of(some)))
    found: dict[tuple[int, int], torch.Tensor] = {}
    told: dict[int, torch.dtype] = {}
    for numbers, pending in zip(sets, pendings, strict=True):
        told.update(zip(numbers, pending.dtypes, strict=True))
        found.update({(numbers[position], index): flat for (position, index), flat in pending.wait().items()})
    by_group: list[dict[int, torch.Tensor]] = []
    for number, layout in enumerate(layouts):
        rank = layout.ranks.index(layout.this_rank)
        mine = {index: found[number, index] for index in layout.mine}
        if targets is not None:
            collectives.copy_many([targets[number][index].view(-1) for index in mine], list(mine.values()))
            by_group.append({index: targets[number][index] for index in mine})
        else:
            dtype = told[number]
            shapes = {index: layout.layout.local_shape(index, rank) for index in mine}
            by_group.append({index: flat.to(dtype).view(shapes[index]) for index, flat in mine.items()})
    return by_group[0] if single else dict(zip(keys, by_group, strict=True))
