"""Every mix of placements over two axes equals the unsharded model; what is reduced when; wires of fp16; replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from counting import Counting
from models import (
    BLOCKS,
    EXACT,
    accumulated,
    assert_equal,
    batch_of,
    bilinear,
    integers,
    made,
    mesh_of,
    plain_loss,
    plain_training,
    sgd,
    sharded_loss,
)
from pool import run_ranks

DEPTH = 2
UNITS = DEPTH + 1
R, P, S = mf.Replicate(), mf.Partial(), mf.RowAtomic()
STEPS = 3


def allowed() -> Iterator[mf.Placements]:
    """Every combination that `plan` takes for two axes."""
    both = list(itertools.product((R, S), (R, S)))
    for parameter, gradient, optimizer in itertools.product(both, itertools.product((P, S), (P, S)), both):
        placements = mf.Placements(parameter, gradient, optimizer)
        try:
            mf.plan({"w": torch.ones(4, requires_grad=True)}, mf.AbstractMesh((2, 2), ("outer", "inner")), placements)
        except mf.PlanError as error:
            assert "shards over axes" in str(error)
            continue
        yield placements


def test_which_mixes_are_allowed() -> None:
    found = set(allowed())
    # For an optimizer state sharded over n axes, n + 1 places for the parameters and as many for the gradients.
    assert len(found) == 1 + 4 + 4 + 9
    named = {
        mf.ddp(axes=2): "ddp",
        mf.hsdp(): "hsdp",
        mf.hfsdp(): "hfsdp",
        mf.Placements((R, R), (P, S), (S, S)): "zero1 outside, zero2 inside",
        mf.Placements((R, R), (P, S), (R, S)): "ddp outside, zero2 inside",
        mf.Placements((R, R), (P, P), (S, S)): "zero1 over both",
        mf.Placements((R, R), (S, S), (S, S)): "zero2 over both",
        mf.Placements((S, S), (S, S), (S, S)): "zero3 over both",
        mf.Placements((R, S), (S, S), (S, S)): "zero2 outside, zero3 inside",
        mf.Placements((S, R), (S, P), (S, R)): "zero3 outside, ddp inside",
    }
    assert not set(named) - found


def train(rank: int, world: int, shapes: list[tuple[int, int]], mixes: list[mf.Placements]) -> None:
    params = bilinear(DEPTH)
    now, expected = params, []
    for step in range(STEPS):  # with 1, 2 and 3 microbatches
        now = plain_training(now, world, steps=1, micros=step + 1, first=step)
        expected.append(now)
    for shape, placements in itertools.product(shapes, mixes):
        spec = mf.plan(params, mesh_of(*shape), placements, units=BLOCKS, precision=EXACT)
        state = mf.shard(params, spec)
        for step in range(STEPS):
            batches = [batch_of(step, micro, rank) for micro in range(step + 1)]
            state = sgd(state, accumulated(sharded_loss, state, batches, float(world), donate=step == 2))
            assert_equal(mf.unshard(state), expected[step], (shape, placements, step))


@pytest.mark.parametrize("shapes", [[(1, 1)], [(2, 1), (1, 2)], [(2, 2), (1, 4), (4, 1)]])
def test_every_mix_equals_the_unsharded_model(shapes: list[tuple[int, int]]) -> None:
    run_ranks(shapes[0][0] * shapes[0][1], train, shapes, list(allowed()), timeout=120.0)


T = mf.TensorAtomic()
BY_UNIT = {"": mf.ddp(), "blocks.0": mf.Placements((T,), (T,), (T,)), "blocks.1": mf.zero3()}
FOR_SOME: list[dict[str, Any]] = [
    {"shard_layout": "unpadded"},
    {"shard_layout": "auto"},
    {"block_size": 2},
    {"leading_dims": 2},
    {"split_by_row_size": True},
    {"runtime": mf.RuntimePolicy(keep_gathered=("blocks.1", "blocks.*"))},
]


def for_some_units(rank: int, world: int) -> None:
    """What means something to one unit only is no mistake, and changes nothing for the others."""
    params = bilinear(DEPTH) | {"blocks.1.deep": integers(2, 3, 4, seed=7).requires_grad_()}
    options: dict[str, Any] = {"units": BLOCKS, "precision": EXACT, "grad_scale": float(world)}  # thirds aren't exact
    options["owners"] = {path: number % world for number, path in enumerate(params) if path.startswith("blocks.0.")}

    def loss(p: Any, deep: torch.Tensor, batch: Any, factor: float) -> torch.Tensor:
        return p(batch, factor) + (deep * batch[1].sum()).sum() * factor

    def plain(p: Any, batch: Any, factor: float) -> torch.Tensor:
        rest = {name: value for name, value in p.items() if name != "blocks.1.deep"}
        return loss(lambda *given: plain_loss(rest, *given), p["blocks.1.deep"], batch, factor)

    def sharded(state: mf.ShardState, batch: Any, factor: float) -> torch.Tensor:
        deep = mf.unshard(state["blocks.1"])["deep"]
        return loss(lambda *given: sharded_loss(state, *given), deep, batch, factor)

    expected = plain_training(params, world, steps=STEPS, micros=2, loss=plain)
    alike = mf.plan(params, mesh_of(world), BY_UNIT, **options)
    for more in FOR_SOME:
        spec = mf.plan(params, mesh_of(world), BY_UNIT, **options, **more)
        for old, new in zip(alike.groups, spec.groups, strict=False):
            assert old == new or new.unit == "blocks.1"
        state = mf.shard(params, spec)
        for step in range(STEPS):
            batches = [batch_of(step, micro, rank) for micro in range(2)]
            state = sgd(state, accumulated(sharded, state, batches, 1.0, donate=step == 2))
        assert_equal(mf.unshard(state), expected, more)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_options_for_some_units_only_are_taken(world: int) -> None:
    run_ranks(world, for_some_units)


def test_options_for_no_unit_are_refused() -> None:
    params = bilinear(DEPTH)
    kept = mf.RuntimePolicy(keep_gathered=("blocks.1", "blocks.0"))
    placements = {"": mf.zero3(), "blocks.0": mf.zero2()}
    with pytest.raises(mf.PlanError, match=r"`runtime.keep_gathered` got 'blocks.0', whose units \('blocks.0',\) keep"):
        mf.plan(params, mf.AbstractMesh((2,), ("dp",)), placements, units=BLOCKS, runtime=kept)
    whole = mf.Placements((T,), (T,), (T,))
    owners = {path: 0 for path in params if path.startswith("blocks.0.")}
    mixed = {"": mf.ddp(), "blocks.0": whole}
    refused: list[tuple[str, Any]] = [("shard_layout", "unpadded"), ("block_size", 2), ("split_by_row_size", True)]
    for name, value in refused:
        with pytest.raises(mf.PlanError, match=f"`{name}` got {value!r}; expected"):
            options: dict[str, Any] = {"units": BLOCKS, "owners": owners, name: value}
            mf.plan(params, mf.AbstractMesh((2,), ("dp",)), mixed, **options)


def outer_alone(rank: int, world: int, shapes: list[tuple[int, int]]) -> None:
    """The outer axis is reduced once a step, when the user says so, whatever the sizes of the axes."""
    for preset, kind in (("hsdp", "all_reduce"), ("hfsdp", "scatter")):
        for shape in shapes:
            state, _ = made(preset, *shape, depth=DEPTH)
            inner, outer = state.spec.groups[0].axes[1], state.spec.groups[0].axes[0]
            grads: Any = None
            for micro in range(3):
                step = mf.value_and_grad(sharded_loss, is_last_microbatch=False, accumulate=grads)
                with Counting() as counting:
                    _, grads = step(state, batch_of(0, micro, rank))
                scatters = UNITS if inner.size > 1 else 0
                assert counting.count("scatter") == counting.count("scatter", inner.reduce_group) == scatters
                assert counting.count("all_reduce") == 0
            assert grads.stage is mf.Stage.ACCUMULATING
            before = [buffer.clone() for buffer in grads.main]
            with Counting() as counting:
                finished = mf.reduce_outer(grads)
            assert counting.counts() == ({kind: UNITS} if outer.size > 1 else {})
            assert counting.count(kind, outer.reduce_group) == counting.count(kind) and not counting.unwaited()
            assert all(torch.equal(a, b) for a, b in zip(grads.main, before, strict=True)), "`grads` is not touched"
            at_once = accumulated(sharded_loss, state, [batch_of(0, micro, rank) for micro in range(3)])
            assert all(torch.equal(a, b) for a, b in zip(finished.main, at_once.main, strict=True))
            with Counting() as counting:
                assert mf.reduce_outer(finished) is finished
            assert not counting.events


@pytest.mark.parametrize("shapes", [[(1, 1)], [(2, 1)], [(2, 2), (1, 4), (4, 1)]])
def test_the_outer_axis_is_reduced_on_its_own(shapes: list[tuple[int, int]]) -> None:
    run_ranks(shapes[0][0] * shapes[0][1], outer_alone, shapes)


def half_wire(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Gradients of 300 times some integers: their sum overflows fp16, their mean over 300 does not."""
    params = {"a": torch.zeros(5, 3, requires_grad=True), "b": torch.zeros(7, requires_grad=True)}
    precision = mf.MixedPrecisionPolicy(compute=torch.float32, grad=torch.float32, reduce=torch.float16)
    share = torch.tensor([[4.0, 60.0], [8.0, -20.0], [-12.0, 40.0], [100.0, 100.0]]) * 300

    def loss_fn(state: mf.ShardState) -> torch.Tensor:
        p = mf.unshard(state)
        return p["a"].sum() * share[rank, 0] + p["b"].sum() * share[rank, 1]

    found = []
    for placements, shape in (
        (mf.zero3(), (4,)),
        (mf.zero2(), (4,)),
        (mf.zero1(), (4,)),
        (mf.ddp(), (4,)),
        (mf.hsdp(), (2, 2)),
        (mf.hfsdp(), (2, 2)),
    ):
        spec = mf.plan(params, mesh_of(*shape), placements, precision=precision, grad_scale=1 / 300)
        state, grads = mf.shard(params, spec), None
        for micro in range(2):
            step = mf.value_and_grad(loss_fn, is_last_microbatch=micro == 1, accumulate=grads)
            with Counting() as counting:
                _, grads = step(state)
            for event in counting.events:
                if event.kind in ("scatter", "all_reduce"):
                    assert event.sent <= 2 * spec.groups[0].layout.size  # two bytes an element
        assert grads is not None
        whole = mf.unshard(grads)
        found.append([whole["a"], whole["b"]])
    return found


