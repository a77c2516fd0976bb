"""Every setting of `RuntimePolicy` shows in what is launched, when and where, or in what is alive; none in results."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import mfsdp_fn as mf
from counting import Counting, Waiting
from mfsdp_fn import symmetric
from mfsdp_fn.testing import single_rank
from models import BLOCKS, EXACT, PRESETS, assert_equal, batch_of, bilinear, block, made, mesh_of, sharded_loss
from pool import run_ranks

DEPTH = 4
UNITS = DEPTH + 1  # and the root


def policy(**settings: Any) -> mf.RuntimePolicy:
    return mf.RuntimePolicy(**settings)


def state_of(runtime: mf.RuntimePolicy, *shape: int, preset: str = "zero3", **options: Any) -> mf.ShardState:
    return made(preset, *shape, depth=DEPTH, runtime=runtime, **options)[0]


def launched(runtime: mf.RuntimePolicy, rank: int, *shape: int, preset: str = "zero3") -> Counting:
    return called(state_of(runtime, *shape, preset=preset), rank)


def called(state: mf.ShardState, rank: int) -> Counting:
    with Counting() as counting:
        mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank))
    assert not counting.unwaited()
    return counting


def order(counting: Counting) -> str:
    short = {"gather": "g", "scatter": "s", "mm": "m", "all_reduce": "a"}
    return "".join(short[event.kind] for event in counting.events)


# What each setting shows, on every rank of four.


def keep_gathered(rank: int, world: int) -> None:
    counts = [launched(policy(keep_gathered=kept), rank, world).count("gather") for kept in ((), BLOCKS, ("", *BLOCKS))]
    assert counts == [2 * UNITS, UNITS + 1, UNITS]


def prefetch_order(rank: int, world: int) -> None:
    def backwards(state: mf.ShardState, batch: Any) -> torch.Tensor:
        e = mf.unshard(state[""])["embed"][batch[0]]
        x = e
        for name in reversed(state.spec.units_matching("blocks.*")):
            x = block(mf.unshard(state[name]), e, x)
        return (x * batch[1]).sum()

    seen = {}
    for kind in mf.PrefetchOrder:
        transformed = mf.value_and_grad(backwards)
        state = state_of(policy(prefetch_order=kind), world)
        for call in range(2):
            with Counting() as counting:
                transformed(state, batch_of(0, 0, rank))
            seen[kind, call] = order(counting)
    on_demand, ahead = "g" + "gm" * DEPTH, "gg" + "gm" * (DEPTH - 1) + "m"
    assert seen[mf.PrefetchOrder.RECORDED, 0].startswith(on_demand)  # the first call is remembered,
    assert seen[mf.PrefetchOrder.RECORDED, 1].startswith(ahead)  # and the next ones launch one unit ahead
    # The order of registration is not this function's: with the last block, nothing is left to launch.
    assert seen[mf.PrefetchOrder.REGISTRATION, 0] == seen[mf.PrefetchOrder.REGISTRATION, 1]
    assert seen[mf.PrefetchOrder.REGISTRATION, 0].startswith("ggg" + "m")


def forward_prefetch(rank: int, world: int) -> None:
    size = state_of(policy(), world).spec.groups[1].layout.size
    starts = {0: "g" + "gm" * DEPTH, None: "gg" + "gm" * (DEPTH - 1) + "m", size: "gg" + "gm" * (DEPTH - 1) + "m"}
    starts |= {2 * size: "ggg" + "gm" * (DEPTH - 2) + "mm", 10**9: "g" * UNITS + "m" * DEPTH}
    for budget, start in starts.items():
        seen = order(launched(policy(forward_prefetch=budget), rank, world))
        assert seen.startswith(start), (budget, seen)


def backward_prefetch(rank: int, world: int) -> None:
    size = state_of(policy(), world).spec.groups[1].layout.size
    one = "gg" + "gmms" * (DEPTH - 1) + "mms" + "s"
    ends = {0: "g" + "gmms" * DEPTH + "s", None: one, size: one, 10**9: "g" * UNITS + "mms" * DEPTH + "s"}
    for budget, end in ends.items():
        seen = order(launched(policy(backward_prefetch=budget, forward_prefetch=0), rank, world))
        assert seen == "g" + "gm" * DEPTH + end, (budget, seen)


def max_inflight_reductions(rank: int, world: int) -> None:
    for most in (1, 2, 3):
        # A backend's threads may hold a buffer a moment longer: the least of several calls.
        state = state_of(policy(max_inflight_reductions=most), world)
        assert min(called(state, rank).most_reducing for _ in range(4)) == most


def overlap_allgather_reduction(rank: int, world: int) -> None:
    for separate in (True, False):
        counting = launched(policy(overlap_allgather_reduction=separate), rank, 2, 2, preset="hsdp")
        by_kind = {kind: {e.group for e in counting.events if e.kind == kind} for kind in ("gather", "scatter")}
        assert len(by_kind["gather"] | by_kind["scatter"]) == (2 if separate else 1)


def overlap_outer_communication(rank: int, world: int) -> None:
    for beside in (True, False):
        state = state_of(policy(overlap_outer_communication=beside), 2, 2, preset="hsdp")
        for spied in (True, False):
            with Waiting() as waiting:
                transformed = mf.value_and_grad(sharded_loss, is_last_microbatch=spied)
                transformed(state, batch_of(0, 0, rank))
            if not spied:  # nothing is outer before the last microbatch
                assert waiting.seen == "Ss" * UNITS
            elif beside:  # a unit's all-reduce is waited for when the next one's is launched
                assert waiting.seen == "Ss" + "AS" + "saAS" * (UNITS - 2) + "saAa"
            else:
                assert waiting.seen == "SsAa" * UNITS
    seen = {order(launched(policy(overlap_outer_communication=beside), rank, world)) for beside in (True, False)}
    assert len(seen) == 1  # of one axis nothing is outer


def store_compute_weights(rank: int, world: int) -> None:
    precision = mf.MixedPrecisionPolicy(main=torch.float32, compute=torch.bfloat16)
    for stored in (True, False):
        state = state_of(policy(store_compute_weights=stored), world, precision=precision)
        assert [buffer is not None for buffer in state.compute] == [stored] * UNITS
        with Counting() as counting:
            mf.unshard(state)
        assert counting.bytes("gather")[1] == 2 * sum(group.layout.size for group in state.spec.groups)


def staged(state: mf.ShardState) -> tuple[mf.ShardState, list[symmetric.Staging]]:
    """With rings of ordinary memory: what symmetric memory does on GPUs, but for where its buffers are."""
    rings = [symmetric.Staging(4096, 2048, torch.device("cpu")) for _ in range(2 * state.spec.mesh.ndim)]
    axes = tuple(
        dataclasses.replace(axis, gather_staging=rings[2 * n], reduce_staging=rings[2 * n + 1])
        for n, axis in enumerate(state.spec.groups[0].axes)
    )
    groups = tuple(dataclasses.replace(group, axes=axes) for group in state.spec.groups)
    return dataclasses.replace(state, spec=dataclasses.replace(state.spec, groups=groups)), rings


def use_symmetric_memory(rank: int, world: int) -> None:
    for preset, shape in (("zero3", (world,)), ("ddp", (world,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2))):
        for prefetch in (None, 10**9):
            state = state_of(policy(forward_prefetch=prefetch), *shape, preset=preset)
            _, expected = mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank))
            ringed, rings = staged(state)
            for _ in range(2):
                _, grads = mf.value_and_grad(sharded_loss)(ringed, batch_of(0, 0, rank))
                assert all(torch.equal(a, b) for a, b in zip(grads.main, expected.main, strict=True)), preset
            kept = mf.unshard(ringed)  # survives the next launches in the same buffers
            mf.unshard(mf.tree_map(lambda w: w + 1, ringed)) if preset == "zero3" else None
            assert_equal(kept, mf.unshard(state), preset)
            inner, outer = (rings[0], rings[1]), (rings[-2], rings[-1])
            assert (inner[0].launched, outer[0].launched) != (0, 0) or preset == "ddp"
            assert inner[1].launched + outer[1].launched >= 2 * UNITS
            assert not any(slot.staged for ring in rings for slot in ring.slots)
    state, rings = staged(state_of(policy(), world))
    whole = mf.unshard(state)
    launches = rings[0].launched
    rings[0].limits = (8, 8)  # too small for any message: sent as ever
    assert_equal(mf.unshard(state), whole)
    assert rings[0].launched == launches


def caller_managed_grad_sync(rank: int, world: int) -> None:
    cases = (("ddp", (world,)), ("zero1", (world,)), ("zero3", (world,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2)))
    for preset, shape in cases:
        ours, theirs = (
            state_of(policy(caller_managed_grad_sync=managed), *shape, preset=preset) for managed in (False, True)
        )
        with Counting() as every:
            _, expected = mf.value_and_grad(sharded_loss)(ours, batch_of(0, 0, rank))
        with Counting() as counting:
            _, grads = mf.value_and_grad(sharded_loss)(theirs, batch_of(0, 0, rank))
        with Counting() as finishing:
            finished = mf.finish_grad_sync(grads)
        assert sorted(every.launches()) == sorted(counting.launches() + finishing.launches()), preset
        assert len(finishing.launches()) == (0 if preset == "zero3" else UNITS), preset
        assert all(torch.equal(a, b) for a, b in zip(finished.main, expected.main, strict=True)), preset
        reduced = mf.reduce(dict.fromkeys(mf.unshard(theirs)), theirs.spec)
        assert reduced.stage is grads.stage is (mf.Stage.FINAL if preset == "zero3" else mf.Stage.ACCUMULATING)
        assert finished.stage is mf.Stage.FINAL
        if preset != "zero3":
            unfinished(theirs, grads, finished, batch_of(0, 1, rank))


def unfinished(state: mf.ShardState, grads: mf.ShardState, finished: mf.ShardState, batch: Any) -> None:
    opt = mf.optim.sgd(0.1)
    for use in (lambda: opt.step(grads, opt.init(state), state), lambda: mf.optim.global_norm(grads)):
        with pytest.raises(mf.StateError, match=r"gradients that still accumulate; .* call finish_grad_sync\(grads\)"):
            use()
    nothing = dict.fromkeys(mf.unshard(state))
    for use in (
        lambda: mf.value_and_grad(sharded_loss, accumulate=finished)(state, batch),
        lambda: mf.reduce(nothing, state.spec, into=finished),
    ):
        with pytest.raises(mf.StateError, match=r"got finished gradients; .*finish_grad_sync after the last"):
            use()


EFFECTS: dict[str, Callable[[int, int], None]] = {
    effect.__name__: effect
    for effect in (
        keep_gathered,
        prefetch_order,
        forward_prefetch,
        backward_prefetch,
        max_inflight_reductions,
        overlap_allgather_reduction,
        store_compute_weights,
        overlap_outer_communication,
        use_symmetric_memory,
        caller_managed_grad_sync,
    )
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(mf.RuntimePolicy)])
def test_every_setting_has_an_effect(name: str) -> None:
    run_ranks(4, EFFECTS[name])


# Results.

CHOICES: dict[str, tuple[Any, ...]] = {
    "keep_gathered": ((), ("", "blocks.1")),
    "prefetch_order": tuple(mf.PrefetchOrder),
    "forward_prefetch": (None, 0, 50),
    "backward_prefetch": (None, 0, 50),
    "max_inflight_reductions": (1, 3),
    "overlap_allgather_reduction": (True, False),
    "store_compute_weights": (True, False),
    "overlap_outer_communication": (True, False),
    "caller_managed_grad_sync": (False, True),
}


def covering() -> Iterator[dict[str, Any]]:
    """Policies among which every two choices of two settings meet."""
    missing = {
        pair
        for one, two in itertools.combinations(CHOICES, 2)
        for pair in itertools.product(
            ((one, i) for i in range(len(CHOICES[one]))), ((two, i) for i in range(len(CHOICES[two])))
        )
    }
    while missing:
        row: dict[str, int] = dict(min(missing))
        for name, choices in CHOICES.items():
            if name not in row:
                gains = [
                    sum({(other, j), (name, i)} == set(pair) for pair in missing for other, j in row.items())
                    for i in range(len(choices))
                ]
                row[name] = gains.index(max(gains))
        missing -= {pair for pair in missing if all(row[name] == i for name, i in pair)}
        yield {name: CHOICES[name][i] for name, i in row.items()}


def results(rank: int, world: int, cases: list[tuple[str, tuple[int, ...]]], rows: list[dict[str, Any]]) -> None:
    """Inexact data, and weights gathered in bf16: nothing but the same arithmetic in the same order is equal."""
    generator = torch.Generator().manual_seed(3)
    params = {"embed": torch.randn(5, 4, generator=generator)}
    for i in range(2):
        params |= {f"blocks.{i}.w": torch.randn(4, 4, generator=generator), f"blocks.{i}.b": torch.randn(4)}
        params[f"blocks.{i}.b"].fill_(0.1 * i)
    params = {name: value.requires_grad_() for name, value in params.items()}
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16, main=torch.float32, grad=torch.float32)

    def loss_fn(state: mf.ShardState, batch: Any) -> torch.Tensor:
        tokens, target = batch
        e = mf.unshard(state[""])["embed"][tokens]
        x = e
        for name in state.spec.units_matching("blocks.*"):
            x = torch.tanh(block(mf.unshard(state[name]), e, x))
        return (x * target.to(x.dtype)).sum() / 7

    for preset, shape in cases:
        expected: list[torch.Tensor] | None = None
        for row in rows:
            if preset == "zero1":  # nothing is gathered that could be kept
                row = row | {"keep_gathered": ()}
            spec = mf.plan(
                params, mesh_of(*shape), PRESETS[preset](), units=BLOCKS, precision=precision, runtime=policy(**row)
            )
            state, grads = mf.shard(params, spec), None
            transformed = mf.value_and_grad(loss_fn)
            for micro in range(2):
                one = transformed.with_options(is_last_microbatch=micro == 1, accumulate=grads)
                _, grads = one(state, batch_of(0, micro, rank))
            assert grads is not None
            got = list(mf.finish_grad_sync(grads).main)
            expected = expected or got
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (preset, row)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_no_setting_changes_results(world: int) -> None:
    rows = [{}, *covering()]
    assert {name for row in rows[1:] for name in row} | {"use_symmetric_memory"} == {
        field.name for field in dataclasses.fields(mf.RuntimePolicy)
    }
    cases: list[tuple[str, tuple[int, ...]]] = [("zero3", (world,))]
    if world == 2:
        cases.append(("zero1", (world,)))
    if world == 4:
        cases += [("hsdp", (2, 2)), ("hfsdp", (2, 2))]
    run_ranks(world, results, cases, rows)


def refused(rank: int, world: int) -> None:
    params = {"w": torch.ones(3, 2, requires_grad=True)}
    for settings, text in (
        ({"use_symmetric_memory": True}, r"`runtime.use_symmetric_memory` got True, but it is NCCL's, and .* 'cpu'"),
        ({"overlap_outer_communication": 1}, r"`runtime.overlap_outer_communication` got 1; expected True or False"),
        ({"caller_managed_grad_sync": None}, r"`runtime.caller_managed_grad_sync` got None; expected True or False"),
        ({"max_inflight_reductions": True}, r"`runtime.max_inflight_reductions` got True; expected a positive"),
        ({"max_inflight_reductions": 0}, r"`runtime.max_inflight_reductions` got 0; expected a positive"),
        ({"forward_prefetch": -1}, r"`runtime.forward_prefetch` got -1; expected None or a number of elements"),
    ):
        with pytest.raises(mf.PlanError, match=text):
            mf.plan(params, mesh_of(world), mf.zero3(), runtime=policy(**settings))
    with pytest.raises(mf.PlanError, match=r"with ragged segments \(2, 4\) in group '\(root\) float32'; exp"):
        mf.plan(
            params,
            mesh_of(world),
            mf.zero3(),
            shard_layout="unpadded",
            runtime=policy(use_symmetric_memory=True),
        )
    # One rank with other settings: told, on every rank, before anything is launched.
    mine = policy(overlap_outer_communication=rank == 0)
    with pytest.raises(mf.PlanError, match=r"differs between ranks: .*overlap_outer_communication=True"):
        mf.plan(params, mesh_of(world), mf.zero3(), runtime=mine)


def test_what_is_refused() -> None:
    run_ranks(2, refused)
    with pytest.raises(mf.PlanError, match=r"True, but an AbstractMesh has no communicators"):
        mf.plan(
            {"w": torch.ones(4, requires_grad=True)},
            mf.AbstractMesh((2,), ("dp",)),
            mf.zero3(),
            runtime=policy(use_symmetric_memory=True),
        )


def test_compiled_steps_follow_the_policy() -> None:
    """What a policy says about reductions holds in a graph too; what can't hold there is refused."""
    batch = batch_of(0, 0, 0)

    def step(state: mf.ShardState, batch: Any) -> tuple[mf.ShardState, mf.ShardState]:
        left = mf.value_and_grad(sharded_loss)(state, batch)[1]
        return left, mf.finish_grad_sync(left)

    with single_rank() as mesh:
        params = bilinear(1)
        managed = policy(caller_managed_grad_sync=True)
        spec = mf.plan(params, mesh, mf.zero1(), units=BLOCKS, precision=EXACT, runtime=managed)
        state = mf.shard(params, spec)
        _, expected = step(state, batch)
        left, finished = mf.compile(step, backend="aot_eager")(state, batch)
        assert (left.stage, finished.stage) == (mf.Stage.ACCUMULATING, mf.Stage.FINAL)
        assert all(torch.equal(a, b) for a, b in zip(finished.main, expected.main, strict=True))
        other = dataclasses.replace(spec, runtime=policy(use_symmetric_memory=True))
        with pytest.raises(Unsupported, match=r"use_symmetric_memory` got True in a compiled step"):
            mf.compile(step, backend="aot_eager")(dataclasses.replace(state, spec=other), batch)
