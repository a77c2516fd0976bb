"""`value_and_grad` equals the unsharded computation, bit for bit, after several steps with accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf
from models import (
    EXACT,
    LR,
    PRESETS,
    Batch,
    accumulated,
    assert_equal,
    batch_of,
    block,
    integers,
    layouts_of,
    made,
    mesh_of,
    plain_grads,
    plain_loss,
    plain_training,
    sgd,
    sharded_loss,
    trainable,
)
from pool import run_ranks


def train(rank: int, world: int, preset: str, shape: tuple[int, ...], options: dict[str, Any], donate: bool) -> None:
    scale = options.get("grad_scale", 1.0)
    # The mean over ranks is exact: the loss is multiplied by their number, or, as 1/3 is no binary fraction, the mean.
    factor, more = (1.0, {"grad_scale": 3 * scale}) if world == 3 else (float(world), {})
    state, params = made(preset, *shape, **(options | more))
    for step in range(3):
        batches = [batch_of(step, micro, rank) for micro in range(2)]
        state = sgd(state, accumulated(sharded_loss, state, batches, factor, donate=donate))
    assert_equal(mf.unshard(state), plain_training(params, world, steps=3, micros=2, scale=scale), preset)


def train_all(rank: int, world: int) -> None:
    for preset in ("ddp", "zero1", "zero2", "zero3"):
        train(rank, world, preset, (world,), {}, False)
        (*_, layout) = layouts_of(preset, "padded", "unpadded")
        train(rank, world, preset, (world,), {"shard_layout": layout, "grad_scale": 2.0}, True)
    runtimes = [
        mf.RuntimePolicy(keep_gathered=("blocks.1", "")),
        mf.RuntimePolicy(forward_prefetch=0, backward_prefetch=0),
        mf.RuntimePolicy(forward_prefetch=100, backward_prefetch=100, max_inflight_reductions=3),
        mf.RuntimePolicy(overlap_allgather_reduction=False),
        mf.RuntimePolicy(prefetch_order=mf.PrefetchOrder.RECORDED),
    ]
    for runtime in runtimes:
        train(rank, world, "zero3", (world,), {"runtime": runtime}, False)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_equals_the_unsharded_model(world: int) -> None:
    run_ranks(world, train_all)


def train_two_dimensional(rank: int, world: int, shapes: tuple[tuple[int, int], ...]) -> None:
    for shape in shapes:
        for preset in ("hsdp", "hfsdp"):
            train(rank, world, preset, shape, {}, False)
            train(rank, world, preset, shape, {"grad_scale": 0.5, "shard_layout": "unpadded"}, True)
            train(rank, world, preset, shape, {"runtime": mf.RuntimePolicy(max_inflight_reductions=2)}, False)


@pytest.mark.parametrize("shapes", [((1, 1),), ((2, 1), (1, 2)), ((2, 2), (4, 1), (1, 4))])
def test_two_dimensional_meshes(shapes: tuple[tuple[int, int], ...]) -> None:
    run_ranks(shapes[0][0] * shapes[0][1], train_two_dimensional, shapes)


def constant_gradients(rank: int, world: int) -> None:
    for preset in ("ddp", "zero1", "zero2", "zero3"):
        params = trainable({"w": torch.ones(3, 2), "b": torch.ones(5)})
        state = mf.shard(params, mf.plan(params, mesh_of(world), PRESETS[preset]()))

        def loss_fn(state: mf.ShardState, batch: float) -> torch.Tensor:
            p = mf.unshard(state)
            return (p["w"].sum() + p["b"].sum()) * batch

        for micros in (1, 2, 16, 128):
            for donate in (False, True):
                grads = accumulated(loss_fn, state, [0.1] * micros, donate=donate)  # type: ignore[list-item]
                # In the same order, the unsharded sum: mean over equal ranks is the value itself.
                expected = torch.zeros(())
                for _ in range(micros):
                    expected = expected + torch.tensor(0.1)
                for leaf in mf.unshard(grads).values():
                    assert torch.equal(leaf, expected.expand_as(leaf)), (preset, micros, donate)


@pytest.mark.parametrize("world", [1, 2])
def test_constant_gradients_add_up_exactly(world: int) -> None:
    run_ranks(world, constant_gradients)


def check_grads(
    rank: int, world: int, sharded: Any, plain: Any, what: str, preset: str = "zero3", **options: Any
) -> None:
    """One call against the unsharded gradient."""
    state, params = made(preset, world, **options)
    loss, grads = mf.value_and_grad(sharded)(state, batch_of(0, 0, rank), float(world))
    losses = [lambda p, r=r: plain(p, batch_of(0, 0, r), float(world)) for r in range(world)]
    expected = plain_grads(params, losses, world)
    assert_equal(mf.unshard(grads), expected, what)
    assert torch.equal(loss, plain(params, batch_of(0, 0, rank), float(world)).detach()), what
    assert not loss.requires_grad


def twice(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    """Every unit in two places, the root in three."""
    first = sharded_loss(state, batch, factor)
    return first + sharded_loss(state, batch, factor) * 2 + mf.unshard(state[""])["embed"].sum()


def checkpointed(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    """A gather inside each checkpointed block."""
    tokens, target = batch
    e = mf.unshard(state[""])["embed"][tokens]
    x = e
    for name in state.spec.units_matching("blocks.*"):
        x = checkpoint(lambda e, x, n=name: block(mf.unshard(state[n]), e, x), e, x, use_reentrant=False)
    return (x * target).sum() * factor


def checkpointed_together(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    """One checkpoint over all blocks, twice."""
    tokens, target = batch
    e = mf.unshard(state[""])["embed"][tokens]

    def blocks(e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for name in state.spec.units_matching("blocks.*"):
            x = block(mf.unshard(state[name]), e, x)
        return x

    x = checkpoint(blocks, e, e, use_reentrant=False)
    x = x + checkpoint(blocks, e, e, use_reentrant=False)
    return (x * target).sum() * factor


def plain_together(params: Any, batch: Batch, factor: float) -> torch.Tensor:
    return 2 * plain_loss(params, batch, factor)


def checkpointed_weights(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    """Gathered weights are arguments of the checkpoint."""

    def call(p: Any, e: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, p, e, x, use_reentrant=False)

    return sharded_loss(state, batch, factor, call)


def offloaded(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    with mf.saved_tensors_hooks(state, torch.autograd.graph.save_on_cpu()):
        return sharded_loss(state, batch, factor)


def prefetching(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    """Explicit launches, one of them never used, one after a wait."""
    tokens, target = batch
    units = state.spec.units_matching("blocks.*")
    pending = {name: mf.launch(state[name]) for name in units}
    e = mf.unshard(state[""])["embed"][tokens]
    x = e
    for name in units:
        x = block(mf.wait(pending[name]), e, x)
    mf.launch(state[units[0]])
    return (x * target).sum() * factor


def whole(state: mf.ShardState, batch: Batch, factor: float) -> torch.Tensor:
    return plain_loss(mf.unshard(state), batch, factor)


def plain_twice(params: Any, batch: Batch, factor: float) -> torch.Tensor:
    return 3 * plain_loss(params, batch, factor) + params["embed"].sum()


def shapes_of_use(rank: int, world: int) -> None:
    for preset in ("zero2", "zero3"):
        for fn in (sharded_loss, checkpointed, checkpointed_weights, offloaded, prefetching, whole):
            check_grads(rank, world, fn, plain_loss, f"{preset} {fn.__name__}", preset)
        check_grads(rank, world, twice, plain_twice, f"{preset} twice", preset)
        check_grads(rank, world, checkpointed_together, plain_together, f"{preset} together", preset)
    kept = mf.RuntimePolicy(keep_gathered=("blocks.*",))
    for fn, plain in ((twice, plain_twice), (checkpointed, plain_loss), (checkpointed_together, plain_together)):
        check_grads(rank, world, fn, plain, f"kept {fn.__name__}", runtime=kept)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_way_of_using_units(world: int) -> None:
    run_ranks(world, shapes_of_use)


def later_parameters(rank: int, world: int) -> None:
    """A parameter that nothing uses, and one that only the second microbatch uses."""

    def loss_fn(state: mf.ShardState, batch: Batch, factor: float, both: bool) -> torch.Tensor:
        tokens, target = batch
        e = mf.unshard(state[""])["embed"][tokens]
        x = block(mf.unshard(state["blocks.0"]), e, e)
        if both:
            x = block(mf.unshard(state["blocks.1"]), e, x)
        return (x * target).sum() * factor

    def plain(params: Any, batch: Batch, factor: float, both: bool) -> torch.Tensor:
        used = 2 if both else 1
        keep = {n: v for n, v in params.items() if n == "embed" or int(n.split(".")[1]) < used}
        return plain_loss(keep, batch, factor)

    for preset in ("ddp", "zero1", "zero2", "zero3"):
        state, params = made(preset, world)
        grads = None
        for micro in range(2):
            last = micro == 1
            step = mf.value_and_grad(loss_fn, is_last_microbatch=last, accumulate=grads)
            _, grads = step(state, batch_of(0, micro, rank), float(world), last)
        losses = [
            lambda p, r=r, m=micro: plain(p, batch_of(0, m, r), float(world), m == 1)
            for micro in range(2)
            for r in range(world)
        ]
        expected = plain_grads(params, losses, world)
        assert grads is not None
        got = mf.unshard(grads)
        assert_equal(got, expected, preset)
        assert not got["blocks.2.w"].any()
        assert got["blocks.1.w"].any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_used_late_or_never(world: int) -> None:
    run_ranks(world, later_parameters)


def odd_gradients(rank: int, world: int) -> None:
    """Transposed, expanded and zero-strided gradients; a loss that depends on nothing; NaN on one rank."""
    params = trainable({"w": integers(3, 4, seed=3), "b": integers(5, seed=4)})
    for preset in ("ddp", "zero1", "zero2", "zero3"):
        spec = mf.plan(params, mesh_of(world), PRESETS[preset](), precision=EXACT)
        state = mf.shard(params, spec)
        c = integers(4, 3, seed=5 + rank)

        def odd(state: mf.ShardState, c: torch.Tensor) -> torch.Tensor:
            p = mf.unshard(state)
            return (p["w"].t() * c).sum() * world + p["b"].sum() * world  # grad of w is c.t(), of b expanded

        _, grads = mf.value_and_grad(odd)(state, c)
        got = mf.unshard(grads)
        total = sum((integers(4, 3, seed=5 + r).t() for r in range(world)), torch.zeros(3, 4, dtype=torch.float64))
        assert_equal(got, {"w": total, "b": torch.full((5,), float(world), dtype=torch.float64)}, preset)

        loss, grads = mf.value_and_grad(lambda state: torch.tensor(7.0))(state)
        assert loss.item() == 7.0
        assert not any(buffer.any() for buffer in grads.main)

        def sick(state: mf.ShardState) -> torch.Tensor:
            p = mf.unshard(state)
            return p["b"].sum() + p["w"][0, 0] * (float("nan") if rank == world - 1 else 1.0)

        _, grads = mf.value_and_grad(sick)(state)
        got = mf.unshard(grads)
        assert got["w"][0, 0].isnan(), preset
        assert torch.equal(got["b"], torch.ones(5, dtype=torch.float64)), preset


@pytest.mark.parametrize("world", [1, 2, 4])
def test_odd_gradients(world: int) -> None:
    run_ranks(world, odd_gradients)


def test_learning_rate_is_a_power_of_two() -> None:
    assert LR.hex().startswith("0x1.0000000000000p")  # what "exact" in models.py rests on


def weights_that_leave(rank: int, world: int, presets: list[str], shape: tuple[int, ...]) -> None:
    """Weights returned as aux or as an output stay what they were, whether or not they had to be gathered."""

    def with_aux(state: mf.ShardState, batch: Any) -> Any:
        weights = mf.unshard(state["blocks.1"])
        return sharded_loss(state, batch), {"w": weights["w"], "t": weights["w"].t(), "b": [weights["b"]]}

    for preset in presets:
        state, params = made(preset, *shape)
        batch, opt = batch_of(0, 0, rank), mf.optim.sgd(lr=0.5)
        (_, aux), grads = mf.value_and_grad(with_aux, has_aux=True)(state, batch)
        out, pullback = mf.vjp(lambda s: mf.unshard(s["blocks.0"])["w"], state)
        pullback(torch.zeros_like(out))
        opt.step(grads, opt.init(state), state, donate=True)
        assert torch.equal(aux["w"], params["blocks.1.w"]) and torch.equal(aux["t"].t(), aux["w"]), preset
        assert torch.equal(aux["b"][0], params["blocks.1.b"]), preset
        assert torch.equal(out, params["blocks.0.w"]), preset


@pytest.mark.parametrize(
    ("presets", "shape"),
    [(["ddp", "zero1", "zero3"], (1,)), (["ddp", "zero2", "zero3"], (2,)), (["hsdp", "hfsdp"], (2, 1))],
)
def test_weights_that_leave_the_call_stay_what_they_were(presets: list[str], shape: tuple[int, ...]) -> None:
    run_ranks(torch.Size(shape).numel(), weights_that_leave, presets, shape)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as quantized and compressed ones are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(arg.held if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


def tensors_of_other_classes(rank: int, world: int) -> None:
    state, _ = made("zero3", world)

    def with_aux(state: mf.ShardState, batch: Any) -> Any:
        return sharded_loss(state, batch), {"wrapped": Wrapped(batch[1]), "sparse": batch[1].to_sparse()}

    batch = batch_of(0, 0, rank)
    (_, aux), _ = mf.value_and_grad(with_aux, has_aux=True)(state, batch)
    assert type(aux["wrapped"]) is Wrapped and torch.equal(aux["wrapped"].held, batch[1])
    assert torch.equal(aux["sparse"].to_dense(), batch[1])


def test_aux_may_hold_tensors_of_other_classes() -> None:
    run_ranks(1, tensors_of_other_classes)
