"""Muon on sharded weights: momentum stays sharded, each matrix is orthogonalised once, by the rank that owns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checks import check_flag, check_mapping, check_number, is_finite, is_integer, shown
from ..errors import MfsdpError, StateError, bad
from ..owner_compute import in_batches, map_owned, one_by_one
from ..spec import ShardSpec
from ..state import ShardState, check_alive, check_state, zeros_like
from .base import Optimizer, check_finished, check_spec, check_weights, count_up, finish, register_opt_state, writable
from .muon_plan import MuonPlan, Split, muon_plan
from .newton_schulz import Coefficients, compiled, gram_newton_schulz, newton_schulz
from .options import LearningRate, check_learning_rate, learning_rate

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@register_opt_state("step", "momentum_buffer", "fallback")
@dataclasses.dataclass(frozen=True, eq=False)
class MuonState:
    """State of `muon`: a node of optree and torch pytrees.

    Args:
        step: steps taken, 0-D float32.
        momentum_buffer: running mean of the gradient, sharded as the weights; of Muon's parameters only.
        fallback: the fallback optimizer's state, of the other parameters only; None without one.
        spec: the plan, static.
        plan: which parameters are Muon's, and their owners; static.
    """

    step: torch.Tensor
    momentum_buffer: ShardState
    fallback: Any
    spec: ShardSpec
    plan: MuonPlan


@dataclasses.dataclass(frozen=True, eq=False)
class _Muon:
    lr: LearningRate
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: Coefficients
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    fallback: Optimizer | None
    exclude: tuple[str, ...]
    split: dict[str, Split]
    batched: bool
    buckets: int
    compile_ns: bool
    gram: bool

    def init(self, state: ShardState) -> MuonState:
        check_weights(state)
        split, has_fallback = tuple(self.split.items()), self.fallback is not None
        plan = muon_plan(state.spec, self.exclude, split, self.ns_steps, has_fallback, self.buckets)
        momentum = zeros_like(plan.mine.state(state, plan.mine.take(state.main)))
        fallback = None
        if self.fallback is not None and plan.others is not None:
            fallback = self.fallback.init(plan.others.state(state, plan.others.take(state.main)))
        step = torch.zeros((), device=state.spec.device)
        return MuonState(step, momentum, fallback, state.spec, plan)

    def step(
        self, grads: ShardState, opt_state: MuonState, state: ShardState, *, donate: bool = False
    ) -> tuple[ShardState, MuonState]:
        check_flag("donate", donate)
        check_weights(state)
        check_state(grads, "grads", state.spec)
        check_finished(grads, "grads")
        if not isinstance(opt_state, MuonState):
            raise StateError(
                bad("opt_state", f"a {type(opt_state).__name__}", "a MuonState", "pass what init(state) returned")
            )
        check_spec(opt_state.spec, state.spec)
        check_alive(opt_state.momentum_buffer, "opt_state.momentum_buffer")
        plan = opt_state.plan
        if plan.chosen != (self.exclude, tuple(self.split.items()), self.buckets):
            raise StateError(
                bad(
                    "opt_state",
                    "one made with other `exclude`, `split` or `buckets`",
                    "a state of this optimizer",
                    "call init(state) again",
                )
            )
        if (opt_state.fallback is None) != (self.fallback is None or plan.others is None):
            raise StateError(
                bad(
                    "opt_state",
                    f"one {'without' if opt_state.fallback is None else 'with'} a fallback's state",
                    f"one {'without' if self.fallback is None else 'with'} it, as this optimizer has",
                    "call init(state) of this optimizer",
                )
            )
        lr = learning_rate(self.lr, opt_state.step)
        main = writable(state, donate=donate)
        fallback, others = opt_state.fallback, plan.others
        if self.fallback is not None and others is not None:  # first: what it refuses has changed nothing yet
            weights = others.state(state, others.take(main))
            stepped, fallback = self.fallback.step(
                others.state(grads, others.take(grads.main)), opt_state.fallback, weights, donate=donate
            )
            with torch.no_grad():
                others.put(stepped.main, main)
        with torch.no_grad():
            momentum = writable(opt_state.momentum_buffer, donate=donate)
            updates = self._updates(plan, grads, momentum)
            self._orthogonalise(plan, updates)
            self._apply(plan, main, updates, lr)
        buffer = plan.mine.state(state, momentum)
        state = finish("muon", state, main, grads, opt_state.momentum_buffer, donate=donate)
        return state, MuonState(count_up(opt_state.step, donate=donate), buffer, fallback, opt_state.spec, plan)

    def _updates(self, plan: MuonPlan, grads: ShardState, momentum: list[torch.Tensor]) -> list[torch.Tensor]:
        """New momentum, in place; and what is to be orthogonalised, in bfloat16 as Newton-Schulz reads it."""
        updates = []
        for number, runs, buffer in zip(plan.mine.numbers, plan.mine.runs, momentum, strict=True):
            update = torch.empty(buffer.shape, dtype=torch.bfloat16, device=buffer.device)
            for run in runs:
                mine = buffer.narrow(0, run.start_in_subset, run.size)
                grad = grads.main[number].narrow(0, run.start, run.size).to(mine.dtype)
                mine.lerp_(grad, 1 - self.momentum)
                ahead = grad.lerp(mine, self.momentum) if self.nesterov else mine
                update.narrow(0, run.start_in_subset, run.size).copy_(ahead)
            updates.append(update)
        return updates

    def _orthogonalise(self, plan: MuonPlan, updates: list[torch.Tensor]) -> None:
        """Every matrix in `updates` by its result, in place. The wire is bfloat16, as both ends are: exact."""
        function = gram_newton_schulz if self.gram else newton_schulz
        if self.compile_ns and not torch.compiler.is_compiling():
            function = compiled(function)

        def ns(matrix: torch.Tensor) -> torch.Tensor:
            return function(matrix, self.ns_coefficients, self.ns_steps, self.eps)

        one = in_batches(ns) if self.batched else one_by_one(ns)

        def evaluate(fulls: list[torch.Tensor]) -> list[torch.Tensor]:
            # A matrix of a 3-D tensor arrives as (1, m, n).
            results = one([full.view(full.shape[-2:]) for full in fulls])
            return [result.reshape(full.shape) for full, result in zip(fulls, results, strict=True)]

        map_owned(evaluate, plan.schedule, updates, updates, wire_dtype=None)

    def _apply(
        self, plan: MuonPlan, main: list[torch.Tensor], updates: list[torch.Tensor], lr: float | torch.Tensor
    ) -> None:
        decay = _as_scalar(1 - lr * self.weight_decay)
        for number, runs in zip(plan.mine.numbers, plan.mine.runs, strict=True):
            for run in runs:
                main[number].narrow(0, run.start, run.size).mul_(decay)
        for step in plan.applications:
            weights = main[step.number].narrow(0, step.start, step.size)
            update = updates[step.position].narrow(0, step.start_in_update, step.size)
            rate = _as_scalar(lr * step.ratio(self.adjust_lr_fn))
            if isinstance(rate, torch.Tensor):
                # A 0-D tensor doesn't widen: without the cast the product would be rounded to bfloat16.
                weights.sub_(update.to(weights.dtype) * rate)
            else:
                weights.add_(update, alpha=-rate)


def _as_scalar(value: float | torch.Tensor) -> float | torch.Tensor:
    """A number, of a tensor that was computed in its own precision, as torch.optim.Muon computes rates.

    Not of one on another device, as that would be a sync.
    """
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not torch.compiler.is_compiling():
        return value.item()
    return value


def muon(
    lr: LearningRate = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    fallback: Optimizer | None = None,
    exclude: Sequence[str] = (),
    split: Mapping[str, Split] | None = None,
    batched: bool = False,
    buckets: int = 2,
    compile_ns: bool = False,
    gram: bool = False,
) -> Optimizer:
    """Muon, equal to `torch.optim.Muon` on the unsharded model, whatever the number of ranks.

    Which parameters are Muon's is decided from their logical shapes: matrices, and 3-D tensors (stacks of matrices
    along dim 0, as of experts), but none that a pattern of `exclude` selects. All others are `fallback`'s, which
    runs on them alone.

    Momentum and weights stay sharded. After the gradients are finished, once a step, matrices that straddle ranks
    travel to their owners and back (`owner_map`), in bfloat16, which is what Newton-Schulz computes in: nothing is
    rounded that torch would not round. Matrices that one rank holds whole, among them all of a 3-D tensor, move
    nothing. A step also communicates what `sync_model_weights` does.

    Args:
        lr: a number, a 0-D tensor, or a schedule as in `adamw`. The decay uses it unadjusted.
        weight_decay: times the learning rate, the part of the weight that is taken off each step.
        momentum: decay of the running mean of the gradient (``lerp``).
        nesterov: orthogonalise the gradient's own interpolation with the momentum.
        ns_coefficients: of the quintic polynomial.
        eps: floor of the Frobenius norm.
        ns_steps: iterations, fewer than 100.
        adjust_lr_fn: "original" (None): times ``sqrt(max(1, m / n))``; "match_rms_adamw": times
            ``0.2 sqrt(max(m, n))``; for the global shape of each matrix.
        fallback: optimizer of all other parameters, such as `adamw`.
        exclude: patterns (as `ShardSpec.select`) of parameters for `fallback` whatever their shape, such as
            ``("emb*", "head*")``.
        split: by pattern, a number of equal parts or their rows, of matrices that are several along dim 0: fused
            QKV, or heads. Each part is a matrix of its own. Where two patterns select a matrix, the later one wins;
            one that selects none of Muon's matrices is refused.
        batched: Newton-Schulz of same-shape matrices in one call. Batched products may round otherwise.
        buckets: exchanges each way. With more than one, one bucket's exchange runs beside another's Newton-Schulz.
        compile_ns: `torch.compile` Newton-Schulz. May round otherwise.
        gram: iterate on the Gram matrix; see `newton_schulz.gram_newton_schulz` for its numerics.

    Returns:
        The optimizer; its state is a `MuonState`.

    Raises:
        MfsdpError: a bad value, by name.
        StateError: by `init`: a parameter that is neither Muon's nor has a `fallback`, by path; a `split` that
            doesn't fit. By `step`: gradients that still accumulate, or arguments of different plans.
        DonatedError: by `step`: an argument that was donated before.

    Not claimed equal: `torch.optim.Muon` with ``nesterov=False`` on bfloat16 parameters. There Newton-Schulz
    normalises in place what is the momentum buffer itself (seen in torch 2.13), so its momentum is lost each step;
    here it is kept.

    Sources: Keller Jordan's Muon; Moonlight (arXiv 2502.16982) for "match_rms_adamw"; `torch.optim.Muon`.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.eye(2).requires_grad_(), "b": torch.ones(2, requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp()))
    >>> opt = mf.optim.muon(lr=0.1, fallback=mf.optim.sgd(lr=0.5))
    >>> state, opt_state = opt.step(mf.tree_map(torch.ones_like, state), opt.init(state), state)
    >>> mf.unshard(state)["b"], opt_state.momentum_buffer.main[0].shape
    (tensor([0.5000, 0.5000]), torch.Size([4]))
    """
    check_learning_rate("lr", lr)
    for name, value in (("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)):
        check_number(name, value)
    for name, value in (
        ("nesterov", nesterov),
        ("batched", batched),
        ("compile_ns", compile_ns),
        ("gram", gram),
    ):
        check_flag(name, value)
    for name, value, below in (("ns_steps", ns_steps, 100), ("buckets", buckets, 1 << 16)):
        if not is_integer(value) or not 1 <= value < below:
            raise MfsdpError(bad(name, shown(value), f"an integer from 1 to {below - 1}", "leave it out"))
    three = isinstance(ns_coefficients, (tuple, list)) and len(ns_coefficients) == 3
    if not three or not all(map(is_finite, ns_coefficients)):
        raise MfsdpError(bad("ns_coefficients", shown(ns_coefficients), "three finite numbers", "leave it out"))
    if not (adjust_lr_fn is None or isinstance(adjust_lr_fn, str)) or adjust_lr_fn not in _ADJUSTMENTS:
        raise MfsdpError(bad("adjust_lr_fn", shown(adjust_lr_fn), f"one of {_ADJUSTMENTS}", "mend the name"))
    if not isinstance(exclude, (tuple, list)) or not all(isinstance(pattern, str) and pattern for pattern in exclude):
        raise MfsdpError(bad("exclude", shown(exclude), "a tuple of patterns", "write ('emb*', 'head*')"))
    if fallback is not None and not all(callable(getattr(fallback, name, None)) for name in ("init", "step")):
        raise MfsdpError(bad("fallback", f"a {type(fallback).__name__}", "an optimizer", "pass optim.adamw(lr=3e-4)"))
    if split is not None:
        check_mapping("split", split, "parts by pattern, or None", "write {'qkv': (64, 32, 32)}")
    parts = {pattern: _split(pattern, value) for pattern, value in (split or {}).items()}
    coefficients: Any = tuple(ns_coefficients)
    return _Muon(
        lr,
        weight_decay,
        momentum,
        nesterov,
        coefficients,
        eps,
        ns_steps,
        adjust_lr_fn,
        fallback,
        tuple(exclude),
        parts,
        batched,
        buckets,
        compile_ns,
        gram,
    )


def _split(pattern: str, value: Any) -> Split:
    rows = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, (tuple, list)) else ()
    named = isinstance(pattern, str) and pattern
    if not named or not rows or not all(is_integer(n) and n > 0 for n in rows):
        raise MfsdpError(
            bad(
                f"split[{shown(pattern)}]",
                shown(value),
                "a number of parts, or the rows of each",
                "write 3 or (64, 32, 32)",
            )
        )
    return value if isinstance(value, int) else rows
