"""Gather whole tensors to their owners and scatter results back (seed: gather_scatter)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import collectives, communicators
from .checks import check_mapping, shown
from .errors import StateError, bad
from .group import GroupSpec
from .owner_exchange import Tensors, by_ranks, launch_gather, launch_scatter, route_of, scatter_dtypes
from .owner_layout import GroupOwnerLayout
from .owner_packing import flat_fulls, flat_shards


def _grouped(
    owner_layout: Any, *arguments: tuple[str, Any]
) -> tuple[list[Hashable], list[GroupOwnerLayout], list[list[Tensors] | None], bool]:
    """Keys, layouts and, for each argument, its entry by group; the last: whether there was one group alone."""
    single = isinstance(owner_layout, GroupOwnerLayout)
    ok = single or isinstance(owner_layout, Mapping)
    if not ok or not (single or all(isinstance(layout, GroupOwnerLayout) for layout in owner_layout.values())):
        raise StateError(
            bad(
                "owner_layout",
                f"a {type(owner_layout).__name__}",
                "a GroupOwnerLayout, or a dict of them by group",
                "use what plan_owners(spec) or GroupOwnerLayout.from_group(group) returned",
            )
        )
    columns: list[list[Tensors] | None] = []
    for name, value in arguments:
        if name == "out" and value is None:
            columns.append(None)
        elif single:
            check_mapping(name, value, "tensors by index", "write {0: tensor}", StateError)
            columns.append([value])
        else:
            check_mapping(name, value, "a dict by group, as `owner_layout`", "write {group: {…}}", StateError)
            columns.append([value.get(key, {}) for key in owner_layout])
            for key in owner_layout:
                where = f"{name}[{key.name if isinstance(key, GroupSpec) else key!r}]"
                check_mapping(where, value.get(key, {}), "tensors by index", "write {group: {0: tensor}}", StateError)
    return (
        [None] if single else list(owner_layout),
        [owner_layout] if single else [*owner_layout.values()],
        columns,
        single,
    )


def check_wire(wire_dtype: Any) -> None:
    """Refuse what isn't a dtype that values can travel in.

    Raises:
        StateError: naming `wire_dtype`.
    """
    if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
        raise StateError(
            bad("wire_dtype", shown(wire_dtype), "a floating-point torch.dtype, or None", "write torch.bfloat16, say")
        )


def _check_values(
    name: str, given: Sequence[Tensors], wanted: Sequence[Iterable[int]], layouts: Sequence[GroupOwnerLayout], wire: Any
) -> list[torch.dtype | None]:
    """The dtype of each group's tensors; whether they are there, and of the right sizes, is seen when they are packed.

    Raises:
        StateError: tensors that require grad, lie elsewhere, or have several dtypes.
    """
    found: list[torch.dtype | None] = []
    for mine, indices, layout in zip(given, wanted, layouts, strict=True):
        device, dtype = communicators.device_of(layout.mesh), None
        for index in indices:
            value: Any = mine.get(index)
            if not isinstance(value, torch.Tensor):
                continue
            if value.requires_grad and torch.is_grad_enabled():
                got, fix = "one that requires grad", "call this under torch.no_grad(), or pass tensor.detach()"
                raise StateError(bad(name, f"{got} for tensor {index}", "values: no gradient flows through", fix))
            if value.device != device:
                raise StateError(
                    bad(
                        name,
                        f"one on {value.device} for tensor {index}",
                        f"tensors on {device}",
                        "move it to the mesh's",
                    )
                )
            if value.dtype != (dtype or value.dtype):
                got = f"{dtype} and {value.dtype} in one group"
                raise StateError(bad(name, got, "tensors of one dtype, as in a buffer", "cast them, or use two groups"))
            dtype = value.dtype
        if wire is not None and dtype is not None and not dtype.is_floating_point:
            raise StateError(
                bad("wire_dtype", wire, f"None for {dtype} tensors", "leave it out: they travel as they are")
            )
        found.append(dtype)
    return found


def _check_out(
    out: Sequence[Tensors],
    wanted: Sequence[Mapping[int, int]],
    layouts: Sequence[GroupOwnerLayout],
    dtypes: Sequence[Sequence[torch.dtype | None]],
) -> list[torch.dtype | None]:
    """The dtype of each group of `out`.

    Args:
        out: what is to be written, by group.
        wanted: the elements of each tensor in it.
        layouts: the groups.
        dtypes: what each group's may be; None says nothing.
    """
    spans: list[tuple[int, int, int]] = []
    for mine, sizes in zip(out, wanted, strict=True):
        for index, size in sizes.items():
            target: Any = mine.get(index)
            if target is None and not size:
                continue
            if not isinstance(target, torch.Tensor):
                got = "nothing" if target is None else shown(target)
            elif target.numel() != size or target.layout is not torch.strided or not target.is_contiguous():
                strides = f", strides {target.stride()}" if target.layout is torch.strided else f", {target.layout}"
                got = f"{tuple(target.shape)}{strides}"
            elif target.requires_grad:
                got = "one that requires grad"
            else:
                if size and not torch.compiler.is_compiling():  # a traced tensor has no address
                    spans.append((target.data_ptr(), target.data_ptr() + target.nbytes, index))
                continue
            expected = f"a contiguous tensor of {size} elements that doesn't require grad"
            raise StateError(bad("out", f"{got} for tensor {index}", expected, "allocate it with torch.empty"))
    found = _check_values("out", out, wanted, layouts, None)
    for dtype, allowed in zip(found, zip(*dtypes, strict=True), strict=True):
        known = [each for each in allowed if each is not None]
        if dtype is not None and known and dtype not in known:
            raise StateError(bad("out", f"{dtype} tensors", f"{known[0]}, as the group's", "allocate it in that dtype"))
    spans.sort()
    for (_, stop, index), (start, _, other) in itertools.pairwise(spans):
        if start < stop:
            got = f"tensors {index} and {other} that share memory"
            raise StateError(bad("out", got, "tensors of their own", "allocate each, or take views that don't overlap"))
    return found


def gather_to_owner(
    shards: Any, owner_layout: Any, *, out: Any = None, wire_dtype: torch.dtype | None = None
) -> dict[Any, Any]:
    """Bring every participating tensor together at its owner.

    One ``all_to_all_single`` for all groups over the same ranks, which share the buffers (with meshes by unit, one
    for each set of ranks); none at all where no tensor straddles ranks, which every rank knows by itself. A rank
    sends its parts of the tensors that others own: elements times the wire's element size, nothing else. Over NCCL,
    without a `wire_dtype` and outside compiled steps, the same bytes travel as one batch of sends and receives, each
    part straight to its place: nothing is packed or joined.

    Args:
        shards: ``{index: this rank's shard}`` of the participating tensors of which it holds elements, in any
            shape; others are not read. For several groups ``{group: {index: …}}``.
        owner_layout: a `GroupOwnerLayout`, or ``{group: GroupOwnerLayout}`` in the same order on every rank.
        out: preallocated full tensors, as the result; any shape of the right size, contiguous, of the shards'
            dtype. Written into and returned.
        wire_dtype: floating-point dtype of what travels; by default the shards' own.

    Returns:
        ``{index: full tensor}`` of what this rank owns, in the shards' dtype, or ``{group: {index: …}}``. A tensor
        that its owner holds whole moves nothing, and without `out` it is a view of the shard: don't write to it.

    Raises:
        StateError: a shard or `out` that is missing, of another size, dtype or device, or that requires grad
            (no gradient flows through: under ``torch.no_grad()`` shards may); `out` that overlaps itself; a
            `wire_dtype` that isn't a floating-point one. Before anything is sent.

    Source: `gather_scatter` of Megatron-FSDP v2; one packed exchange instead of pairs of messages.

    >>> import torch
    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> owners = GroupOwnerLayout(AbstractMesh((1,), ("dp",)), build_for_row_atomic([(2, 2)], 1), {0: 0})
    >>> gather_to_owner({0: torch.arange(4.0)}, owners)
    {0: tensor([[0., 1.], [2., 3.]])}
    """
    keys, layouts, (given, targets), single = _grouped(owner_layout, ("shards", shards), ("out", out))
    check_wire(wire_dtype)
    if not layouts:
        return {}
    assert given is not None
    dtypes = _check_values("shards", given, [layout.mine for layout in layouts], layouts, wire_dtype)
    if targets is not None:
        sizes = [{i: layout.layout.tensor_range(i).size for i in layout.owned} for layout in layouts]
        _check_out(targets, sizes, layouts, [dtypes])
    sets = by_ranks(layouts)
    if len(sets) > 1:  # refuse what is wrong with any before the first is sent
        for layout, mine in zip(layouts, given, strict=True):
            flat_shards(layout, mine, "shards")
    pendings = []
    for numbers in sets:
        some = tuple(layouts[number] for number in numbers)
        pendings.append(launch_gather(some, [given[number] for number in numbers], wire_dtype, route_of(some)))
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

    One ``all_to_all_single`` for all groups over the same ranks, or none; the same elements travel as in the gather,
    and as there, over NCCL, nothing is packed.

    Args:
        fulls: ``{index: full result}``, in any shape, of every tensor that this rank owns; others are not read.
            For several groups ``{group: {index: …}}``.
        owner_layout: as in `gather_to_owner`.
        out: preallocated shards, as the result; any shape of the right size, contiguous, of the owner layout's
            dtype or that of `fulls`. Written into and returned.
        wire_dtype: floating-point dtype of what travels; by default that of the shards.

    Returns:
        ``{index: shard}`` of everything that this rank holds elements of, the owner's own part included, in the
        shape that ``layout.local_shape`` says, or ``{group: {index: …}}``. The dtype is that of `out`, else the
        owner layout's, else that of the results this rank owns, else torch's default dtype. Parts may be views of
        `fulls`.

    Raises:
        StateError: as `gather_to_owner`, and results of a dtype that a receiver could not know. Before anything is
            sent.

    Source: `gather_scatter` of Megatron-FSDP v2.

    >>> import torch
    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> owners = GroupOwnerLayout(AbstractMesh((1,), ("dp",)), build_for_row_atomic([(2, 2)], 1), {0: 0})
    >>> scatter_from_owner({0: torch.arange(4.0)}, owners)
    {0: tensor([[0., 1.], [2., 3.]])}
    """
    keys, layouts, (given, targets), single = _grouped(owner_layout, ("fulls", fulls), ("out", out))
    check_wire(wire_dtype)
    if not layouts:
        return {}
    assert given is not None
    own = _check_values("fulls", given, [layout.owned for layout in layouts], layouts, wire_dtype)
    told: list[torch.dtype | None] = [None] * len(layouts)
    if targets is not None:
        sizes = [{i: piece.size for i, piece in layout.mine.items()} for layout in layouts]
        told = _check_out(targets, sizes, layouts, [[layout.dtype for layout in layouts], own])
    sets = by_ranks(layouts)
    if len(sets) > 1:  # refuse what is wrong with any before the first is sent
        flat = [flat_fulls(layout, mine, "fulls") for layout, mine in zip(layouts, given, strict=True)]
        scatter_dtypes(layouts, given, flat, wire_dtype, told)
    pendings = []
    for numbers in sets:
        some, mine = tuple(layouts[number] for number in numbers), [given[number] for number in numbers]
        theirs = [told[number] for number in numbers]
        pendings.append(launch_scatter(some, mine, wire_dtype, theirs, route_of(some)))
    found: dict[tuple[int, int], torch.Tensor] = {}
    known: dict[int, torch.dtype] = {}
    for numbers, pending in zip(sets, pendings, strict=True):
        known.update(zip(numbers, pending.dtypes, strict=True))
        found.update({(numbers[position], index): flat for (position, index), flat in pending.wait().items()})
    by_group: list[dict[int, torch.Tensor]] = []
    for number, layout in enumerate(layouts):
        rank = layout.ranks.index(layout.this_rank)
        mine = {index: found[number, index] for index in layout.mine}
        if targets is not None:
            collectives.copy_many([targets[number][index].view(-1) for index in mine], list(mine.values()))
            by_group.append({index: targets[number][index] for index in mine})
        else:
            dtype = known[number]
            shapes = {index: layout.layout.local_shape(index, rank) for index in mine}
            by_group.append({index: flat.to(dtype).view(shapes[index]) for index, flat in mine.items()})
    return by_group[0] if single else dict(zip(keys, by_group, strict=True))
