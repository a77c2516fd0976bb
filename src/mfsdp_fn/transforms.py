"""The pure transforms: `shard`, `unshard` (also as `launch` and `wait`), `reduce`, `sync_model_weights`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import collectives, reduction, tree
from .buffer import PendingGather, launch_gather
from .errors import StateError, bad
from .mesh import AbstractMesh
from .placement import Replicate
from .plan import tie_key
from .spec import GroupSpec, ShardSpec
from .state import NOTHING, ShardState, Stage, UnitState, check_alive, check_state, with_main
from .state import donate as mark_donated

InitFn = Callable[[str, torch.Tensor], torch.Tensor]


def shard(params: Any, spec: ShardSpec, *, init_fn: InitFn | None = None) -> ShardState:
    """This rank's part of `params`, copied into one flat buffer a group.

    Each rank takes its rows from its own `params`. Where the optimizer placement replicates over an axis, that
    axis' first rank wins (one broadcast a group over it), so replicas start equal. With parameters replicated and
    optimizer state sharded (zero1, zero2), compute weights come from one all-gather a group.

    Args:
        params: the tree that was planned: same structure, shapes, dtypes, `requires_grad` and ties.
        spec: its plan.
        init_fn: ``init_fn(path, meta_tensor)`` returns the whole value of a meta tensor, one at a time.

    Raises:
        StateError: a leaf that differs from the plan (its path named), a meta tensor without `init_fn`.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.arange(6.0).reshape(3, 2).requires_grad_()}
    >>> spec = mf.plan(params, mf.AbstractMesh((2,), ("dp",), rank=1), mf.zero3())
    >>> mf.shard(params, spec).main[0]
    tensor([4., 5., 0., 0.])
    """
    if not isinstance(spec, ShardSpec):
        raise StateError(bad("spec", f"a {type(spec).__name__}", "a ShardSpec", "make one with plan(params, …)"))
    leaves = tree.flatten_like(spec.template, params, "params", spec.namespace)
    _check_leaves(leaves, spec)
    if init_fn is not None and not any(leaf.is_meta for leaf in leaves.values()):
        raise StateError(
            bad(
                "init_fn",
                "a function",
                "None when no parameter is a meta tensor",
                "leave it out, or build the model under torch.device('meta')",
            )
        )
    main = [torch.zeros(_size(group.main_range), dtype=group.dtypes.main, device=spec.device) for group in spec.groups]
    local = [group.local_views(buffer, group.main_range) for group, buffer in zip(spec.groups, main, strict=True)]
    for number, leaf in _first_leaves(spec):
        view = local[leaf.group].get(leaf.index)
        given = leaves[number]
        value = _initial(leaf.path, given, init_fn) if given.is_meta else given.detach()
        if view is None:
            continue
        offset = spec.groups[leaf.group].views[leaf.index][0]
        row = leaf.shape[1:].numel() if leaf.shape else 1
        first = max(spec.groups[leaf.group].main_range.start - offset, 0) // row
        view.copy_(value[first : first + len(view)] if leaf.shape else value)
    if not isinstance(spec.mesh, AbstractMesh):
        _equalise_replicas(spec, main)
    state = ShardState(main=tuple(main), compute=(None,) * len(main), spec=spec)
    if isinstance(spec.mesh, AbstractMesh) and any(group.sync_gathers for group in spec.groups):
        raise StateError(
            bad(
                "spec",
                "an AbstractMesh with replicated parameters over sharded main weights",
                "a DeviceMesh, since compute weights are gathered",
                "plan with zero3() or ddp(), or a real mesh",
            )
        )
    return sync_model_weights(state)


def _size(held: Any) -> int:
    return held.stop - held.start


def _first_leaves(spec: ShardSpec) -> list[tuple[int, Any]]:
    """(number, leaf) of every tensor once: tied leaves under their first path."""
    first: dict[tuple[int, int], tuple[int, Any]] = {}
    for number, leaf in enumerate(spec.leaves):
        first.setdefault((leaf.group, leaf.index), (number, leaf))
    return list(first.values())


def _check_leaves(leaves: dict[int, Any], spec: ShardSpec) -> None:
    ties: dict[tuple[Any, ...], tuple[int, int]] = {}
    owner: dict[tuple[int, int], tuple[Any, ...]] = {}
    for number, leaf in enumerate(spec.leaves):
        tensor = leaves.get(number)
        if not isinstance(tensor, torch.Tensor):
            raise StateError(
                bad("params", f"{tensor!r} at {leaf.path!r}", "a tensor", "give the tree that was planned")
            )
        got = (tuple(tensor.shape), tensor.dtype)
        if got != (tuple(leaf.shape), leaf.dtype):
            raise StateError(
                bad(
                    "params",
                    f"{got} at {leaf.path!r}",
                    f"{(tuple(leaf.shape), leaf.dtype)}, as planned",
                    "plan again",
                )
            )
        if tensor.requires_grad != leaf.requires_grad:
            raise StateError(
                bad(
                    "params",
                    f"requires_grad={tensor.requires_grad} at {leaf.path!r}",
                    f"{leaf.requires_grad}, as planned",
                    "plan again: trainability is part of the plan",
                )
            )
        key, slot = tie_key(tensor), (leaf.group, leaf.index)
        if ties.setdefault(key, slot) != slot or owner.setdefault(slot, key) != key:
            raise StateError(
                bad(
                    "params",
                    f"a tensor at {leaf.path!r} that is tied otherwise than planned",
                    "the ties that were planned",
                    "plan again after tying or untying",
                )
            )


def _initial(path: str, meta: torch.Tensor, init_fn: InitFn | None) -> torch.Tensor:
    if init_fn is None:
        raise StateError(
            bad(
                "params",
                f"a meta tensor at {path!r}",
                "a tensor with values",
                "pass init_fn=lambda path, tensor: …",
            )
        )
    value = init_fn(path, meta)
    if not isinstance(value, torch.Tensor) or value.is_meta or value.shape != meta.shape:
        got = f"{tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
        raise StateError(
            bad(
                "init_fn",
                f"{got} for {path!r}",
                f"a tensor of shape {tuple(meta.shape)} with values",
                "return the whole parameter",
            )
        )
    return value.detach()


def _equalise_replicas(spec: ShardSpec, main: list[torch.Tensor]) -> None:
    """Replicas take the values of their axis' first rank."""
    for number, group in enumerate(spec.groups):
        for axis, placement in zip(group.axes, group.placements.optimizer, strict=True):
            if isinstance(placement, Replicate) and axis.size > 1 and main[number].numel():
                main[number] = collectives.broadcast(main[number], axis).wait()


