"""Options of optimizers, overall and by path; what `init` and `step` refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from mfsdp_fn import optim
from optim_cases import OPTIMIZERS, abstract_state, assert_same, bits, main_weights, make_grads, make_state
from pool import run_ranks

STEPS = 3
# What is refused is not what the annotations allow.
sgd: Any = optim.sgd
adamw: Any = optim.adamw
from_gradient_transformation: Any = optim.from_gradient_transformation


def test_later_patterns_win():
    state = abstract_state()
    opt = optim.sgd(
        1.0,
        overrides={"norm*": {"lr": 2.0, "weight_decay": 1.0}, "blocks.*": {"lr": 3.0}, "blocks.0.bias": {"lr": 4.0}},
    )
    before = bits(main_weights(state))
    zero_weights = mf.sync_model_weights(mf.tree_map(torch.zeros_like, state))
    stepped, _ = opt.step(make_grads(state), opt.init(state), zero_weights)
    moved = {path: -value for path, value in main_weights(stepped).items()}
    expected = {"norm.weight": 2.0, "blocks.0.w": 3.0, "blocks.0.norm.weight": 3.0, "blocks.0.bias": 4.0, "scale": 1.0}
    for path, value in expected.items():
        assert_same({path: moved[path]}, {path: torch.full_like(before[path], value)})
    decayed, _ = opt.step(mf.zeros_like(state), opt.init(state), state)
    assert_same({"n": main_weights(decayed)["norm.weight"]}, {"n": before["norm.weight"] * (1 - 2.0)})
    assert_same({"n": main_weights(decayed)["scale"]}, {"n": before["scale"]})


def test_a_tied_tensor_has_the_options_of_all_its_paths():
    weight = torch.ones(2, 2, requires_grad=True)
    params = {"emb.weight": weight, "head.weight": weight}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp()))
    for pattern in ("emb", "head"):
        opt = optim.sgd(1.0, overrides={pattern: {"lr": 3.0}})
        stepped, _ = opt.step(make_grads(state), opt.init(state), state)
        assert_same({"w": mf.unshard(stepped)["emb.weight"]}, {"w": torch.full((2, 2), -2.0)})


def test_schedules_get_the_steps_taken_before():
    seen = []

    def lr(step: torch.Tensor) -> float:
        seen.append(step.clone())
        return 0.1

    state, opt = abstract_state(), optim.sgd(lr)
    opt_state = opt.init(state)
    for _ in range(3):
        state, opt_state = opt.step(make_grads(state), opt_state, state, donate=True)
    assert [(step.item(), step.ndim, step.dtype) for step in seen] == [(n, 0, torch.float32) for n in (0.0, 1.0, 2.0)]


def test_hyperparameters_may_change_between_steps():
    """They are the optimizer's; the state holds only which elements they are for."""
    state = abstract_state()
    opt_state = optim.sgd(0.1, overrides={"norm*": {"lr": 0.2}}).init(state)
    other = optim.sgd(1.0, overrides={"norm*": {"lr": 2.0}})
    one = other.step(make_grads(state), opt_state, state)[0]
    two = other.step(make_grads(state), other.init(state), state)[0]
    assert_same(main_weights(one), main_weights(two))


def test_the_fused_kernels_agree():
    state = abstract_state()
    for make in (lambda fused: optim.adamw(0.1, fused=fused), lambda fused: optim.sgd(0.1, 0.9, fused=fused)):
        results = []
        for fused in (False, True):
            opt = make(fused)
            now, opt_state = state, opt.init(state)
            for _ in range(STEPS):
                now, opt_state = opt.step(make_grads(state), opt_state, now)
            results.append(main_weights(now))
            assert opt_state.step == STEPS
        for path, value in results[0].items():  # other rounding, a few units in the last place a step
            torch.testing.assert_close(results[1][path], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: sgd(-0.1), "`lr` got -0.1; expected a finite number >= 0"),
        (lambda: sgd("fast"), "`lr` got 'fast'; expected"),
        (lambda: sgd(torch.ones(2)), "`lr` got a tensor of shape (2,), torch.float32; expected a 0-D tensor"),
        (lambda: sgd(0.1, float("nan")), "`momentum` got nan; expected a finite number >= 0"),
        (lambda: sgd(0.1, nesterov=True), "`nesterov` got True; expected False without momentum"),
        (lambda: sgd(0.1, nesterov=1), "`nesterov` got 1; expected True or False"),
        (lambda: adamw(weight_decay=True), "`weight_decay` got True; expected a finite number >= 0"),
        (lambda: adamw(eps=-1), "`eps` got -1; expected"),
        (lambda: adamw(betas=0.9), "`betas` got 0.9; expected two numbers in [0, 1)"),
        (lambda: adamw(betas=(0.9, 1.0)), "`betas[1]` got 1.0; expected a number in [0, 1)"),
        (lambda: adamw(overrides=["norm"]), "`overrides` got ['norm']; expected options by pattern"),
        (
            lambda: adamw(overrides={"norm*": {"momentum": 0.0}}),
            "`overrides['norm*']` got the option 'momentum'; expected one of ['lr', 'betas', 'eps', 'weight_decay']",
        ),
        (
            lambda: adamw(overrides={"norm*": {"lr": -1}}),
            "`overrides['norm*']['lr']` got -1; expected a finite number >= 0",
        ),
        (lambda: adamw(overrides={"norm*": 0.0}), "`overrides['norm*']` got 0.0; expected a dict of options"),
        (
            lambda: from_gradient_transformation(object()),
            "`tx` got a object without init; expected an object with init and update",
        ),
    ],
)
def test_bad_options_are_refused_by_name(make, text):
    with pytest.raises(mf.MfsdpError) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize("make", [lambda **o: sgd(0.1, **o), adamw])
