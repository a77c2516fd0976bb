"""Optimizers on real ranks against torch.optim on the unsharded model; donation; their states as trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import mfsdp_fn as mf
from mfsdp_fn import optim
from optim_cases import (
    OPTIMIZERS,
    STRATEGIES,
    Trace,
    abstract_state,
    assert_same,
    bits,
    fill_padding,
    gradients,
    leaves_of,
    main_weights,
    make_grads,
    make_params,
    make_state,
    reference_gradients,
)
from pool import WORLD_SIZES, run_ranks

STEPS = 3
NORMS = {"norm.weight", "blocks.0.norm.weight"}


def schedule(step: torch.Tensor) -> torch.Tensor:
    return 0.01 / (1 + step)


# Ours, and torch's for the groups (normal weights, norms).
CASES: dict[str, tuple[Callable[[], optim.Optimizer], Callable[[list[Any], list[Any]], torch.optim.Optimizer]]] = {
    "sgd": (
        lambda: optim.sgd(0.1, weight_decay=0.5),
        lambda a, b: torch.optim.SGD([*a, *b], 0.1, weight_decay=0.5),
    ),
    "momentum": (
        lambda: optim.sgd(0.1, 0.9, weight_decay=0.01, overrides={"norm*": {"weight_decay": 0.0, "momentum": 0.0}}),
        lambda a, b: torch.optim.SGD(
            [{"params": a, "weight_decay": 0.01}, {"params": b, "momentum": 0.0}], 0.1, momentum=0.9
        ),
    ),
    "nesterov": (
        lambda: optim.sgd(torch.tensor(0.1), 0.9, True),
        lambda a, b: torch.optim.SGD([*a, *b], torch.tensor(0.1), momentum=0.9, nesterov=True),
    ),
    "adamw": (lambda: optim.adamw(), lambda a, b: torch.optim.AdamW([*a, *b])),
    "adamw options": (
        lambda: optim.adamw(
            0.1, (0.8, 0.95), 1e-6, 0.1, overrides={"norm*": {"weight_decay": 0.0, "lr": 0.02, "betas": (0.5, 0.6)}}
        ),
        lambda a, b: torch.optim.AdamW(
            [{"params": a}, {"params": b, "weight_decay": 0.0, "lr": 0.02, "betas": (0.5, 0.6)}],
            0.1,
            (0.8, 0.95),
            1e-6,
            0.1,
        ),
    ),
    "schedule": (
        lambda: optim.adamw(schedule),
        lambda a, b: torch.optim.AdamW([*a, *b], torch.tensor(0.01)),
    ),
}


def train(rank: int, world_size: int, strategy: str, case: str, donate: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Main and compute weights after some steps, with NaN in all padding before each."""
    opt = CASES[case][0]()
    state = make_state(strategy, world_size)
    opt_state = opt.init(state)
    for step in range(STEPS):
        grads = gradients(state, step, rank)
        for one in (state, grads, *optim_states(opt_state)):
            fill_padding(one)
        state, opt_state = opt.step(grads, opt_state, state, donate=donate)
    assert_same({"step": opt_state.step}, {"step": torch.tensor(float(STEPS))})
    return bits(main_weights(state)), bits(mf.unshard(state))


def optim_states(opt_state: Any) -> list[mf.ShardState]:
    return [leaf for leaf in vars(opt_state).values() if isinstance(leaf, mf.ShardState)]


