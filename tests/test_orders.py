"""One order of collectives on every rank, whatever each rank computes; and calls that fail leave nothing behind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf
from counting import Counting
from models import (
    Batch,
    Params,
    accumulated,
    assert_equal,
    batch_of,
    block,
    made,
    plain_grads,
    sgd,
    sharded_loss,
)
from pool import run_ranks

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")

# What a rank does with units 0, 1, 2, all gathered before any is used or each where it is: an order of use. Unequal
# factors, so that swapped weights and swapped sums show.
DIFFERENT: tuple[tuple[Sequence[int], ...], ...] = (
    ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)),  # gradients ready in different orders
    ((0,), (2,), (), (1, 2)),  # different units used, on one rank none
    ((0, 1), (2, 0), (1,), (0, 1, 2)),
    ((0, 1, 2, 0), (1, 1), (2,), (0, 0)),
)


def diverging(params: Any, batch: Batch, uses: Sequence[int], factor: float) -> torch.Tensor:
    """The loss of a rank that uses `uses`, from values of all units."""
    tokens, target = batch
    e = params["embed"][tokens]
    x = e
    for place, i in enumerate(uses):
        x = block(params[i], (place + 2 * i + 1) * e, x)
    return (x * target).sum() * factor


def gathered_first(state: mf.ShardState, batch: Batch, uses: Sequence[int], factor: float) -> torch.Tensor:
    values: dict[Any, Any] = dict(mf.unshard(state[""]))
    values |= {i: mf.unshard(state[f"blocks.{i}"]) for i in range(3)}
    return diverging(values, batch, uses, factor)


def gathered_in_turn(state: mf.ShardState, batch: Batch, uses: Sequence[int], factor: float) -> torch.Tensor:
    """Each unit is used, or not, right after its gather; the root at the end too."""
    tokens, target = batch
    root = mf.unshard(state[""])
    e = root["embed"][tokens]
    x = e
    for i in range(3):
        p = mf.unshard(state[f"blocks.{i}"])
        for place, used in enumerate(uses):
            if used == i:
                x = block(p, (place + 2 * i + 1) * e, x)
    if 0 in uses:
        return (x * target).sum() * factor
    return (x * target).sum() * factor + 0.0 * (root["embed"] @ root["embed"].t()).sum()


def in_checkpoint(state: mf.ShardState, batch: Batch, uses: Sequence[int], factor: float) -> torch.Tensor:
    tokens, target = batch
    e = mf.unshard(state[""])["embed"][tokens]
    x = e
    for i in range(3):

        def part(e: torch.Tensor, x: torch.Tensor, i: int = i) -> torch.Tensor:
            p = mf.unshard(state[f"blocks.{i}"])
            for place, used in enumerate(uses):
                if used == i:
                    x = block(p, (place + 2 * i + 1) * e, x)
            return x

        y = checkpoint(part, e, x, use_reentrant=False)
        x = y if i in uses else x
    return (x * target).sum() * factor


def diverge(rank: int, world: int, preset: str, shape: tuple[int, ...], runtime: mf.RuntimePolicy) -> list[Any]:
    state, params = made(preset, *shape, runtime=runtime)
    seen: list[Any] = []
    for fn in (gathered_first, gathered_in_turn, in_checkpoint):
        for uses in DIFFERENT:
            with Counting() as counting:
                step = mf.value_and_grad(fn)
                _, grads = step(state, batch_of(0, 0, rank), uses[rank], float(world))
            assert not counting.unwaited()

            def plain(p: Any, r: int, uses: Any = uses) -> torch.Tensor:
                values = dict(p) | {i: {k: p[f"blocks.{i}.{k}"] for k in "wb"} for i in range(3)}
                return diverging(values, batch_of(0, 0, r), uses[r], float(world))

            expected = plain_grads(params, [lambda p, r=r: plain(p, r) for r in range(world)], world)
            assert_equal(mf.unshard(grads), expected, f"{preset} {fn.__name__} {uses}")
            seen.append([(kind, sent) for kind, _, sent in counting.launches()])
    return seen


@pytest.mark.parametrize("preset", ONE_AXIS)
def test_ranks_that_use_different_units_in_different_orders(preset: str) -> None:
    for world in (2, 4) if preset == "zero3" else (3,):
        for seen in zip(*run_ranks(world, diverge, preset, (world,), mf.RuntimePolicy()), strict=True):
            assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize(
    "runtime",
    [
        mf.RuntimePolicy(max_inflight_reductions=2),
        mf.RuntimePolicy(backward_prefetch=0, forward_prefetch=0),
        mf.RuntimePolicy(keep_gathered=("blocks.1",)),
    ],
    ids=["two in flight", "no prefetch", "kept"],
)
@pytest.mark.parametrize("preset", ["hsdp", "hfsdp"])
def test_the_same_on_two_axes(preset: str, runtime: mf.RuntimePolicy) -> None:
    for seen in zip(*run_ranks(4, diverge, preset, (2, 2), runtime), strict=True):
        assert all(one == seen[0] for one in seen)


def broken(state: mf.ShardState, batch: Batch, factor: float, where: str) -> torch.Tensor:
    """Raises somewhere."""

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("in backward")

    def call(p: Params, e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if where == "forward" and x is not e:
            raise RuntimeError("in forward")
        return Raise.apply(block(p, e, x)) if where == "backward" and x is e else block(p, e, x)

    loss = sharded_loss(state, batch, factor, call)
    return loss.expand(2) if where == "loss" else loss


def raise_and_go_on(rank: int, world: int) -> None:
    for preset, shape in (*((name, (world,)) for name in ONE_AXIS), ("hsdp", (1, world)), ("hfsdp", (world, 1))):
        state, _ = made(preset, *shape)
        good = mf.unshard(mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank), 1.0)[1])
        transformed = mf.value_and_grad(broken)
        for where in ("forward", "backward", "loss"):
            with Counting() as counting, pytest.raises((RuntimeError, mf.StateError), match=f"in {where}|scalar"):
                transformed(state, batch_of(0, 0, rank), 1.0, where)
            assert not counting.unwaited(), (preset, where)
            again = mf.unshard(transformed(state, batch_of(0, 0, rank), 1.0, "nowhere")[1])
            assert_equal(again, good, f"{preset} {where}")


def test_a_call_that_raised_leaves_nothing_behind() -> None:
    run_ranks(2, raise_and_go_on)


def recorded(rank: int, world: int) -> None:
    runtime = mf.RuntimePolicy(prefetch_order=mf.PrefetchOrder.RECORDED)
    state, _ = made("zero3", world, runtime=runtime)

    def loss_fn(state: mf.ShardState, batch: Batch, order: Sequence[int], fail: bool = False) -> torch.Tensor:
        e = mf.unshard(state[""])["embed"][batch[0]]
        x = e
        for i in order:
            with Marker():
                x = block(mf.unshard(state[f"blocks.{i}"]), e, x)
        if fail:
            raise RuntimeError("thrown away")
        return (x * batch[1]).sum()

    gathers_before: list[int] = []  # how many had been launched when the n-th block began

    class Marker:
        def __enter__(self) -> None:
            gathers_before.append(counting.count("gather"))

        def __exit__(self, *_: object) -> None: ...

    transformed = mf.value_and_grad(loss_fn)
    batch = batch_of(0, 0, rank)
    with Counting() as counting, pytest.raises(RuntimeError, match=r"thrown away"):
        transformed(state, batch, (0, 1, 2), True)
    grads = state
    for attempt, expected in enumerate(([1, 2, 3], [2, 3, 4], [2, 3, 4])):
        gathers_before.clear()
        with Counting() as counting:
            _, grads = transformed(state, batch, (2, 0, 1))  # not the order that was thrown away, nor the spec's
        assert gathers_before == expected, attempt
        assert counting.count("gather") == 8 and not counting.unwaited()
    reference, _ = made("zero3", world)
    assert_equal(mf.unshard(grads), mf.unshard(mf.value_and_grad(sharded_loss)(reference, batch)[1]), "order of blocks")
    for order, text in (
        ((2, 1, 0), r"`unit` got 'blocks.1' as use number 2 .*'blocks.0', as recorded"),
        ((2, 0, 1, 1), r"`unit` got 'blocks.1' as use number 4 .*nothing more, as recorded"),
        ((2, 0), r"`loss_fn` got a call that ended after 3 uses of units; expected 4 uses"),
    ):
        with Counting() as counting, pytest.raises(mf.OrderError, match=text):
            transformed(state, batch, order)
        assert not counting.unwaited()
    transformed(state, batch, (2, 0, 1))


def test_recorded_order() -> None:
    run_ranks(2, recorded)


def refusals(rank: int, world: int) -> None:
    state, _ = made("zero3", world)
    batch = batch_of(0, 0, rank)

    def reentrant(state: mf.ShardState, needs_grad: bool) -> torch.Tensor:
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=needs_grad)
        return checkpoint(lambda x: block(mf.unshard(state["blocks.0"]), x, x), x, use_reentrant=True).sum()

    for needs_grad in (True, False):
        with (
            warnings.catch_warnings(),
            Counting() as counting,
            pytest.raises(mf.StateError, match=r"use_reentrant=True.*pass use_reentrant=False"),
        ):
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # torch's; the point of the case
            mf.value_and_grad(reentrant)(state, needs_grad)
        assert not counting.unwaited()

    def reentrant_outside_units(state: mf.ShardState) -> torch.Tensor:
        y = checkpoint(lambda x: x * 2, mf.unshard(state[""])["embed"], use_reentrant=True)
        return block(mf.unshard(state["blocks.0"]), y, y).sum()

    with pytest.raises(mf.StateError, match=r"use_reentrant=True.*pass use_reentrant=False"):
        mf.value_and_grad(reentrant_outside_units)(state)

    kept: list[Any] = []
    mf.value_and_grad(lambda s, b: (kept.append(s), sharded_loss(s, b))[1])(state, batch)
    for use in (lambda: mf.unshard(kept[0]), lambda: mf.launch(kept[0][""])):
        with pytest.raises(mf.StateError, match=r"of a state whose call has ended; expected a state that is in use"):
            use()
    with pytest.raises(mf.StateError, match=r"that another value_and_grad is using"):
        mf.value_and_grad(lambda s: mf.value_and_grad(sharded_loss)(s, batch)[0])(state)
    with (
        pytest.raises(mf.StateError, match=r"`state` got a state outside value_and_grad"),
        mf.saved_tensors_hooks(state, torch.autograd.graph.save_on_cpu()),
    ):
        pass
    grads = accumulated(sharded_loss, state, [batch])
    with pytest.raises(
        mf.StateError, match=r"`accumulate` got states at \['0', '1'\]; expected states at \['the top'\]"
    ):
        mf.value_and_grad(sharded_loss, accumulate=[grads, grads])(state, batch)
    donated = mf.value_and_grad(sharded_loss, accumulate=grads, donate=True)(state, batch)[1]
    with pytest.raises(mf.DonatedError, match=r"donated to value_and_grad"):
        mf.unshard(grads)
    sgd(state, donated)


def test_what_is_refused() -> None:
    run_ranks(2, refusals)
