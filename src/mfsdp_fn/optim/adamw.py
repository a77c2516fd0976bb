"""Adam with decoupled weight decay."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from ..checks import check_flag, check_number, shown
from ..errors import MfsdpError, bad
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
)


@register_opt_state("step", "exp_avg", "exp_avg_sq")
@dataclasses.dataclass(frozen=True, eq=False)
class AdamWState:
    """State of `adamw`: a node of optree and torch pytrees.

    Args:
        step: steps taken, 0-D float32.
        exp_avg: running mean of the gradient, in the main weights' dtype.
        exp_avg_sq: running mean of its square, likewise.
        spec: the plan, static.
        parts: which elements get which options, static.
    """

    step: torch.Tensor
    exp_avg: ShardState
    exp_avg_sq: ShardState
    spec: ShardSpec
    parts: Parts


@dataclasses.dataclass(frozen=True, eq=False)
class _AdamW:
    options: dict[str, Any]
    overrides: dict[str, dict[str, Any]]
    fused: bool | None

    def init(self, state: ShardState) -> AdamWState:
        check_weights(state)
        parts = make_parts(state.spec, self.overrides)
        step = torch.zeros((), device=state.spec.device)
        return AdamWState(step, zeros_like(state), zeros_like(state), state.spec, parts)

    def step(
        self, grads: ShardState, opt_state: AdamWState, state: ShardState, *, donate: bool = False
    ) -> tuple[ShardState, AdamWState]:
        check_step(AdamWState, grads, opt_state, state, donate)
        check_parts(opt_state.parts, self.overrides)
        on_cuda = state.spec.device.type == "cuda"
        # A graph can't hold the fused kernel, and the compiler fuses the plain one itself.
        fused = (on_cuda if self.fused is None else self.fused) and not torch.compiler.is_compiling()
        # Bias corrections as Python numbers on the CPU, as torch.optim's default has them; on CUDA, and in a graph,
        # reading the step counter would be a sync.
        capturable = not fused and (on_cuda or torch.compiler.is_compiling())
        by_label = options_by_label(opt_state.parts, self.options, self.overrides, opt_state.step)
        main = writable(state, donate=donate)
        exp_avg = writable(opt_state.exp_avg, donate=donate)
        exp_avg_sq = writable(opt_state.exp_avg_sq, donate=donate)
        with torch.no_grad():
            for label, places in batches(opt_state.parts, main, grads.main):
                options = by_label[label]
                beta1, beta2 = options["betas"]
                torch_adamw(
                    cut(main, places),
                    cut_like(grads.main, main, places),
                    cut(exp_avg, places),
                    cut(exp_avg_sq, places),
                    [],
                    # The kernel counts each tensor's own counter up.
                    list(opt_state.step.expand(len(places)).clone().unbind()),
                    fused=fused,
                    foreach=False,
                    capturable=capturable,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=options["lr"],
                    weight_decay=options["weight_decay"],
                    eps=options["eps"],
                    maximize=False,
                )
        moments = with_main(opt_state.exp_avg, tuple(exp_avg)), with_main(opt_state.exp_avg_sq, tuple(exp_avg_sq))
        state = finish("adamw", state, main, grads, opt_state.exp_avg, opt_state.exp_avg_sq, donate=donate)
        return state, AdamWState(count_up(opt_state.step, donate=donate), *moments, opt_state.spec, opt_state.parts)


def _check(argument: str, option: str, value: Any) -> None:
    if option == "lr":
        check_learning_rate(argument, value)
    elif option == "betas":
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise MfsdpError(bad(argument, shown(value), "two numbers in [0, 1)", "write (0.9, 0.999)"))
        for number, beta in enumerate(value):
            check_number(f"{argument}[{number}]", beta, below=1.0)
    else:
        check_number(argument, value)


def adamw(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    fused: bool | None = None,
    overrides: Overrides | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay, equal to `torch.optim.AdamW` on the unsharded model.

    `init` and `step` work on flat local buffers, in the main weights' dtype, and launch one call of
    `torch.optim.adamw.adamw` for each set of options. A step communicates what `sync_model_weights` does.

    Args:
        lr: a number, a 0-D tensor, or a schedule: ``lr(step)`` with the number of steps taken before this one, a
            0-D float32 tensor, gives a number or a 0-D tensor.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: times the learning rate, the part of the weight that is taken off each step.
        fused: use torch's fused kernel; None: on CUDA. On the CPU it rounds otherwise than the plain one.
        overrides: options for some paths, such as ``{"norm*": {"weight_decay": 0.0}}``. A pattern is dotted and
            matches consecutive components of a path (as `ShardSpec.select`); where two patterns set one option,
            the later one wins.

    Returns:
        The optimizer; its state is an `AdamWState`.

    Raises:
        MfsdpError: a bad value or unknown option, by name. `init` refuses a pattern that matches nothing.
        StateError: by `step`: gradients that still accumulate, or arguments of different plans.
        DonatedError: by `step`: an argument that was donated before.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    >>> opt = mf.optim.adamw(lr=lambda step: 0.1 / (step + 1), weight_decay=0.0)
    >>> opt_state = opt.init(state)
    >>> for _ in range(2):
    ...     grads = mf.tree_map(torch.ones_like, state)
    ...     state, opt_state = opt.step(grads, opt_state, state, donate=True)
    >>> state.main[0], opt_state.step
    (tensor([0.8500, 0.8500]), tensor(2.))
    """
    if fused is not None:
        check_flag("fused", fused)
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return _AdamW(options, check_options(options, overrides, _check), fused)