def test_a_pattern_that_matches_nothing_is_refused_at_init(make):
    opt = make(overrides={"norn*": {"weight_decay": 0.0}})
    with pytest.raises(mf.PlanError, match=r"`pattern` got 'norn\*'; expected a pattern that matches"):
        opt.init(abstract_state())


def test_nesterov_without_momentum_in_an_override_is_refused_at_init():
    opt = sgd(0.1, 0.9, True, overrides={"norm*": {"momentum": 0.0}})
    with pytest.raises(mf.MfsdpError, match="`nesterov` got True; expected False without momentum"):
        opt.init(abstract_state())


# What step refuses


def refuse_accumulating(rank: int, world_size: int) -> None:
    state = make_state("zero1", world_size)
    _, grads = mf.value_and_grad(lambda s: mf.unshard(s)["scale"].sum(), is_last_microbatch=False)(state)
    for make in OPTIMIZERS.values():
        opt = make()
        with pytest.raises(
            mf.StateError, match=r"`grads` got gradients that still acc.*True.*finish_grad_sync\(grads\)"
        ):
            opt.step(grads, opt.init(state), state)
        opt.step(mf.finish_grad_sync(grads), opt.init(state), state)
        with pytest.raises(mf.StateError, match="`state` got accumulating gradients; expected weights"):
            opt.init(grads)


def test_accumulating_gradients_are_refused():
    run_ranks(2, refuse_accumulating)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_of_different_plans_are_refused(name):
    state, other = abstract_state(), abstract_state(mf.zero3())
    opt: Any = OPTIMIZERS[name]()
    with pytest.raises(mf.StateError, match="`grads` got a state of ShardSpec"):
        opt.step(make_grads(other), opt.init(state), state)
    with pytest.raises(mf.StateError, match="`opt_state` got a state made for ShardSpec"):
        opt.step(make_grads(state), opt.init(other), state)
    with pytest.raises(mf.StateError, match="`opt_state` got a dict; expected a"):
        opt.step(make_grads(state), {}, state)
    with pytest.raises(mf.StateError, match="`grads` got a tuple; expected a ShardState"):
        opt.step((), opt.init(state), state)


def test_the_state_of_an_optimizer_with_other_patterns_is_refused():
    state = abstract_state()
    opt_state = optim.adamw(overrides={"norm*": {"lr": 0.1}}).init(state)
    with pytest.raises(mf.StateError, match=r"`opt_state` got a state made with overrides for \['norm\*'\]"):
        optim.adamw().step(make_grads(state), opt_state, state)
    with pytest.raises(mf.StateError, match="`opt_state` got a state without momentum"):
        optim.sgd(0.1, 0.9).step(make_grads(state), optim.sgd(0.1).init(state), state)


@pytest.mark.parametrize(
    "updates, text",
    [
        (lambda updates: list(updates.values()), "`tx` got updates list; expected a dict with the paths"),
        (lambda updates: {}, "`tx` got updates []; expected a dict with the paths"),
        (lambda updates: {path: 0.0 for path in updates}, "`tx` got an update 0.0 at"),
        (lambda updates: {path: u[None] for path, u in updates.items()}, "expected a tensor of shape"),
    ],
)
def test_updates_of_another_structure_are_refused(updates, text):
    class Bad:
        def init(self, params: Any) -> Any:
            return None

        def update(self, grads: Any, state: Any, params: Any) -> Any:
            return updates(grads), state

    state, opt = abstract_state(), optim.from_gradient_transformation(Bad())
    with pytest.raises(mf.StateError) as caught:
        opt.step(make_grads(state), opt.init(state), state)
    assert text in str(caught.value)


@pytest.mark.parametrize("given", [None, "0.1", float("nan"), -1.0, torch.ones(2), torch.ones((), dtype=torch.int64)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_schedule_that_gives_no_rate_is_refused_before_anything_changes(given: Any, donate: bool) -> None:
    state = abstract_state()
    overrides = {"norm": {"lr": lambda step: given}}
    for opt, where in (
        (optim.sgd(lambda step: given), "`lr` got"),
        (optim.adamw(lambda step: given), "`lr` got"),
        (optim.adamw(0.1, overrides=overrides), r"`overrides\['norm'\]\['lr'\]` got"),
        (optim.muon(lambda step: given, fallback=optim.sgd(0.1)), "`lr` got"),
        (optim.muon(0.1, fallback=optim.sgd(0.1, overrides=overrides)), r"`overrides\['norm'\]\['lr'\]` got"),
    ):
        before, opt_state = [buffer.clone() for buffer in state.main], opt.init(state)
        with pytest.raises(mf.MfsdpError, match=where):
            opt.step(make_grads(state), opt_state, state, donate=donate)
        assert all(torch.equal(a, b) for a, b in zip(before, state.main, strict=True))
        mf.unshard(state)  # it is alive
