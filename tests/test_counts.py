"""How many collectives and bytes a step issues, exactly; when they are launched, and what they keep alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from counting import Counting
from models import BLOCKS, PRESETS, accumulated, batch_of, bilinear, block, layouts_of, mesh_of, sgd, sharded_loss
from models import made as made_with_params
from pool import run_ranks

MICROS, DEPTH = 3, 4
UNITS = DEPTH + 1  # and the root
# Elements of all buffers: the root's 5 * 4 and each block's 4 * 4 + 4, padded so that ranks hold whole rows.
ELEMENTS = {world: size + DEPTH * size for world, size in ((1, 20), (2, 24), (4, 32))}

# (gathers in all microbatches, gathers in opt.step, reductions in all microbatches, those that wait for the last one)
TABLE = {
    "ddp": (0, 0, {}, {"all_reduce": UNITS}),
    "zero1": (0, UNITS, {}, {"scatter": UNITS}),
    "zero2": (0, UNITS, {"scatter": UNITS}, {}),
    "zero3": (2 * UNITS, 0, {"scatter": UNITS}, {}),
    "hsdp": (2 * UNITS, 0, {"scatter": UNITS}, {"all_reduce": UNITS}),
    "hfsdp": (2 * UNITS, UNITS, {"scatter": UNITS}, {"scatter": UNITS}),
}


def made(preset: str, *shape: int, depth: int = DEPTH, **options: Any) -> mf.ShardState:
    return made_with_params(preset, *shape, depth=depth, **options)[0]


def add(*counts: dict[str, int]) -> dict[str, int]:
    kinds = dict.fromkeys(kind for count in counts for kind in count)
    return {kind: n for kind in sorted(kinds) if (n := sum(count.get(kind, 0) for count in counts))}


def count_steps(rank: int, world: int, preset: str, shape: tuple[int, ...]) -> None:
    gathers, step_gathers, each, last = TABLE[preset] if world > 1 else (0, 0, {}, {})
    for layout in layouts_of(preset, "padded", "unpadded"):
        state = made(preset, *shape, shard_layout=layout)
        inner, outer = state.spec.groups[0].axes[-1], state.spec.groups[0].axes[0]
        grads = None
        for micro in range(MICROS):
            final = micro == MICROS - 1
            with Counting() as counting:
                _, grads = mf.value_and_grad(sharded_loss, is_last_microbatch=final, accumulate=grads)(
                    state, batch_of(0, micro, rank)
                )
            assert not counting.unwaited()
            expected = add({"gather": gathers}, each, last if final else {})
            assert add(counting.counts()) == expected, (preset, micro)
            assert counting.count("gather", inner.gather_group) == gathers
            assert counting.count("scatter", inner.reduce_group) == each.get("scatter", 0) + (
                last.get("scatter", 0) if final and outer is inner else 0
            )
            assert counting.count("all_reduce", outer.reduce_group) == (last.get("all_reduce", 0) if final else 0)
        assert grads is not None
        with Counting() as counting:
            state = sgd(state, grads)
        assert add(counting.counts()) == add({"gather": step_gathers}), preset
        assert counting.count("gather", outer.gather_group) == step_gathers
        with Counting() as counting:
            mf.unshard(state)
        assert add(counting.counts()) == add({"gather": gathers // 2}), preset
        assert not counting.unwaited()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3"])
def test_the_presets_table(preset: str, world: int) -> None:
    run_ranks(world, count_steps, preset, (world,))


@pytest.mark.parametrize("preset", ["hsdp", "hfsdp"])
def test_the_presets_table_on_two_axes(preset: str) -> None:
    run_ranks(4, count_steps, preset, (2, 2))


def count_bytes(rank: int, world: int) -> None:
    """A gather sends a rank's segment and receives the whole; a reduction the other way round."""
    for preset in ("ddp", "zero1", "zero2", "zero3"):
        for main, compute, reduce in ((torch.float32, torch.bfloat16, torch.float32), (None, None, torch.bfloat16)):
            precision = mf.MixedPrecisionPolicy(compute=compute, main=main, grad=torch.float32, reduce=reduce)
            params = bilinear(DEPTH, torch.float32)
            spec = mf.plan(params, mesh_of(world), PRESETS[preset](), units=BLOCKS, precision=precision)
            state = mf.shard(params, spec)
            elements = sum(group.layout.size for group in spec.groups)
            assert elements == ELEMENTS[1 if preset == "ddp" else world]
            weights, wire = elements * (2 if compute else 4), elements * reduce.itemsize

            def loss_fn(
                state: mf.ShardState, batch: Any, dtype: torch.dtype = compute or torch.float32
            ) -> torch.Tensor:
                return sharded_loss(state, (batch[0], batch[1].to(dtype)))

            with Counting() as counting:
                grads = accumulated(loss_fn, state, [batch_of(0, micro, rank) for micro in range(MICROS)])
            reductions = 1 if preset in ("ddp", "zero1") else MICROS
            gathers = 2 * MICROS if preset == "zero3" else 0
            if world == 1:
                assert not counting.counts()  # a single rank sends nothing
                continue
            assert counting.bytes("gather") == (gathers * weights // world, gathers * weights)
            if preset == "ddp":
                assert counting.bytes("all_reduce") == (wire, wire)
            else:
                assert counting.bytes("scatter") == (reductions * wire, reductions * wire // world)
            with Counting() as counting:
                sgd(state, grads)
            full = weights if preset in ("zero1", "zero2") else 0
            assert counting.bytes("gather") == (full // world, full)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes(world: int) -> None:
    run_ranks(world, count_bytes)


def alive_in(fn: Any, state: mf.ShardState, batch: Any) -> tuple[int, int]:
    """The largest numbers of gathered buffers and of reduction inputs alive at once.

    A backend's threads may hold a buffer a moment longer, which can only make them more: the least of several calls.
    """
    seen = []
    for _ in range(4):
        with Counting() as counting:
            mf.value_and_grad(fn)(state, batch)
        seen.append((counting.most_gathered, counting.most_reducing))
    return min(gathered for gathered, _ in seen), min(reducing for _, reducing in seen)


def order_of_launches(rank: int, world: int) -> None:
    def events(runtime: mf.RuntimePolicy) -> tuple[Counting, str]:
        state = made("zero3", world, runtime=runtime)
        with Counting() as counting:
            mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank))
        assert not counting.unwaited()
        short = {"gather": "g", "scatter": "s", "mm": "m"}
        return counting, "".join(short[event.kind] for event in counting.events)

    # Forward: a unit's gather is launched before the product of the unit before it. Backward: root and last block;
    # then for each block the gather of the one before it, both products, and its reduction.
    counting, seen = events(mf.RuntimePolicy())
    assert seen == "gggm" + "gm" * 2 + "m" + "gg" + "gmms" * (DEPTH - 1) + "mms" + "s"

    counting, seen = events(mf.RuntimePolicy(forward_prefetch=0, backward_prefetch=0))
    assert seen == "g" + "gm" * DEPTH + "g" + "gmms" * DEPTH + "s"

    counting, seen = events(mf.RuntimePolicy(forward_prefetch=10**6, backward_prefetch=10**6))
    assert seen == "g" * UNITS + "m" * DEPTH + "g" * UNITS + "mms" * DEPTH + "s"

    counting, seen = events(mf.RuntimePolicy(keep_gathered=("blocks.*",)))
    assert seen == "gggm" + "gm" * 2 + "m" + "mmgs" + "mms" * (DEPTH - 1) + "s"  # the root's at the first reduction

    counting, seen = events(mf.RuntimePolicy(keep_gathered=("",)))
    assert counting.count("gather") == 2 * UNITS - 1


def launched_alike(rank: int, world: int) -> list[tuple[str, int]]:
    """What is launched must not depend on when a backend's threads let go of a buffer: many times, one communicator."""
    state = made("zero3", world, runtime=mf.RuntimePolicy(overlap_allgather_reduction=False))
    with Counting() as counting:
        for micro in range(40):
            mf.value_and_grad(sharded_loss)(state, batch_of(0, micro, rank))
    launches = [(kind, sent) for kind, _, sent in counting.launches()]
    assert launches == launches[: len(launches) // 40] * 40
    return launches


def test_launches_are_the_same_every_time_on_every_rank() -> None:
    one, *others = run_ranks(3, launched_alike)
    assert all(other == one for other in others)


def test_order_of_launches() -> None:
    run_ranks(2, order_of_launches)


def buffers_alive(rank: int, world: int) -> None:
    """Gathered buffers and reduction inputs don't pile up with depth, also where each is named and on two axes."""
    lazy = made("zero3", world, depth=6, runtime=mf.RuntimePolicy(forward_prefetch=0, backward_prefetch=0))
    assert alive_in(sharded_loss, lazy, batch_of(0, 0, rank)) == (2, 1)  # the second's views are about to go

    def named(state: mf.ShardState, batch: Any) -> torch.Tensor:
        root = mf.unshard(state[""])
        e = root["embed"][batch[0]]
        x = e
        for name in state.spec.units_matching("blocks.*"):
            p = mf.unshard(state[name])
            x = block(p, e, x)
        return (x * batch[1]).sum()

    for preset, shape in (("zero3", (world,)), ("hsdp", (2, world // 2)), ("hfsdp", (2, world // 2))):
        for inflight, beside in ((1, False), (2, False), (1, True)):
            runtime = mf.RuntimePolicy(max_inflight_reductions=inflight, overlap_outer_communication=beside)
            state = made(preset, *shape, depth=6, runtime=runtime)
            for fn, most in ((sharded_loss, 3), (named, 5)):
                gathered, reducing = alive_in(fn, state, batch_of(0, 0, rank))
                assert gathered <= most, (preset, fn)
                outer = inflight if beside and len(shape) == 2 else 0
                assert reducing <= inflight + outer, (preset, inflight)


def test_what_is_alive_is_bounded() -> None:
    run_ranks(4, buffers_alive)


def same_unit_again(rank: int, world: int) -> None:
    """A use of a unit is a gather; its reduction is one a microbatch however often it is used."""
    # forward: root, blocks.1, and blocks.0 three times (once if kept); backward: each once (not if kept)
    for kept, gathers in (((), 1 + 1 + 3 + 3), (("blocks.0",), 1 + 1 + 1 + 2)):
        state = made("zero3", world, depth=2, runtime=mf.RuntimePolicy(keep_gathered=kept, forward_prefetch=0))

        def loss_fn(state: mf.ShardState, batch: Any) -> torch.Tensor:
            e = mf.unshard(state[""])["embed"][batch[0]]
            x = block(mf.unshard(state["blocks.0"]), e, e)
            x = block(mf.unshard(state["blocks.1"]), e, x)
            for _ in range(2):
                x = block(mf.unshard(state["blocks.0"]), e, x)
            return (x * batch[1]).sum()

        with Counting() as counting:
            mf.value_and_grad(loss_fn)(state, batch_of(0, 0, rank))
        assert counting.count("gather") == gathers
        assert counting.count("scatter") == 3


def test_several_uses() -> None:
    run_ranks(2, same_unit_again)


def let_go(rank: int, world: int) -> None:
    for preset in ("ddp", "zero1", "zero2", "zero3"):
        state = made(preset, world)
        gc.collect()
        gc.disable()
        try:
            transformed = mf.value_and_grad(sharded_loss)
            _, grads = transformed(state, batch_of(0, 0, rank))
            alive = [weakref.ref(buffer) for buffer in (*state.main, *grads.main)]
            state = sgd(state, grads)
            del grads
            assert not any(ref() is not None for ref in alive), preset
        finally:
            gc.enable()


def test_old_states_are_freed_without_a_garbage_collection() -> None:
    run_ranks(1, let_go)
