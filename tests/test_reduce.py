"""`reduce`, the transpose of `unshard`; and frozen groups in what it gives."""

from __future__ import annotations

import pytest
import torch

import mfsdp_fn as mf
from counting import Counting
from models import BLOCKS, EXACT, PRESETS, assert_equal, bilinear, mesh_of, trainable
from pool import run_ranks

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")


def reductions(rank: int, world: int) -> None:
    params = bilinear(2)
    spec3 = mf.plan(params, mesh_of(world), mf.zero3(), units=BLOCKS, precision=EXACT, grad_scale=4.0)
    values = {n: torch.full_like(t, float(rank)).detach() for n, t in params.items()}
    mean = 4.0 * sum(range(world)) / world
    for preset in ONE_AXIS:
        spec = mf.plan(params, mesh_of(world), PRESETS[preset](), units=BLOCKS, precision=EXACT, grad_scale=4.0)
        once = mf.reduce(values, spec)
        assert_equal(mf.unshard(once), {n: torch.full_like(t, mean) for n, t in values.items()}, preset)
        for micro_into in (once, mf.reduce(values, spec, is_last_microbatch=False)):
            before = [buffer.clone() for buffer in micro_into.main]
            twice = mf.reduce(values | {"embed": None}, spec, into=micro_into)
            expected = {n: torch.full_like(t, mean * (1 if n == "embed" else 2)) for n, t in values.items()}
            assert_equal(mf.unshard(twice), expected, preset)
            assert all(torch.equal(a, b) for a, b in zip(before, micro_into.main, strict=True)), "`into` is not touched"
        nothing = mf.reduce(dict.fromkeys(values), spec)
        assert not any(buffer.any() for buffer in nothing.main)
    with pytest.raises(mf.StateError, match=r"`grads` got \(2,\) at 'embed'; expected a gradient of shape \(5, 4\)"):
        mf.reduce(values | {"embed": torch.ones(2)}, spec3)
    with pytest.raises(mf.StateError, match=r"`into` got a state of .* expected a state of"):
        mf.reduce(values, spec3, into=mf.zeros_like(mf.shard(params, mf.plan(params, mesh_of(world), mf.ddp()))))
    accumulating = mf.reduce(values, mf.plan(params, mesh_of(world), mf.zero1()), is_last_microbatch=False)
    for use in (mf.unshard, mf.sync_model_weights):
        with pytest.raises(mf.StateError, match=r"accumulating gradients"):
            use(accumulating)
    tied = trainable({"a": torch.zeros(3)})
    tied["b"] = tied["a"]
    spec = mf.plan(tied, mesh_of(world), mf.zero3())
    one, other = torch.ones(3), torch.full((3,), 2.0)
    assert torch.equal(mf.unshard(mf.reduce({"a": one, "b": other}, spec))["a"], torch.full((3,), 3.0))
    assert torch.equal(mf.unshard(mf.reduce({"a": one, "b": one}, spec))["b"], one)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_reduce(world: int) -> None:
    run_ranks(world, reductions)


MIXES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    # Placements by unit; what `reduce` launches on the last microbatch, and what `reduce_outer` does after it.
    "ddp and hsdp": ({"": "ddp", "blocks.0": "hsdp"}, ["scatter"], ["all_reduce"] * 5),
    "zero1 and hsdp": ({"": "zero1", "blocks.0": "hsdp"}, ["scatter"], ["all_reduce"] + ["scatter"] * 4),
    "ddp and hfsdp": ({"": "ddp", "blocks.0": "hfsdp"}, ["scatter"], ["scatter"] + ["all_reduce"] * 4),
    "hsdp and hfsdp": ({"": "hsdp", "blocks.0": "hfsdp"}, ["scatter"] * 3, ["scatter"] + ["all_reduce"] * 2),
    # No outer axis waits: the last microbatch finishes everything.
    "ddp and zero3": ({"": "ddp", "blocks.0": "zero3"}, ["scatter"] * 2 + ["all_reduce"] * 4, []),
    "zero1 and zero2": ({"": "zero1", "blocks.0": "zero2"}, ["scatter"] * 6, []),
}
R, P, S = mf.Replicate(), mf.Partial(), mf.RowAtomic()
OVER_BOTH = {
    "ddp": mf.ddp(axes=2),
    "zero1": mf.Placements((R, R), (P, P), (S, S)),
    "zero2": mf.Placements((R, R), (S, S), (S, S)),
    "zero3": mf.Placements((S, S), (S, S), (S, S)),
    "hsdp": mf.hsdp(),
    "hfsdp": mf.hfsdp(),
}


