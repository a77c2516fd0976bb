"""Pipelines: stages on different ranks, gradients of weights later than those of inputs, several states in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf
from counting import Counting, Waiting
from models import (
    BLOCKS,
    DIM,
    EXACT,
    LR,
    PRESETS,
    assert_equal,
    batch_of,
    block,
    integers,
    made,
    mesh_of,
    plain_grads,
    sgd,
    trainable,
)
from pool import run_ranks

MICROS, STEPS = 4, 3
SCHEDULES = {  # of each stage; F forward, B backward; I gradients of inputs, W of weights
    "1F1B": ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
    "zero bubble": ("F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3", "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"),
}


def run_stage(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Linear in the stage's weights, so that three steps round nothing; its gradients need both stages' weights."""
    e = x
    for weights in params:
        x = block(weights, e, x)
    return x


def weights_of(stage: int) -> dict[str, torch.Tensor]:
    params = {}
    for i in range(2):
        seed = 10 * (2 * stage + i)
        params[f"blocks.{i}.w"] = integers(DIM, DIM, seed=seed, high=1)
        params[f"blocks.{i}.b"] = integers(DIM, seed=seed + 1, high=1)
    return trainable(params)


def data(step: int, micro: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 1000 * step + 10 * micro + replica
    return integers(3, DIM, seed=seed, high=1), integers(3, DIM, seed=seed + 500, high=1)


def sharded_stage(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    return run_stage((mf.unshard(state[name]) for name in state.spec.units_matching("blocks.*")), x)


def pipeline(rank: int, world: int, preset: str, schedule: str, managed: bool) -> dict[str, torch.Tensor]:
    """Two stages of two replicas each: what a replica computes is sent straight on."""
    replica, stage = rank % 2, rank // 2
    other = (rank + 2) % 4
    stages = mesh_of(2, 2)
    params = weights_of(stage)
    runtime = mf.RuntimePolicy(caller_managed_grad_sync=managed)
    spec = mf.plan(params, stages["inner"], PRESETS[preset](), units=BLOCKS, precision=EXACT, runtime=runtime)
    state = mf.shard(params, spec)
    for step in range(STEPS):
        grads: Any = None
        pullbacks: dict[int, mf.Pullback] = {}
        sends: list[Any] = []

        def send(value: torch.Tensor, sends: list[Any] = sends) -> None:
            sends.append((dist.isend(value, other), value))  # the value lives until it has been sent

        def receive() -> torch.Tensor:
            value = torch.empty(3, DIM, dtype=torch.float64)
            dist.recv(value, other)
            return value

        done = 0
        for word in SCHEDULES[schedule][stage].split():
            micro = int(word[1])
            x, target = data(step, micro, replica)
            if word[0] == "F":
                out, pullbacks[micro] = mf.vjp(sharded_stage, state, x if stage == 0 else receive())
                if stage == 0:
                    send(out)
            elif word[0] == "W":
                done += 1
                grads = pullbacks.pop(micro).weights(is_last_microbatch=done == MICROS, accumulate=grads)
            else:
                cotangent = receive() if stage == 0 else target * 2  # the loss of a microbatch is 2 * sum(out * target)
                if word[0] == "I":
                    with Counting() as counting:
                        (input_grad,) = pullbacks[micro].inputs(cotangent)
                    assert counting.count("scatter") == counting.count("all_reduce") == counting.unwaited() == 0
                else:
                    done += 1
                    pullback = pullbacks.pop(micro)
                    grads, (input_grad,) = pullback(cotangent, is_last_microbatch=done == MICROS, accumulate=grads)
                if stage == 1:
                    send(input_grad)
        for work, _ in sends:
            work.wait()
        if managed:
            grads = mf.finish_grad_sync(grads)
        state = sgd(state, grads)
    whole = mf.unshard(state)
    return {f"{stage}.{name}": value.clone() for name, value in whole.items()}


def trained() -> dict[str, torch.Tensor]:
    """The same model on one rank."""
    params = {f"{stage}.{name}": value for stage in range(2) for name, value in weights_of(stage).items()}
    for step in range(STEPS):

        def loss(p: Any, micro: int, replica: int, step: int = step) -> torch.Tensor:
            x, target = data(step, micro, replica)
            for stage in range(2):
                x = run_stage([{k: p[f"{stage}.blocks.{i}.{k}"] for k in "wb"} for i in range(2)], x)
            return 2 * (x * target).sum()

        losses = [lambda p, m=m, r=r: loss(p, m, r) for m in range(MICROS) for r in range(2)]
        grads = plain_grads(params, losses, 2)
        params = {name: (value - LR * grads[name]).detach() for name, value in params.items()}
    return params


@pytest.mark.parametrize(
    ("preset", "schedule", "managed"),
    [
        ("zero3", "1F1B", False),
        ("zero1", "1F1B", True),
        ("zero3", "zero bubble", False),
        ("zero2", "zero bubble", False),
        ("ddp", "zero bubble", True),
    ],
)
def test_a_pipeline_equals_the_model_on_one_rank(preset: str, schedule: str, managed: bool) -> None:
    expected = trained()
    for on_rank in run_ranks(4, pipeline, preset, schedule, managed):
        assert_equal(on_rank, {name: expected[name] for name in on_rank}, (preset, schedule))


# Gradients of weights later.


def model(state: mf.ShardState, x: torch.Tensor, call: Callable[..., Any] = block) -> torch.Tensor:
    """A root that is used at both ends, and blocks that need their weights for the gradients of their inputs."""
    root = mf.unshard(state[""])
    x = x @ root["embed"].T @ root["embed"]
    for name in state.spec.units_matching("blocks.*"):
        x = call(mf.unshard(state[name]), x, x)
    return x @ root["embed"].T


def checkpointed(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    root = mf.unshard(state[""])
    x = x @ root["embed"].T @ root["embed"]
    for name in state.spec.units_matching("blocks.*"):
        x = checkpoint(lambda x, n=name: block(mf.unshard(state[n]), x, x), x, use_reentrant=False)
    return x @ root["embed"].T


def nothing_to_do_with_inputs(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """One unit is not between inputs and outputs."""
    bias = mf.unshard(state["blocks.2"])["b"] * 3
    return block(mf.unshard(state["blocks.0"]), x, x) + bias


def in_two_parts(rank: int, world: int) -> None:
    kept = mf.RuntimePolicy(keep_gathered=("blocks.1",), max_inflight_reductions=2)
    cases = [("zero3", (world,), {}), ("zero3", (world,), {"runtime": kept}), ("ddp", (world,), {})]
    cases += [("hsdp", (world, 1), {}), ("hfsdp", (1, world), {})]
    for preset, shape, options in cases:
        state, _ = made(preset, *shape, **options)
        for fn in (model, checkpointed, nothing_to_do_with_inputs):
            calls = [(integers(3, DIM, seed=90 + rank + micro, high=1),) for micro in range(3)]
            outs = [mf.vjp(fn, state, *call) for call in calls]
            expected: Any = None
            input_grads = []
            for micro, (out, pullback) in enumerate(outs):
                expected, (dx,) = pullback(out, is_last_microbatch=micro == 2, accumulate=expected)
                input_grads.append(dx)
            halves = [mf.vjp(fn, state, *call) for call in calls]
            for (out, pullback), dx in zip(halves, input_grads, strict=True):
                with Counting() as counting:
                    (got,) = pullback.inputs(out)
                assert torch.equal(got, dx), (preset, fn)
                assert set(counting.counts()) <= {"gather"} and not counting.unwaited()
            grads: Any = None
            for micro in (1, 0, 2):  # in an order of their own
                with Counting() as counting:
                    pullback = halves[micro][1]
                    grads = pullback.weights(is_last_microbatch=micro == 2, accumulate=grads, donate=grads is not None)
                assert not counting.unwaited()
            assert all(torch.equal(a, b) for a, b in zip(grads.main, expected.main, strict=True)), (preset, fn)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_pullback_in_two_parts(world: int) -> None:
    run_ranks(world, in_two_parts)


def counts_of_parts(rank: int, world: int) -> None:
    units = 4
    for preset, gathers, reductions in (("zero3", units, units), ("zero2", 0, units), ("zero1", 0, units)):
        state, _ = made(preset, world)
        x = integers(3, DIM, seed=rank)
        alive = []
        for _ in range(4):  # a backend's threads may hold a buffer a moment longer
            with Counting() as forward:
                out, pullback = mf.vjp(model, state, x)
            with Counting() as inputs:
                pullback.inputs(out)
            gathered = [e for c in (forward, inputs) for e in c.events if e.kind == "gather"]
            alive.append(sum(e.result is not None and not e.result.expired() for e in gathered))
            with Counting() as weights:
                pullback.weights()
            assert (forward.count("gather"), inputs.count("gather"), weights.count("gather")) == (gathers,) * 3
            assert forward.count("scatter") == inputs.count("scatter") == 0
            assert weights.count("scatter") == reductions
        assert min(alive) == 0, "between the parts no gathered weight is alive"

    state, _ = made("zero3", world)
    out, pullback = mf.vjp(model, state, integers(3, DIM, seed=rank))
    with pytest.raises(mf.StateError, match=r"`pullback.weights` got a call before inputs\(cotangent\); expected"):
        pullback.weights()
    with pytest.raises(mf.StateError, match=r"`cotangent` got shape \(1,\); expected a tensor of shape"):
        pullback.inputs(torch.ones(1))
    pullback.inputs(out)
    for again, text in (
        (lambda: pullback.inputs(out), r"`pullback.inputs` got a second call"),
        (lambda: pullback(out), r"`pullback` got a second call; .*or weights\(\) after inputs"),
    ):
        with pytest.raises(mf.StateError, match=text):
            again()
    with pytest.raises(mf.StateError, match=r"`accumulate` got a state of"):
        pullback.weights(accumulate=made("zero2", world)[0])
    pullback.weights()
    with pytest.raises(mf.StateError, match=r"`pullback.weights` got a second call"):
        pullback.weights()
    out, pullback = mf.vjp(model, state, integers(3, DIM, seed=rank))
    pullback(out)
    with pytest.raises(mf.StateError, match=r"`pullback.inputs` got a second call"):
        pullback.inputs(out)
    _, pullback = mf.vjp(model, state, integers(3, DIM, seed=rank))
    pullback.inputs(out)  # and the weights never


def test_what_the_parts_communicate_and_refuse() -> None:
    run_ranks(2, counts_of_parts)


# Several states in one call.


def roots(rank: int, world: int) -> None:
    def loss_fn(states: dict[str, mf.ShardState], batch: Any) -> torch.Tensor:
        tokens, target = batch
        x = mf.unshard(states["body"][""])["embed"][tokens]
        for part in (states["body"], states["head"]):
            for name in part.spec.units_matching("blocks.*"):
                weights = mf.unshard(part[name])
                x = x @ weights["w"].T
        return (x * target).sum()

    head = trainable({"blocks.0.w": integers(64, DIM, seed=1), "blocks.1.w": integers(DIM, 64, seed=2)})
    for inflight, waits in ((1, "S" + "sS" * 5 + "s"), (10, "S" * 6 + "s" * 6)):
        runtime = mf.RuntimePolicy(max_inflight_reductions=inflight)
        states = {
            "body": made("zero3", world, runtime=runtime)[0],
            "head": made("zero3", world, params=head, runtime=runtime)[0],
        }
        transformed = mf.value_and_grad(loss_fn)
        with Counting() as counting:
            transformed(states, batch_of(0, 0, rank))
        assert not counting.unwaited()
        # The head's first unit, which is 16 times as large, is launched before the body's last product.
        large = 64 * DIM * 8
        kinds = ["G" if e.kind == "gather" and e.received >= large else e.kind[0] for e in counting.events]
        assert "".join(kinds).startswith("gg" + "gm" * 2 + "Gm" + "Gm" + "m"), kinds
        assert counting.count("scatter") == 6
        with Waiting() as waiting:
            transformed(states, batch_of(0, 0, rank))
        assert waiting.seen == waits, "one budget, and one wait at the end, over both states"


@pytest.mark.parametrize("world", [2, 3])
def test_several_states_share_one_order_and_one_wait(world: int) -> None:
    run_ranks(world, roots)