def train_unsharded(case: str, world_size: int, params: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    params = params or make_params()
    weights = [p for path, p in params.items() if p.requires_grad and path not in NORMS]
    reference = CASES[case][1](weights, [params[path] for path in params if path in NORMS])
    for step in range(STEPS):
        grads = reference_gradients(step, world_size)
        for path, p in params.items():
            p.grad = grads[path] if p.requires_grad else None
        if case == "schedule":
            for group in reference.param_groups:
                group["lr"] = schedule(torch.tensor(float(step)))
        reference.step()
    return {path: p.detach() for path, p in params.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equals_torch_on_the_unsharded_model_bit_for_bit(world_size, strategy, case):
    expected = train_unsharded(case, world_size)
    for main, compute in run_ranks(world_size, train, strategy, case, world_size % 2 == 0):
        assert_same(main, expected)
        assert_same(compute, expected)


def train_mixed(rank: int, world_size: int, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16, grad=torch.bfloat16)
    state = make_state(strategy, world_size, precision=precision)
    opt = optim.adamw(0.1)
    opt_state = opt.init(state)
    for step in range(STEPS):
        grads = gradients(state, step, rank)
        assert {buffer.dtype for buffer in grads.main if buffer.numel()} == {torch.bfloat16}
        state, opt_state = opt.step(grads, opt_state, state, donate=bool(step))
    assert {buffer.dtype for buffer in opt_state.exp_avg.main} == {torch.float32}
    return bits(main_weights(state)), bits(mf.unshard(state))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_low_precision_compute_and_gradients_over_float32_weights(world_size, strategy):
    params = make_params()
    reference = torch.optim.AdamW([p for p in params.values() if p.requires_grad], 0.1)
    for step in range(STEPS):
        for path, grad in reference_gradients(step, world_size).items():
            params[path].grad = grad if params[path].requires_grad else None
        reference.step()
    expected = {path: p.detach() for path, p in params.items()}
    for main, compute in run_ranks(world_size, train_mixed, strategy):
        assert_same(main, expected)
        assert_same(compute, {path: p.to(torch.bfloat16) for path, p in expected.items()})


def train_transformed(rank: int, world_size: int, strategy: str, donate: bool) -> tuple[dict[str, Any], list[Any]]:
    opt = optim.from_gradient_transformation(Trace(0.1, 0.9))
    state = make_state(strategy, world_size)
    opt_state = opt.init(state)
    for step in range(STEPS):
        grads = gradients(state, step, rank)
        fill_padding(grads)
        fill_padding(state)
        state, opt_state = opt.step(grads, opt_state, state, donate=donate)
    trace, count = opt_state.inner
    assert count == STEPS
    return bits(main_weights(state)), [(path, tuple(rows.shape[1:])) for path, rows in trace.items()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_optax_style_transformation(world_size, strategy):
    tx, params = Trace(0.1, 0.9), {path: p.detach() for path, p in make_params().items() if p.requires_grad}
    inner = tx.init(params)
    for step in range(STEPS):
        grads = reference_gradients(step, world_size)
        updates, inner = tx.update({path: grads[path] for path in params}, inner, params)
        params = {path: p + updates[path] for path, p in params.items()}
    answers = run_ranks(world_size, train_transformed, strategy, world_size % 2 == 0)
    for main, layout in answers:
        assert_same({path: main[path] for path in params}, params)
        assert [path for path, _ in layout] == [path for path, _ in answers[0][1]]  # one structure on every rank


# Donation


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_donation_nothing_is_touched(name):
    state, opt = abstract_state(precision=mf.MixedPrecisionPolicy(compute=torch.bfloat16)), OPTIMIZERS[name]()
    opt_state, grads = opt.init(state), make_grads(state)
    inputs = leaves_of((state, opt_state, grads))
    copies = [leaf.clone() for leaf in inputs]
    first = opt.step(grads, opt_state, state)
    second = opt.step(grads, opt_state, state)
    for leaf, copy in zip(inputs, copies, strict=True):
        assert torch.equal(leaf, copy)
    for one, two in zip(leaves_of(first), leaves_of(second), strict=True):
        assert torch.equal(one, two)
    # What no optimizer changes is handed on: frozen main weights, and the compute weights cast from them.
    rows = zip(state.spec.groups, state.main, state.compute, strict=True)
    frozen = [b for group, *both in rows if not group.requires_grad for b in both if b is not None]
    made = {leaf.data_ptr() for leaf in leaves_of(first) if leaf.numel()}
    assert made & {leaf.data_ptr() for leaf in inputs if leaf.numel()} == {buffer.data_ptr() for buffer in frozen}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_donation_works_in_place_and_marks_what_it_took(name):
    state, opt = abstract_state(precision=mf.MixedPrecisionPolicy(compute=torch.bfloat16)), OPTIMIZERS[name]()
    opt_state, grads = opt.init(state), make_grads(state)
    expected = opt.step(grads, opt_state, state)
    weights = [buffer.data_ptr() for buffer in (*state.main, *(c for c in state.compute if c is not None))]
    moments = [buffer.data_ptr() for moment in optim_states(opt_state) for buffer in moment.main]
    new_state, new_opt_state = opt.step(grads, opt_state, state, donate=True)
    assert [b.data_ptr() for b in (*new_state.main, *(c for c in new_state.compute if c is not None))] == weights
    assert [b.data_ptr() for moment in optim_states(new_opt_state) for b in moment.main] == moments
    for one, two in zip(leaves_of(expected), leaves_of((new_state, new_opt_state)), strict=True):
        assert torch.equal(one, two)
    arguments: dict[str, Any] = {"grads": make_grads(new_state), "opt_state": new_opt_state, "state": new_state}
    for argument, gone in (("state", state), ("grads", grads)):
        with pytest.raises(mf.DonatedError, match=f"`{argument}` got a state whose buffers were donated to"):
            opt.step(*(arguments | {argument: gone}).values())
    with pytest.raises(mf.DonatedError):
        mf.unshard(state)
    if optim_states(opt_state):
        with pytest.raises(mf.DonatedError, match=r"`opt_state\.\w+` got a state whose buffers were donated"):
            opt.step(make_grads(new_state), opt_state, new_state)
    opt.step(make_grads(new_state), new_opt_state, new_state, donate=True)


def test_the_frozen_group_keeps_its_buffer():
    state = abstract_state()
    opt = optim.adamw()
    new_state, _ = opt.step(make_grads(state), opt.init(state), state)
    kept = [a is b for a, b in zip(state.main, new_state.main, strict=True)]
    assert kept == [not group.requires_grad for group in state.spec.groups]


def test_a_transformation_may_keep_the_parameters_it_was_initialised_with():
    class Anchor:
        def init(self, params: Any) -> Any:
            return params

        def update(self, updates: Any, state: Any, params: Any) -> Any:
            return {path: state[path] - params[path] + grad for path, grad in updates.items()}, state

    opt = optim.from_gradient_transformation(Anchor())
    state = abstract_state()
    start, opt_state = bits(main_weights(state)), opt.init(state)
    for _ in range(2):
        state, opt_state = opt.step(make_grads(state), opt_state, state, donate=True)
    for path, value in main_weights(state).items():
        torch.testing.assert_close(value, start[path] + (path != "frozen.w"))


# States as trees


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_nodes_of_optree_and_torch_pytrees(name):
    state, opt = abstract_state(), OPTIMIZERS[name]()
    opt_state = opt.init(state)
    leaves, treespec = optree.tree_flatten(opt_state)
    torch_leaves, torch_treespec = torch_pytree.tree_flatten(opt_state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert {id(leaf) for leaf in leaves} == {id(leaf) for leaf in torch_leaves if leaf is not None}
    assert treespec == optree.tree_structure(opt.init(state))
    assert torch_treespec == torch_pytree.tree_flatten(opt.init(state))[1]
    expected = opt.step(make_grads(state), opt_state, state)
    for again in (treespec.unflatten(leaves), torch_pytree.tree_unflatten(torch_leaves, torch_treespec)):
        assert type(again) is type(opt_state)
        got = opt.step(make_grads(state), again, state)
        for one, two in zip(leaves_of(expected), leaves_of(got), strict=True):
            assert torch.equal(one, two)
    doubled = optree.tree_map(lambda leaf: leaf * 2, opt_state)
    assert type(doubled) is type(opt_state)