def sync_model_weights(state: ShardState, *, donate: bool = False) -> ShardState:
    """Refresh compute weights from main weights.

    A cast a group where dtypes differ. Where parameters are less sharded than the optimizer state (zero1, zero2,
    hfsdp) also one all-gather a group, in the compute dtype: that is the one gather a step of those presets.

    Args:
        state: a state of weights.
        donate: reuse the old compute buffers where no gather replaces them; `state` can't be used again.

    Raises:
        StateError: not a finished state.
    """
    check_state(state, "state")
    if state.stage is not Stage.FINAL:
        raise StateError(bad("state", "accumulating gradients", "weights", "pass the state of weights"))
    compute: list[torch.Tensor | None] = []
    ahead: list[tuple[int, PendingGather]] = []
    for number, (group, main, old) in enumerate(zip(state.spec.groups, state.main, state.compute, strict=True)):
        compute.append(None)
        if not group.has_compute:
            continue
        if old is not None and not group.requires_grad:
            compute[-1] = old  # no optimizer changes frozen weights
            continue
        if group.sync_gathers:
            ahead.append((number, launch_gather(main.to(group.dtypes.compute), group.sync_gathers)))
            if len(ahead) > 1:  # one gather ahead: what is launched is also allocated
                done, pending = ahead.pop(0)
                compute[done] = pending.wait()
        elif group.compute_range != group.main_range:
            start = group.compute_range.start - group.main_range.start
            compute[-1] = main.narrow(0, start, _size(group.compute_range)).to(group.dtypes.compute, copy=True)
        elif donate and old is not None:
            compute[-1] = old.copy_(main)
        else:
            compute[-1] = main.to(group.dtypes.compute)
    for done, pending in ahead:
        compute[done] = pending.wait()
    if donate:
        mark_donated("sync_model_weights", state)
    return ShardState(main=state.main, compute=tuple(compute), spec=state.spec)


