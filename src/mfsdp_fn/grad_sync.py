"""`reduce`, the transpose of `unshard`, and the reductions that gradients still wait for after it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from . import reduction, tree
from .checks import check_flag
from .errors import StateError, bad
from .spec import ShardSpec
from .state import NOTHING, ShardState, Stage, check_state, with_main
from .tensor_parallel import local_gradient


def reduce(
    grads: Any, spec: ShardSpec, *, into: ShardState | None = None, is_last_microbatch: bool = True
) -> ShardState:
    """The transpose of `unshard`: full local gradients to sharded ones, averaged over data-parallel ranks.

    One reduce-scatter a trainable group over each axis its gradients are sharded over, in the wire's dtype; with
    ddp and zero1 an all-reduce or reduce-scatter of what was accumulated, on the last microbatch. Outer axes are
    left to `reduce_outer`, and with them, in a plan that mixes placements by unit, whatever else waits: a state is
    finished as a whole, so ddp and zero1 units beside hsdp ones are reduced there too. With
    `RuntimePolicy.caller_managed_grad_sync` everything that can wait is left to `finish_grad_sync`.

    Args:
        grads: tree of the planned structure; a leaf may be None, which is zero. Gradients given at both places of
            a tied tensor are added; one object given twice counts once.
        spec: the plan.
        into: gradients to add to, finished or accumulating.
        is_last_microbatch: False leaves ddp and zero1 gradients accumulating, unreduced. (Beside hsdp or hfsdp units
            they are left accumulating in any case.)

    Raises:
        StateError: a gradient whose shape differs from the plan's (its path named), `into` of another plan, or
            finished `into` where the caller is to finish.
    """
    if not isinstance(spec, ShardSpec):
        raise StateError(bad("spec", f"a {type(spec).__name__}", "a ShardSpec", "pass the plan: state.spec"))
    check_flag("is_last_microbatch", is_last_microbatch)
    leaves = tree.flatten_like(spec.template, grads, "grads", spec.namespace)
    by_group = _grads_by_group(leaves, spec)
    if into is not None:
        check_state(into, "into", spec)
    managed, deferred = spec.runtime.caller_managed_grad_sync, any(group.defers for group in spec.groups)
    if managed and deferred and into is not None and into.stage is Stage.FINAL:
        raise StateError(
            bad(
                "into",
                "finished gradients",
                "gradients that still accumulate, since RuntimePolicy leaves finishing to you",
                "call finish_grad_sync after the last microbatch",
            )
        )
    total = _reduce_inner(by_group, spec, into)
    if managed:
        return total
    if (
        is_last_microbatch
        and total.stage is Stage.ACCUMULATING
        and not any(g.grad_scatters and g.defers for g in spec.groups)
    ):
        total = finish_grad_sync(total)
    if into is not None and into.stage is Stage.FINAL and deferred:
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
        given = id(grad)
        if isinstance(grad, torch.Tensor):
            grad = local_gradient(grad, leaf.parallel, leaf.path)
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
        if (leaf.group, leaf.index, given) in seen:
            continue
        seen.add((leaf.group, leaf.index, given))
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

    The same as `finish_grad_sync`: whatever else waits in those gradients (ddp, zero1) is finished too.

    A step of its own, to overlap with whatever the caller does in between: accumulate every microbatch with
    ``is_last_microbatch=False``, or plan with ``RuntimePolicy(caller_managed_grad_sync=True)``, and call this once.
    All reductions are launched, at most `max_inflight_reductions` at a time, and waited for. Finished gradients are
    returned as they are; `grads` is not changed.

    Raises:
        StateError: not a living state of gradients.
    """
    return _finish(grads)


def finish_grad_sync(grads: ShardState) -> ShardState:
    """Finish every reduction that gradients still wait for; finished ones are returned as they are.

    What `reduce_outer` does for outer axes, and for ddp and zero1 the one reduction of a step: call it after the last
    microbatch where value_and_grad didn't do it, before clipping or a step of an optimizer. `grads` is not changed.

    Raises:
        StateError: not a living state of gradients.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> policy = mf.RuntimePolicy(caller_managed_grad_sync=True)
    >>> spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp(), runtime=policy)
    >>> grads = mf.reduce({"w": torch.full((2,), 3.0)}, spec)
    >>> grads.stage, mf.finish_grad_sync(grads).main[0]
    (<Stage.ACCUMULATING: 'accumulating'>, tensor([3., 3.]))
    """
    return _finish(grads)
