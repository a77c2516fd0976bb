"""`value_and_grad` inside `torch.compile`: the same function said in ops that a compiler can move.

There is no tape: the graph holds the whole step. What eager does by forgetting gathered weights, `graph.regather`
does to the graph: gathers are annotated here, and so is all of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback

from . import collectives, reduction
from .errors import StateError, bad
from .graph import INFLIGHT, REGATHER
from .group import GroupSpec
from .model_weights import weights_of
from .packing import pack
from .spec import ShardSpec
from .state import ShardState, Stage, UnitState
from .unsharding import unit_values

_BACKWARD = {"phase": "backward"}


class _Enter(torch.autograd.Function):
    """What a group is differentiated with respect to: a slot with the gradient's shape and dtype, and no values.

    Not the buffer itself: autograd would cast its gradient to the buffer's dtype. It requires grad because the anchor
    does.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
        return anchor.new_empty(size, dtype=dtype)

    @staticmethod
    # The base takes any number of gradients; this node has one output.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[None, None, None]:
        return None, None, None


class _Unshard(torch.autograd.Function):
    """Gather and views; the transpose packs and reduces."""

    @staticmethod
    def forward(
        ctx: Any, slot: torch.Tensor, local: torch.Tensor, group: GroupSpec, stored: bool, again: bool, inflight: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.inflight = group, inflight
        with torch.fx.traceback.annotate({REGATHER: again}):  # a cast too: nothing of it lives on into backward
            return _views(group, _gather(group, local if stored else weights_of(group, local, None)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        with torch.fx.traceback.annotate({**_BACKWARD, INFLIGHT: ctx.inflight}):
            return _reduce(ctx.group, grads), None, None, None, None, None


def _gather(group: GroupSpec, local: torch.Tensor) -> torch.Tensor:
    flat = local
    for move in group.wire_gathers:
        flat = collectives.all_gather(flat, move.sizes, move.axis).wait()
    return flat


def _views(group: GroupSpec, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(flat.narrow(0, offset, numel).view(shape) for offset, shape, numel in group.views)


def _reduce(group: GroupSpec, grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One microbatch's contribution, in the gradient placement."""
    dtype = group.dtypes.reduce if group.grad_scatters else group.dtypes.grad
    if reduction.scales_first(group):
        grads = [grad.float() * group.scale for grad in grads]
    offsets = [offset for offset, _, _ in group.views]
    gaps = [number for gap in group.gaps for number in gap]
    packed = pack(list(grads), offsets, gaps, group.layout.size, dtype)
    return reduction.accumulate(group, reduction.launch(group, packed), None)


def _constant(number: int) -> int:
    """The same number, not a symbol: annotations take constants, and with ``dynamic=True`` Dynamo knows no others.

    From 64 on it is 64: units in flight, as many as there will be.
    """
    return next((known for known in range(1, 64) if known == number), 64)


class Session:
    """One traced call: gradient slots, and each unit's parameters."""

    def __init__(self, states: Sequence[ShardState]) -> None:
        if states[0].spec.runtime.use_symmetric_memory:
            raise StateError(
                bad(
                    "runtime.use_symmetric_memory",
                    "True in a compiled step",
                    "False: a graph's buffers are the compiler's",
                    "plan without it, or run the step uncompiled",
                )
            )
        self.states = states
        self.anchor = states[0].spec.anchor
        self.slots: dict[tuple[int, int], torch.Tensor] = {}
        self.units: dict[tuple[int, str], dict[int, torch.Tensor]] = {}

    def launch(self, unit: UnitState) -> None:
        """Nothing to do: the compiler launches."""

    def gather(self, unit: UnitState) -> dict[int, torch.Tensor]:
        """The unit's parameters; every use shares them, so that it is reduced once."""
        key = (unit.root, unit.unit)
        if key not in self.units:
            self.units[key] = self._gather(unit)
        return self.units[key]

    def _gather(self, unit: UnitState) -> dict[int, torch.Tensor]:
        spec = unit.spec
        inflight = _constant(self.states[0].spec.runtime.max_inflight_reductions)
        by_group: dict[int, Sequence[torch.Tensor]] = {}
        numbers = spec.unit_groups(unit.unit)
        for number, main, compute in zip(numbers, unit.main, unit.compute, strict=True):
            group = spec.groups[number]
            again = len(group.gathers) > 0 and unit.unit not in spec.kept_units  # Dynamo 2.11 has no bool(tuple)
            if not group.requires_grad:
                with torch.fx.traceback.annotate({REGATHER: again}):
                    by_group[number] = _views(group, _gather(group, weights_of(group, main, compute)))
                continue
            held = group.grad_range
            slot = _Enter.apply(self.anchor, held.stop - held.start, group.dtypes.grad)
            self.slots[unit.root, number] = slot
            stored = compute is not None
            # One of the two, since without elements they may be one tensor, which Dynamo takes once.
            by_group[number] = _Unshard.apply(slot, compute if stored else main, group, stored, again, inflight)
        return unit_values(spec, unit.unit, by_group)


def gradients(
    session: Session,
    loss: torch.Tensor,
    given: Sequence[ShardState | None],
    *,
    is_last_microbatch: bool,
) -> list[ShardState]:
    """The traced backward."""
    keys = list(session.slots)
    with torch.fx.traceback.annotate(_BACKWARD):
        found = torch.autograd.grad(loss, [session.slots[key] for key in keys], allow_unused=True)
    by_key = dict(zip(keys, found, strict=True))
    return [
        _finish(state.spec, root, by_key, total, last=is_last_microbatch)
        for root, (state, total) in enumerate(zip(session.states, given, strict=True))
    ]


def _finish(
    spec: ShardSpec,
    root: int,
    by_key: Mapping[tuple[int, int], torch.Tensor | None],
    given: ShardState | None,
    *,
    last: bool,
) -> ShardState:
    defers = any(group.defers for group in spec.groups)
    last = last and not spec.runtime.caller_managed_grad_sync
    final = last or not defers
    main = []
    for number, group in enumerate(spec.groups):
        grad = by_key.get((root, number))
        held = group.main_range if final else group.grad_range
        start = None if given is None else given.main[number]
        add_after = given is not None and given.stage is Stage.FINAL and defers
        if not group.requires_grad:
            main.append(torch.empty((0, 0), dtype=group.dtypes.grad, device=spec.device))
            continue
        if grad is not None and start is not None and not add_after:
            grad = (start + grad).to(group.dtypes.grad)
        elif grad is None and start is not None and not add_after:
            grad = start.clone()
        if grad is not None and last and group.defers:
            grad = reduction.finish_deferred(group, reduction.launch_deferred(group, grad))
        if grad is None:
            grad = torch.zeros(held.stop - held.start, dtype=group.dtypes.grad, device=spec.device)
        main.append(start + grad if add_after and start is not None else grad)
    stage = Stage.FINAL if final else Stage.ACCUMULATING
    return ShardState(main=tuple(main), compute=(None,) * len(main), spec=spec, stage=stage)


Transformed = Callable[..., tuple[Any, Any]]
