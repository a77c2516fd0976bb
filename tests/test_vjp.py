"""Backward later, several states, aux, evaluation in between: what surrounds a plain `value_and_grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from counting import Counting
from models import (
    LR,
    Batch,
    assert_equal,
    batch_of,
    bilinear,
    block,
    integers,
    made,
    plain_grads,
    plain_loss,
    plain_training,
    sgd,
    sharded_loss,
    trainable,
)
from pool import run_ranks

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")


def stage(state: mf.ShardState, x: torch.Tensor, extra: dict[str, Any]) -> dict[str, Any]:
    """A pipeline stage: tensors in, a tree of tensors out."""
    for name in state.spec.units_matching("blocks.*"):
        x = x * 2 + x @ mf.unshard(state[name])["w"].T
    return {"x": x, "scaled": x * extra["scale"], "tag": "kept"}


def plain_stage(params: Any, x: torch.Tensor, extra: dict[str, Any]) -> dict[str, Any]:
    for i in range(3):
        x = x * 2 + x @ params[f"blocks.{i}.w"].T
    return {"x": x, "scaled": x * extra["scale"], "tag": "kept"}


def inputs(rank: int, micro: int) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    x = integers(3, 4, seed=900 + 10 * micro + rank)
    extra = {"scale": integers(4, seed=800 + micro + rank), "ids": torch.arange(3), "none": None}
    return x, extra, {"x": integers(3, 4, seed=700 + micro + rank), "scaled": None, "tag": None}


SCHEDULES = {
    "in order": "F0 B0 F1 B1 F2 B2",
    "two forwards": "F0 F1 B0 B1 F2 B2",
    "1F1B": "F0 F1 B0 F2 B1 B2",
    "reversed": "F0 F1 F2 B2 B1 B0",
}


def pipelines(rank: int, world: int) -> None:
    state, _ = made("zero3", world)
    for preset in ONE_AXIS:
        state, params = made(preset, world)
        for name, schedule in SCHEDULES.items():
            pullbacks: dict[int, Any] = {}
            grads = None
            done = 0
            with Counting() as counting:
                for word in schedule.split():
                    micro = int(word[1])
                    x, extra, ct = inputs(rank, micro)
                    if word[0] == "F":
                        out, pullbacks[micro] = mf.vjp(stage, state, x, extra)
                        expected = plain_stage(params, x, extra)
                        assert torch.equal(out["x"], expected["x"]) and out["tag"] == "kept"
                        assert not out["x"].requires_grad
                        assert not counting.unwaited(), "nothing is pending between a forward and its backward"
                        continue
                    done += 1
                    grads, (dx, dextra) = pullbacks.pop(micro)(ct, is_last_microbatch=done == 3, accumulate=grads)
                    assert dextra["ids"] is None and dextra["none"] is None
                    leaf = x.clone().requires_grad_()
                    (expected_dx,) = torch.autograd.grad(plain_stage(params, leaf, extra)["x"], leaf, ct["x"])
                    assert torch.equal(dx, expected_dx), (preset, name)
                    assert dextra["scale"] is None or not dextra["scale"].any()
            assert not counting.unwaited()
            losses = [
                lambda p, r=r, m=micro: (plain_stage(p, *inputs(r, m)[:2])["x"] * inputs(r, m)[2]["x"]).sum()
                for micro in range(3)
                for r in range(world)
            ]
            assert grads is not None
            assert_equal(mf.unshard(grads), plain_grads(params, losses, world), f"{preset} {name}")
    _, pullback = mf.vjp(stage, state, *inputs(rank, 0)[:2])
    ct = inputs(rank, 0)[2]
    with pytest.raises(mf.StateError, match=r"`cotangent` got a dict at the top that differs in"):
        pullback({"x": ct["x"]})
    pullback(ct)
    with pytest.raises(mf.StateError, match=r"`pullback` got a second call; expected one call"):
        pullback(ct)
    mf.vjp(stage, state, *inputs(rank, 0)[:2])  # a pullback that is never called


@pytest.mark.parametrize("world", [1, 2])
def test_backwards_in_any_order(world: int) -> None:
    run_ranks(world, pipelines)


def evaluation(rank: int, world: int) -> None:
    """Evaluations without grad, inside and outside the loss, change nothing; aux comes back detached."""

    def with_aux(state: mf.ShardState, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        with torch.no_grad():
            before = sharded_loss(state, batch)
        loss = sharded_loss(state, batch, float(world))
        return loss, {"z": loss * 2, "before": before, "a": [loss, None, "text"]}

    state, params = made("zero3", world)
    for preset in ONE_AXIS:
        state, params = made(preset, world)
        for step in range(3):
            with torch.no_grad(), Counting() as counting:
                sharded_loss(state, batch_of(step, 0, rank))
                mf.wait(mf.launch(state["blocks.1"]))
            assert not counting.unwaited()
            (loss, aux), grads = mf.value_and_grad(with_aux, has_aux=True)(state, batch_of(step, 0, rank))
            assert torch.equal(aux["z"], loss * 2) and torch.equal(aux["before"] * world, loss)
            assert not any(t.requires_grad for t in (loss, aux["z"], aux["a"][0])) and aux["a"][1:] == [None, "text"]
            assert list(aux) == ["z", "before", "a"]
            state = sgd(state, grads)
        assert_equal(mf.unshard(state), plain_training(params, world, steps=3, micros=1), preset)
    for fn, has_aux, text in (
        (lambda s: sharded_loss(s, batch_of(0, 0, 0)), True, r"a function returning a Tensor; expected \(loss, aux\)"),
        (lambda s: (sharded_loss(s, batch_of(0, 0, 0)), 1), False, "a function returning a tuple; expected a scalar"),
        (lambda s: mf.unshard(s)["embed"], False, r"returning a tensor of shape \(5, 4\); expected a scalar tensor"),
    ):
        with pytest.raises(mf.StateError, match=text):
            mf.value_and_grad(fn, has_aux=has_aux)(state)
    for bad, text in (
        ({}, "`state` got no state; expected a ShardState"),
        (3, "`state` got a int"),
        ([state, 3], "`state.1` got a int; expected a ShardState"),
    ):
        with pytest.raises(mf.StateError, match=text):
            mf.value_and_grad(sharded_loss)(bad, batch_of(0, 0, rank))


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_and_aux(world: int) -> None:
    run_ranks(world, evaluation)


def several(rank: int, world: int) -> None:
    """Two roots in one call, one of them used only on the first rank; one order of gathers across both."""
    head = trainable({"scale": integers(4, seed=61), "blocks.0.w": integers(4, 4, seed=62)})

    def loss_fn(states: dict[str, Any], batch: Batch, use: bool) -> torch.Tensor:
        body, top = states["body"], states["heads"][0]
        tokens, target = batch
        e = mf.unshard(body[""])["embed"][tokens]
        x = e
        for name in body.spec.units_matching("blocks.*"):
            x = block(mf.unshard(body[name]), e, x)
        scale, w = mf.unshard(top[""])["scale"], mf.unshard(top["blocks.0"])["w"]
        if use:
            x = x * scale + e @ w.T
        return (x * target).sum() * world

    def plain(params: Any, batch: Batch, use: bool) -> torch.Tensor:
        tokens, target = batch
        e = params["embed"][tokens]
        x = e
        for i in range(3):
            x = block({"w": params[f"blocks.{i}.w"], "b": params[f"blocks.{i}.b"]}, e, x)
        if use:
            x = x * params["scale"] + e @ params["head.w"].T
        return (x * target).sum() * world

    transformed = mf.value_and_grad(loss_fn)
    body, params = made("zero3", world)
    for preset in ONE_AXIS:
        body, params = made(preset, world)
        top, _ = made(preset, world, params=head)
        everything = params | {"scale": head["scale"], "head.w": head["blocks.0.w"]}
        states: Any = {"body": body, "heads": [top]}
        with Counting() as counting:
            _, grads = transformed(states, batch_of(0, 0, rank), rank == 0)
        assert not counting.unwaited()
        units = 4 + 2
        assert counting.count("gather") == (2 * units if preset == "zero3" and world > 1 else 0)
        losses = [lambda p, r=r: plain(p, batch_of(0, 0, r), r == 0) for r in range(world)]
        expected = plain_grads(everything, losses, world)
        got = mf.unshard(grads["body"])
        top_got = mf.unshard(grads["heads"][0])
        got |= {"scale": top_got["scale"], "head.w": top_got["blocks.0.w"]}
        assert_equal(got, expected, preset)
    other, _ = made("zero3", world, params=head, runtime=mf.RuntimePolicy(max_inflight_reductions=2))
    with pytest.raises(mf.StateError, match=r"states with different RuntimePolicy; expected one policy"):
        transformed({"body": body, "heads": [other]}, batch_of(0, 0, rank), True)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_several_states(world: int) -> None:
    run_ranks(world, several)


def frozen_unit(rank: int, world: int) -> None:
    """Gradients flow through a frozen unit and frozen groups, which are gathered again and never reduced."""
    params = bilinear(3)
    params["blocks.1.w"].requires_grad_(False)
    params["blocks.1.b"].requires_grad_(False)
    params["blocks.2.b"].requires_grad_(False)
    for preset, gathers in (("ddp", 0), ("zero2", 0), ("zero3", 2 * 5)):
        state, _ = made(preset, world, params=params)
        for step in range(2):
            with Counting() as counting:
                _, grads = mf.value_and_grad(sharded_loss)(state, batch_of(step, 0, rank), float(world))
            assert counting.count("gather") == gathers
            assert counting.count("scatter") + counting.count("all_reduce") == 3
            state = sgd(state, grads)
        now = {n: t.detach().clone() for n, t in params.items()}
        for step in range(2):
            losses = [lambda p, s=step, r=r: plain_loss(p, batch_of(s, 0, r), float(world)) for r in range(world)]
            change = plain_grads(now, losses, world)
            now = {n: t - LR * change[n] if params[n].requires_grad else t for n, t in now.items()}
        assert_equal(mf.unshard(state), now, preset)


def test_frozen_units() -> None:
    run_ranks(2, frozen_unit)
