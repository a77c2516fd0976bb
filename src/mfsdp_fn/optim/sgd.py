"""Stochastic gradient descent."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim.sgd import sgd as torch_sgd

from ..checks import check_flag, check_number
from ..errors import MfsdpError, StateError, bad
from ..spec import ShardSpec
from ..state import ShardState, with_main, zeros_like
from .base import Optimizer, check_step, check_weights, count_up, finish, register_opt_state, writable
from .options import (
    LearningRate,
    Overrides,
    Parts,
    batches,
    check_learning_rate,
    check_options,
    check_parts,
    cut,
    cut_like,
    make_parts,
    options_by_label,
    options_for,
)


@register_opt_state("step", "momentum")
@dataclasses.dataclass(frozen=True, eq=False)
class SGDState:
    """State of `sgd`: a node of optree and torch pytrees.

    Args:
        step: steps taken, 0-D float32.
        momentum: the momentum buffers, in the main weights' dtype; None without momentum.
        spec: the plan, static.
        parts: which elements get which options, static.
    """

    step: torch.Tensor
    momentum: ShardState | None
    spec: ShardSpec
    parts: Parts


@dataclasses.dataclass(frozen=True, eq=False)
class _SGD:
    options: dict[str, Any]
    overrides: dict[str, dict[str, Any]]
    fused: bool | None

    @property
    def _has_momentum(self) -> bool:
        return any(options.get("momentum", 0) for options in (self.options, *self.overrides.values()))

    def init(self, state: ShardState) -> SGDState:
        check_weights(state)
        parts = make_parts(state.spec, self.overrides)
        for label in dict.fromkeys(segment.label for row in parts.segments for segment in row):
            _check_nesterov(options_for(label, self.options, self.overrides))
        step = torch.zeros((), device=state.spec.device)
        return SGDState(step, zeros_like(state) if self._has_momentum else None, state.spec, parts)

    def step(
        self, grads: ShardState, opt_state: SGDState, state: ShardState, *, donate: bool = False
    ) -> tuple[ShardState, SGDState]:
        check_step(SGDState, grads, opt_state, state, donate)
        check_parts(opt_state.parts, self.overrides)
        if self._has_momentum != (opt_state.momentum is not None):
            raise StateError(
                bad(
                    "opt_state",
                    f"a state {'without' if opt_state.momentum is None else 'with'} momentum",
                    f"one {'with' if self._has_momentum else 'without'} it, as this optimizer has",
                    "call init(state) of this optimizer",
                )
            )
        fused = state.spec.device.type == "cuda" if self.fused is None else self.fused
        # A graph can't hold the fused kernel, and the compiler fuses the plain one itself.
        fused = fused and not torch.compiler.is_compiling()
        by_label = options_by_label(opt_state.parts, self.options, self.overrides, opt_state.step)
        main = writable(state, donate=donate)
        momentum = None if opt_state.momentum is None else writable(opt_state.momentum, donate=donate)
        with torch.no_grad():
            for label, places in batches(opt_state.parts, main, grads.main):
                options = by_label[label]
                # A tensor can't be a kernel's scalar in a compiled graph; the foreach form has a way round that,
                # but writes to its gradients.
                foreach = not fused and torch.compiler.is_compiling() and isinstance(options["lr"], torch.Tensor)
                mine = cut_like(grads.main, main, places)
                buffers: list[torch.Tensor | None] = [None] * len(places)
                if options["momentum"] and momentum is not None:
                    buffers = [*cut(momentum, places)]
                torch_sgd(
                    cut(main, places),
                    [grad.clone() for grad in mine] if foreach else mine,
                    buffers,
                    **options,
                    dampening=0.0,
                    maximize=False,
                    fused=fused,
                    foreach=foreach,
                )
        used = () if opt_state.momentum is None else (opt_state.momentum,)
        next_momentum = (
            None if opt_state.momentum is None or momentum is None else with_main(opt_state.momentum, tuple(momentum))
        )
        state = finish("sgd", state, main, grads, *used, donate=donate)
        return state, SGDState(count_up(opt_state.step, donate=donate), next_momentum, opt_state.spec, opt_state.parts)


def _check_nesterov(options: dict[str, Any]) -> None:
    if options["nesterov"] and not options["momentum"]:
        raise MfsdpError(bad("nesterov", True, "False without momentum", "pass momentum=0.9, say"))


def _check(argument: str, option: str, value: Any) -> None:
    if option == "lr":
        check_learning_rate(argument, value)
    elif option == "nesterov":
        check_flag(argument, value)
    else:
        check_number(argument, value)


def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    *,
    fused: bool | None = None,
    overrides: Overrides | None = None,
) -> Optimizer:
    """Stochastic gradient descent, equal to `torch.optim.SGD` on the unsharded model (without dampening).

    `init` and `step` work on flat local buffers, in the main weights' dtype, and launch one call of
    `torch.optim.sgd.sgd` for each set of options. A step communicates what `sync_model_weights` does.

    Args:
        lr: a number, a 0-D tensor, or a schedule: ``lr(step)`` with the number of steps taken before this one, a
            0-D float32 tensor, gives a number or a 0-D tensor.
        momentum: decay of the momentum buffer, which starts at zero; 0 keeps none.
        nesterov: look ahead along the momentum.
        weight_decay: times the weight, added to the gradient.
        fused: use torch's fused kernel; None: on CUDA. On the CPU it rounds otherwise than the plain one.
        overrides: options for some paths, such as ``{"norm*": {"weight_decay": 0.0}}``. A pattern is dotted and
            matches consecutive components of a path (as `ShardSpec.select`); where two patterns set one option,
            the later one wins.

    Returns:
        The optimizer; its state is an `SGDState`.

    Raises:
        MfsdpError: a bad value or unknown option, by name. `init` refuses a pattern that matches nothing.
        StateError: by `step`: gradients that still accumulate, or arguments of different plans.
        DonatedError: by `step`: an argument that was donated before.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.ones(2, requires_grad=True), "norm.w": torch.ones(1, requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp()))
    >>> grads = mf.tree_map(torch.ones_like, state)
    >>> opt = mf.optim.sgd(lr=0.5, overrides={"norm": {"lr": 0.25}})
    >>> state, opt_state = opt.step(grads, opt.init(state), state)
    >>> mf.unshard(state)
    {'w': tensor([0.5000, 0.5000]), 'norm.w': tensor([0.7500])}
    """
    if fused is not None:
        check_flag("fused", fused)
    options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    checked = check_options(options, overrides, _check)
    _check_nesterov(options)
    return _SGD(options, checked, fused)
