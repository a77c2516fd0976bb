"""`owner_map`: a function of whole tensors, evaluated once for each by its owner, as a map over a sharded state."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import collectives, communicators
from .checks import check_flag, check_function, check_mapping, is_integer, shown
from .errors import StateError, bad
from .gather_scatter import check_wire
from .group import GroupSpec
from .owner_exchange import (
    PendingGather,
    PendingScatter,
    Route,
    by_ranks,
    communicators_of,
    launch_gather,
    launch_scatter,
    route_of,
)
from .owner_layout import GroupOwnerLayout
from .placement import sharded_axes
from .state import ShardState, Stage, check_state, with_main

WholeFn = Callable[[torch.Tensor], torch.Tensor]
Place = tuple[int, int]  # (number of the group among the given ones, tensor index)


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """One exchange: the groups that take part in it, by number, with the tensors that do."""

    numbers: tuple[int, ...]
    layouts: tuple[GroupOwnerLayout, ...]
    route: Route


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What is evaluated when, for a set of groups: computed once, from integers alone."""

    layouts: tuple[GroupOwnerLayout, ...]
    local: tuple[Place, ...]  # owned and held whole by this rank
    buckets: tuple[_Bucket, ...]


def schedule_of(layouts: tuple[GroupOwnerLayout, ...], buckets: int) -> Schedule:
    """A schedule with the tensors that straddle ranks in `buckets` exchanges, each owner's spread evenly over them.

    From the layouts alone, so that every rank makes the same exchanges. Computed once for a set of layouts. Layouts
    over other ranks (meshes by unit) have buckets of their own.
    """
    return _schedule_of(layouts, buckets, communicators_of(layouts))


@functools.lru_cache(maxsize=64)
def _schedule_of(
    layouts: tuple[GroupOwnerLayout, ...], buckets: int, communicators: tuple[str | None, ...]
) -> Schedule:
    local = [
        (number, index)
        for number, layout in enumerate(layouts)
        for index, owner in sorted(layout.tensor_to_owner.items())
        if index not in layout.boundary and layout.pieces[index] and owner == layout.this_rank
    ]
    made = [bucket for numbers in by_ranks(layouts) for bucket in _buckets(layouts, numbers, buckets)]
    for layout in (*layouts, *(part for bucket in made for part in bucket.layouts)):
        _ = layout.spots, layout.owned, layout.pieces  # so that a graph that is being traced only reads them
    return Schedule(layouts, tuple(local), tuple(made))