def weights_of(group: GroupSpec, main: torch.Tensor, compute: torch.Tensor | None) -> torch.Tensor:
    """The local buffer that is gathered for compute.

    Raises:
        StateError: the state holds none.
    """
    if compute is not None:
        return compute
    if group.has_compute:
        raise StateError(
            bad(
                "state",
                f"a state without compute weights for {group.name!r}",
                "a state of weights, synced",
                "call sync_model_weights(state) on what tree_map returned",
            )
        )
    return main if group.store_compute else main.to(group.dtypes.compute)


def whole_views(group: GroupSpec, flat: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor of a group as a view of its gathered buffer."""
    return [flat.narrow(0, offset, numel).view(shape) for offset, shape, numel in group.views]


def unit_values(spec: ShardSpec, unit: str, views: dict[int, Sequence[torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Leaf number to tensor for one unit, from each group's views; tied leaves get one object."""
    return {number: views[group][index] for number, group, index in spec.unit_leaves[unit]}


@dataclasses.dataclass(frozen=True)
class PendingUnit:
    """A unit whose gathers were launched; pass it to `wait`, once."""

    unit: UnitState
    gathers: tuple[PendingGather | None, ...]


def launch(unit: UnitState) -> PendingUnit:
    """Launch the gathers of one unit, for `wait` to finish: explicit prefetch.

    Communicates what `unshard` does. Inside `value_and_grad` the gather counts as the unit's prefetch.

    Raises:
        StateError: not a unit of a living state.
    """
    if not isinstance(unit, UnitState):
        raise StateError(bad("unit", f"a {type(unit).__name__}", "a UnitState", "pass state[unit]"))
    check_alive(unit, "unit")
    if unit.stage is not Stage.FINAL:
        raise StateError(
            bad("unit", "accumulating gradients", "a finished state", "call finish_grad_sync(grads) first")
        )
    if unit.gatherer is not None:
        unit.gatherer.launch(unit)
        return PendingUnit(unit, ())
    return PendingUnit(unit, tuple(_launch_group(unit, i) for i in range(len(unit.main))))


def _launch_group(unit: UnitState, position: int) -> PendingGather | None:
    group = unit.spec.groups[unit.spec.unit_groups(unit.unit)[position]]
    main, compute = unit.main[position], unit.compute[position]
    if tuple(main.shape) == NOTHING:  # a frozen group of gradients or moments
        return None
    if compute is None and group.has_compute:
        # Gradients and moments, and what tree_map made of weights: whole main buffers.
        return launch_gather(main, group.sync_gathers + group.gathers)
    return launch_gather(weights_of(group, main, compute), group.gathers)


def wait(pending: PendingUnit) -> Any:
    """The parameters of a launched unit, as `unshard` gives them."""
    if not isinstance(pending, PendingUnit):
        raise StateError(bad("pending", f"a {type(pending).__name__}", "what launch(unit) returned", "launch first"))
    unit = pending.unit
    return tree.build(unit.spec.unit_template(unit.unit), _Values(_wait_values(pending)))


class _Values(dict[int, Any]):
    """Values by leaf number; None for leaves of groups that hold nothing."""

    def __missing__(self, key: int) -> None:
        return None


def _wait_values(pending: PendingUnit) -> dict[int, torch.Tensor]:
    unit = pending.unit
    check_alive(unit, "unit")
    if unit.gatherer is not None:
        return unit.gatherer.gather(unit)
    numbers = unit.spec.unit_groups(unit.unit)
    views: dict[int, Sequence[Any]] = {}
    for number, gather in zip(numbers, pending.gathers, strict=True):
        group = unit.spec.groups[number]
        views[number] = [None] * len(group.views) if gather is None else whole_views(group, gather.wait())
    return unit_values(unit.spec, unit.unit, views)


def gather_values(unit: UnitState) -> dict[int, torch.Tensor]:
    """`unshard` of a unit as tensors by leaf number, for callers that place them themselves."""
    return _wait_values(launch(unit))


def unshard(state: ShardState | UnitState) -> Any:
    """The gathered parameters: of a whole state the tree that was planned, of a unit its subtree.

    One all-gather a group over each axis that its compute weights are sharded over (zero3: one; ddp, zero1,
    zero2: none), in the compute dtype; bytes received a rank: (N-1)/N of the group. Every parameter is a view of
    its group's gathered buffer; nothing is copied. Tied leaves are one tensor. The root unit is the tree without
    the other units' subtrees, which are left out of dicts and None elsewhere. A state without compute weights
    (gradients, moments) gives its main buffers' values.

    Inside `value_and_grad` differentiable: its transpose is `reduce`.

    Raises:
        StateError: not a finished, living state.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"emb": torch.ones(2, requires_grad=True), "l.0.w": torch.zeros(1, requires_grad=True)}
    >>> spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp(), units=("l.*",))
    >>> mf.unshard(mf.shard(params, spec)["l.0"])
    {'w': tensor([0.])}
    """
    if isinstance(state, UnitState):
        return wait(launch(state))
    check_state(state, "state")
    if state.gatherer is not None:
        values: dict[int, torch.Tensor] = {}
        for unit in state.spec.units:
            values.update(state.gatherer.gather(state[unit]))
        return tree.build(state.spec.template, values)
    pendings = [launch(state[unit]) for unit in state.spec.units]
    values = {}
    for pending in pendings:
        values.update(_wait_values(pending))
    return tree.build(state.spec.template, _Values(values))


def reduce(
    grads: Any, spec: ShardSpec, *, into: ShardState | None = None, is_last_microbatch: bool = True
) -> ShardState:
    """The transpose of `unshard`: full local gradients to sharded ones, averaged over data-parallel ranks.

    One reduce-scatter a trainable group over each axis its gradients are sharded over, in the wire's dtype; with
    ddp and zero1 an all-reduce or reduce-scatter of what was accumulated, on the last microbatch. Outer axes are
    left to `reduce_outer`.

    Args:
        grads: tree of the planned structure; a leaf may be None, which is zero. Gradients given at both places of
            a tied tensor are added; one object given twice counts once.
        spec: the plan.
        into: gradients to add to, finished or accumulating.
        is_last_microbatch: False leaves ddp and zero1 gradients accumulating, unreduced.

    Raises:
        StateError: a gradient whose shape differs from the plan's (its path named), or `into` of another plan.
    """
    leaves = tree.flatten_like(spec.template, grads, "grads", spec.namespace)
    by_group = _grads_by_group(leaves, spec)
    if into is not None:
        check_state(into, "into", spec)
    total = _reduce_inner(by_group, spec, into)
    if is_last_microbatch and total.stage is Stage.ACCUMULATING and not any(g.grad_scatters for g in spec.groups):
        total = finish_grad_sync(total)
    if into is not None and into.stage is Stage.FINAL and any(group.defers for group in spec.groups):
        total = finish_grad_sync(total)
        main = [a + b for a, b in zip(into.main, total.main, strict=True)]
        return with_main(total, tuple(main))
    return total


def _grads_by_group(leaves: dict[int, Any], spec: ShardSpec) -> list[dict[int, torch.Tensor]]:
    by_group: list[dict[int, torch.Tensor]] = [{} for _ in spec.groups]
    seen: set[tuple[int, int, int]] = set()
    for number, leaf in enumerate(spec.leaves):
        grad = leaves.get(number)
        if grad is None:
            continue
        if not isinstance(grad, torch.Tensor) or grad.shape != leaf.shape:
            got = tuple(grad.shape) if isinstance(grad, torch.Tensor) else repr(grad)
            raise StateError(
                bad(
                    "grads",
                    f"{got} at {leaf.path!r}",
                    f"a gradient of shape {tuple(leaf.shape)} or None",
                    "give the whole gradient",
                )
            )
        if not leaf.requires_grad:
            raise StateError(
                bad(
                    "grads",
                    f"a gradient at {leaf.path!r}, which is frozen",
                    "None",
                    "leave it out, or plan again",
                )
            )
        if (leaf.group, leaf.index, id(grad)) in seen:
            continue
        seen.add((leaf.group, leaf.index, id(grad)))
        mine = by_group[leaf.group]
        mine[leaf.index] = mine[leaf.index] + grad if leaf.index in mine else grad.detach()
    return by_group


def _reduce_inner(by_group: list[dict[int, torch.Tensor]], spec: ShardSpec, into: ShardState | None) -> ShardState:
    """Every microbatch's part: pack, reduce over the axes that gradients are sharded over, add."""
    accumulating = any(group.defers for group in spec.groups)
    base = into if into is not None and (into.stage is Stage.ACCUMULATING or not accumulating) else None
    main = [torch.empty(NOTHING, dtype=g.dtypes.grad, device=spec.device) for g in spec.groups]
    waiting: list[tuple[int, reduction.PendingReduction]] = []

    def finish() -> None:
        number, pending = waiting.pop(0)
        start = None if base is None else base.main[number]
        main[number] = reduction.accumulate(spec.groups[number], pending, start)

    for number in reversed(range(len(spec.groups))):
        group = spec.groups[number]
        if not group.requires_grad:
            continue
        if len(waiting) >= spec.runtime.max_inflight_reductions:
            finish()
        waiting.append((number, reduction.launch(group, reduction.pack(group, by_group[number]))))
    while waiting:
        finish()
    stage = Stage.ACCUMULATING if accumulating else Stage.FINAL
    return ShardState(main=tuple(main), compute=(None,) * len(main), spec=spec, stage=stage)


def _finish(grads: ShardState) -> ShardState:
    check_state(grads, "grads")
    if grads.stage is Stage.FINAL:
        return grads
    main = list(grads.main)
    waiting: list[tuple[int, reduction.PendingReduction]] = []
    for number in reversed(range(len(main))):
        group = grads.spec.groups[number]
        if not group.requires_grad:
            continue
        if len(waiting) >= grads.spec.runtime.max_inflight_reductions:
            done, pending = waiting.pop(0)
            main[done] = reduction.finish_deferred(grads.spec.groups[done], pending)
        waiting.append((number, reduction.launch_deferred(group, main[number])))
    for done, pending in waiting:
        main[done] = reduction.finish_deferred(grads.spec.groups[done], pending)
    return dataclasses.replace(grads, main=tuple(main), stage=Stage.FINAL)


def reduce_outer(grads: ShardState) -> ShardState:
    """Finish gradients over the outer axes: one all-reduce (hsdp) or reduce-scatter (hfsdp) a group.

    Finished gradients are returned as they are.
    """
    return _finish(grads)


def finish_grad_sync(grads: ShardState) -> ShardState:
    """Finish every reduction that gradients still wait for; finished ones are returned as they are."""
    return _finish(grads)