def mixes(rank: int, world: int, shape: tuple[int, ...]) -> None:
    """What waits in any unit of a mix waits in all of them: for `reduce_outer`, if one has an outer axis."""
    params = bilinear(2)
    values = {n: torch.full_like(t, float(rank)).detach() for n, t in params.items()}
    total = float(sum(range(world)))
    for name, (mix, now, later) in MIXES.items():
        placements = {pattern: OVER_BOTH[preset] for pattern, preset in mix.items()}
        spec = mf.plan(params, mesh_of(*shape), placements, units=BLOCKS, precision=EXACT, grad_scale=float(world))
        first = mf.reduce(values, spec, is_last_microbatch=False)
        with Counting() as counting:
            grads = mf.reduce(values, spec, into=first)
        kinds = [sorted(e.kind for e in counting.events)]
        with Counting() as counting:
            done = mf.reduce_outer(grads)
        kinds.append(sorted(e.kind for e in counting.events))
        assert not counting.unwaited()
        if min(shape) > 1:  # over axes of one rank nothing is sent
            assert kinds == [sorted(now), sorted(later)], name
        elif world == 1:
            assert kinds == [[], []], name
        assert done.stage is mf.Stage.FINAL
        assert_equal(mf.unshard(done), {n: torch.full_like(t, 2 * total) for n, t in values.items()}, name)
        assert grads.stage is (mf.Stage.ACCUMULATING if later else mf.Stage.FINAL), name
        if later:  # and nothing takes it for finished
            for use in (mf.unshard, mf.sync_model_weights, lambda g: mf.optim.clip_by_global_norm(g, 1.0)):
                with pytest.raises(mf.StateError, match=r"accumulating gradients|gradients that still accumulate"):
                    use(grads)
            # Nor does it matter which microbatch was said to be the last.
            again = mf.reduce_outer(mf.reduce(values, spec, into=grads))
            assert_equal(mf.unshard(again), {n: torch.full_like(t, 3 * total) for n, t in values.items()}, name)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_reduce_of_mixes_by_unit(shape: tuple[int, ...]) -> None:
    run_ranks(shape[0] * shape[1], mixes, shape)


def frozen_in_gradients(rank: int, world: int) -> None:
    """A frozen group that only some ranks hold any of: `unshard` of gradients gathers it nowhere."""
    params = {"w": torch.ones(8, 2, requires_grad=True), "f": torch.ones(1, 3), "i": torch.ones(1, dtype=torch.int8)}
    for preset in ("zero2", "zero3"):
        state = mf.shard(params, mf.plan(params, mesh_of(world), PRESETS[preset](), shard_layout="unpadded"))
        _, grads = mf.value_and_grad(lambda s: mf.unshard(s)["w"].sum())(state)
        for holder in (grads, mf.zeros_like(state), mf.reduce({"w": params["w"], "f": None, "i": None}, state.spec)):
            got = mf.unshard(holder)
            assert got["f"] is None and got["i"] is None and got["w"].shape == (8, 2)
        updated = mf.sync_model_weights(mf.tree_map(lambda w, g: w - g, state, grads))
        back = mf.unshard(updated)
        assert not back["w"].any() and torch.equal(back["f"], params["f"]) and back["i"].item() == 1


def test_frozen_groups_hold_no_gradient_on_any_rank() -> None:
    run_ranks(4, frozen_in_gradients)