def _buckets(layouts: tuple[GroupOwnerLayout, ...], numbers: tuple[int, ...], buckets: int) -> list[_Bucket]:
    """The exchanges of some layouts over the same ranks."""
    by_owner: dict[int, list[Place]] = {}
    for number in numbers:
        for index, owner in sorted(layouts[number].tensor_to_owner.items()):
            if index in layouts[number].boundary:
                by_owner.setdefault(owner, []).append((number, index))
    chosen: list[dict[int, list[int]]] = [{} for _ in range(buckets)]
    for places in by_owner.values():
        for position, (number, index) in enumerate(places):
            chosen[position * buckets // len(places)].setdefault(number, []).append(index)
    made = []
    for members in chosen:
        if members:
            held = tuple(sorted(members))
            parts = tuple(layouts[number].only(members[number]) for number in held)
            made.append(_Bucket(held, parts, route_of(parts)))
    return made


def map_owned(
    evaluate: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    schedule: Schedule,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    wire_dtype: torch.dtype | None,
) -> None:
    """Evaluate whole tensors at their owners; write the results' shards to flat buffers.

    Tensors that this rank holds whole are evaluated while the first exchanges are in flight, and each bucket while
    the next one's gather and the last one's scatter are.

    Args:
        evaluate: from full tensors to results of the same shapes, in order.
        schedule: `schedule_of` one layout for each flat buffer.
        sources: this rank's flat buffers.
        targets: where results go; may be the sources themselves.
        wire_dtype: dtype of what travels, both ways; None: the buffers' own.
    """
    layouts = schedule.layouts
    waiting = deque(schedule.buckets)
    gathers: deque[tuple[_Bucket, PendingGather]] = deque()
    scatters: deque[tuple[_Bucket, PendingScatter]] = deque()

    def shard(buffers: Sequence[torch.Tensor], number: int, index: int) -> torch.Tensor:
        return buffers[number].narrow(0, *layouts[number].spots[index])

    def gather_next() -> None:
        if waiting:
            bucket = waiting.popleft()
            pairs = zip(bucket.numbers, bucket.layouts, strict=True)
            shards = [{index: shard(sources, number, index) for index in layout.mine} for number, layout in pairs]
            gathers.append((bucket, launch_gather(bucket.layouts, shards, wire_dtype, bucket.route)))

    def write(found: Mapping[Place, torch.Tensor]) -> None:
        collectives.copy_many([shard(targets, *place) for place in found], list(found.values()))

    def run(fulls: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
        results = evaluate(list(fulls.values())) if fulls else []
        for (place, full), result in zip(fulls.items(), results, strict=True):
            _check_result(result, full, f"tensor {place[1]}")
        return dict(zip(fulls, results, strict=True))

    try:
        gather_next()
        gather_next()
        views = {
            (number, index): shard(sources, number, index).view(layouts[number].layout.tensor_shapes[index])
            for number, index in schedule.local
        }
        write({place: result.reshape(-1) for place, result in run(views).items()})
        while gathers:
            bucket, gather = gathers.popleft()
            results = run(gather.wait())
            fulls = [{} for _ in bucket.numbers]
            for (position, index), result in results.items():
                fulls[position][index] = result
            dtypes = [sources[number].dtype for number in bucket.numbers]
            scatters.append((bucket, launch_scatter(bucket.layouts, fulls, wire_dtype, dtypes, bucket.route)))
            gather_next()
            if len(scatters) > 1:  # results of two buckets at most are alive
                _finish(scatters, write)
        while scatters:
            _finish(scatters, write)
    finally:
        # What was launched and not waited for would leak its buffers.
        for _, pending in (*gathers, *scatters):
            if pending.pending is not None:
                pending.pending.wait()


def _finish(
    scatters: deque[tuple[_Bucket, PendingScatter]], write: Callable[[Mapping[Place, torch.Tensor]], None]
) -> None:
    bucket, scatter = scatters.popleft()
    write({(bucket.numbers[position], index): flat for (position, index), flat in scatter.wait().items()})


def _check_result(result: Any, full: torch.Tensor, what: str) -> None:
    fits = isinstance(result, torch.Tensor) and result.shape == full.shape and result.device == full.device
    if not fits or result.layout is not torch.strided or not _is_castable(result.dtype, full.dtype):
        on = f" on {result.device}" if isinstance(result, torch.Tensor) and result.device != full.device else ""
        raise StateError(
            bad("fn", f"a result that is {shown(result)}{on} for {what}", f"{shown(full)}", "keep shape and device")
        )


def _is_castable(dtype: torch.dtype, to: torch.dtype) -> bool:
    """As `torch.can_cast`, which compilers can't trace."""
    if dtype.is_complex:
        return to.is_complex
    return not dtype.is_floating_point or to.is_floating_point or to.is_complex


def one_by_one(fn: WholeFn) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """`fn` on each tensor."""
    return lambda fulls: [fn(full) for full in fulls]


def in_batches(fn: WholeFn) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """`fn` on stacks of the tensors of one shape and dtype."""

    def evaluate(fulls: list[torch.Tensor]) -> list[torch.Tensor]:
        alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for position, full in enumerate(fulls):
            alike.setdefault((full.shape, full.dtype), []).append(position)
        results: list[Any] = [None] * len(fulls)
        for positions in alike.values():
            stack = torch.stack([fulls[position] for position in positions])
            done = fn(stack)
            _check_result(done, stack, "a batch")
            for position, result in zip(positions, done.unbind(), strict=True):
                results[position] = result
        return results

    return evaluate


def owner_map(
    fn: WholeFn, *, batched: bool = False, wire_dtype: torch.dtype | None = None, buckets: int = 1
) -> Callable[[ShardState, Mapping[GroupSpec, GroupOwnerLayout]], ShardState]:
    """Lift a function of whole tensors to sharded states: gather, evaluate at owners, scatter.

    ``owner_map(fn)(state, owners)`` gives a state in which every tensor that `owners` names is ``fn`` of the whole
    tensor; others, and padding, are passed on. Each tensor is evaluated once over all the ranks that share its
    buffer (each replica of hsdp for itself; with ddp every rank has everything). Tensors that one rank holds whole
    move nothing and are evaluated while the others are in flight.

    Communicates two ``all_to_all_single`` a bucket over the sharded axes: to the owners, and back. Bytes sent a
    rank, each way: the elements of straddling tensors that aren't at their owner, times the wire's element size.

    Args:
        fn: ``full -> full`` of one shape and device; it must not write to its argument. It may return another
            dtype, which is cast to the state's; not a complex one, nor a floating-point one for integers.
        batched: call ``fn`` once for all tensors of a shape that are ready together, stacked: ``(k, *shape)``.
        wire_dtype: floating-point dtype of what travels, both ways; by default the state's own.
        buckets: into how many exchanges the straddling tensors go; with more than one, an exchange runs beside the
            evaluation of another.

    Returns:
        ``(state, owners) -> ShardState``: `state` a finished state (weights, gradients, moments), `owners` what
        `plan_owners(spec)` returned. The result has no compute weights.

    Raises:
        MfsdpError: a bad option, by name.
        StateError: not a finished state, owners of another plan or other ranks, or a result that isn't as `fn`'s must
            be.

    >>> import torch, mfsdp_fn as mf
    >>> from mfsdp_fn.owner_planning import plan_owners
    >>> params = {"w": torch.ones(2, 2, requires_grad=True), "b": torch.ones(2, requires_grad=True)}
    >>> spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3())
    >>> doubled = owner_map(lambda matrix: matrix * 2)(mf.shard(params, spec), plan_owners(spec))
    >>> doubled.main[0]
    tensor([2., 2., 2., 2., 1., 1.])
    """
    check_function("fn", fn, "owner_map(torch.neg)")
    check_flag("batched", batched)
    check_wire(wire_dtype)
    if not is_integer(buckets) or buckets < 1:
        raise StateError(bad("buckets", shown(buckets), "a positive integer", "1 makes one exchange each way"))
    evaluate = in_batches(fn) if batched else one_by_one(fn)

    def mapped(state: ShardState, owners: Mapping[GroupSpec, GroupOwnerLayout]) -> ShardState:
        check_state(state, "state")
        if state.stage is not Stage.FINAL:
            raise StateError(
                bad("state", "accumulating gradients", "a finished state", "call finish_grad_sync(grads) first")
            )
        fix = "use plan_owners(state.spec)"
        check_mapping("owners", owners, "owner layouts by group", fix, StateError)
        numbers = [_number(state, group, layout) for group, layout in owners.items()]
        main = [main.clone() for main in state.main]  # all: a result that shares buffers could be changed by donation
        sources = [state.main[number] for number in numbers]
        targets = [main[number] for number in numbers]
        with torch.no_grad():
            schedule = schedule_of(tuple(owners.values()), buckets)
            map_owned(evaluate, schedule, sources, targets, wire_dtype=wire_dtype)
        return with_main(state, tuple(main))

    return mapped


def _number(state: ShardState, group: GroupSpec, layout: GroupOwnerLayout) -> int:
    groups = state.spec.groups
    number = group.number if isinstance(group, GroupSpec) else len(groups)
    if number >= len(groups) or groups[number] != group or not isinstance(layout, GroupOwnerLayout):
        raise StateError(
            bad(
                "owners",
                f"an entry for {getattr(group, 'name', shown(group))!r}",
                "owners of the state's plan",
                "plan again",
            )
        )
    mesh, axes = groups[number].mesh, sharded_axes(group.placements.optimizer)
    # Plans over other ranks compare equal.
    elsewhere = layout.mesh is not mesh and layout.ranks != communicators.ranks_of(mesh, axes)
    if layout.layout.rank_to_offset != group.layout.rank_to_offset or elsewhere:
        raise StateError(
            bad("owners", f"another layout of {group.name!r}", "owners of the state's plan", "use plan_owners(spec)")
        )
    return number