def test_scaled_reductions_over_an_fp16_wire() -> None:
    for on_rank in run_ranks(4, half_wire):
        for a, b in on_rank:  # two microbatches of (4 + 8 - 12 + 100) / 4 and (60 - 20 + 40 + 100) / 4
            assert torch.equal(a, torch.full((5, 3), 50.0)) and torch.equal(b, torch.full((7,), 90.0))


def replicas(rank: int, world: int) -> dict[str, Any]:
    """Ranks with weights of their own."""
    params = {name: (value.detach() + 100 * rank).requires_grad_() for name, value in bilinear(DEPTH).items()}
    found = {}
    for preset in ("hsdp", "hfsdp"):
        state, _ = made(preset, 2, 2, params=params)
        found[preset] = mf.unshard(state)
        again = mf.unshard(mf.sync_model_weights(mf.tree_map(lambda w: w.clone(), state)))
        assert_equal(again, found[preset], "main and compute weights agree")
    return {preset: {name: value.clone() for name, value in whole.items()} for preset, whole in found.items()}


def test_replicas_of_different_seeds_start_equal() -> None:
    """`shard` makes them equal: where weights are replicated, the first replica's count."""
    first, *others = run_ranks(4, replicas)
    for preset in ("hsdp", "hfsdp"):
        for other in others:
            assert_equal(other[preset], first[preset], preset)
    base = bilinear(DEPTH)
    from_ranks = (first["hsdp"]["blocks.0.w"] - base["blocks.0.w"]).unique().tolist()
    assert from_ranks == [0.0, 100.0]  # rows of ranks 0 and 1: those of the first replica
