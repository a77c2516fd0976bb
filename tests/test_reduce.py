"""`reduce`, the transpose of `unshard`; and frozen groups in what it gives."""

from __future__ import annotations

import pytest
import torch

import mfsdp_fn as mf
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
