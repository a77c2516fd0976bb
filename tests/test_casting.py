"""Casts made where the gather puts them: the same bits as a cast and then a gather."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf
from mfsdp_fn import casting, collectives
from mfsdp_fn.graph import GATHER, weights_read_late
from models import PRESETS, mesh_of
from pool import run_ranks

SHAPES = {
    "l.0.w": (5, 4),
    "l.0.scalar": (),
    "l.1.w": (4, 4),
    "l.1.empty": (0, 4),
    "l.2.short": (1, 4),
    "embed": (7, 4),
}
LEAN = mf.RuntimePolicy(store_compute_weights=False)


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).requires_grad_() for name, shape in SHAPES.items()}


def loss_fn(state: mf.ShardState, tokens: torch.Tensor) -> torch.Tensor:
    x = mf.unshard(state["embed"])[tokens]
    first, second, third = (mf.unshard(state[f"l.{i}"]) for i in range(3))
    x = torch.tanh(x @ first["w"].T[:, :4]) * first["scalar"]
    x = torch.tanh(x @ second["w"]) + second["empty"].sum()
    return (x * third["short"]).square().sum().to(torch.float64)


def state_of(shape: tuple[int, ...], preset: str, layout: str, compute: torch.dtype, *, lean: bool) -> mf.ShardState:
    params, precision = weights(), mf.MixedPrecisionPolicy(compute=compute)
    runtime = LEAN if lean else mf.RuntimePolicy()
    spec = mf.plan(
        params,
        mesh_of(*shape),
        PRESETS[preset](),
        units=("l.*", "embed"),
        precision=precision,
        shard_layout=layout,
        runtime=runtime,
    )
    return mf.shard(params, spec)


def assert_same(got: Any, wanted: Any) -> None:
    assert torch.equal(got[0], wanted[0])
    for a, b in zip(got[1].main, wanted[1].main, strict=True):
        assert torch.equal(a, b)


def compared(rank: int, world: int, shape: tuple[int, ...], preset: str) -> None:
    tokens = torch.tensor([rank, 3, 6])
    for compute in (torch.bfloat16, torch.float16, torch.float64):
        for layout in ("padded", "unpadded"):
            lean, stored = (state_of(shape, preset, layout, compute, lean=some) for some in (True, False))
            assert_same(mf.value_and_grad(loss_fn)(lean, tokens), mf.value_and_grad(loss_fn)(stored, tokens))
            for name in SHAPES:
                got, wanted = (mf.unshard(state)[name] for state in (lean, stored))
                assert got.dtype == compute
                assert torch.equal(got, wanted)


@pytest.mark.parametrize(("shape", "preset"), [((1,), "zero3"), ((2,), "zero3"), ((3,), "zero3"), ((2, 2), "hfsdp")])
def test_a_cast_at_the_gather_changes_no_bit(shape: tuple[int, ...], preset: str) -> None:
    run_ranks(torch.Size(shape).numel(), compared, shape, preset, timeout=120)


class Largest(TorchDispatchMode):
    """Counts casts into the compute dtype that are buffers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.casts += func is torch.ops.aten._to_copy.default
        return result


def watched(rank: int, world: int) -> None:
    state = state_of((world,), "zero3", "padded", torch.bfloat16, lean=True)
    with Largest() as mode:
        mf.unshard(state["embed"])
    assert mode.casts == 0
    with Largest() as mode, mock.patch.object(collectives, "_can_cast_in_place", lambda *args: False):
        mf.unshard(state["embed"])
    assert mode.casts == 1


def test_the_cast_by_itself_does_not_exist() -> None:
    run_ranks(2, watched, timeout=60)


def rewritten(rank: int, world: int, layout: str) -> None:
    torch._dynamo.reset()
    state = state_of((world,), "zero3", layout, torch.bfloat16, lean=True)
    found: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        changed = copy.deepcopy(module)
        before = [node.target for node in changed.graph.nodes]
        joined = casting.cast_into_gathered(changed.graph)
        after = [node.target for node in changed.graph.nodes]
        found.append(sum(before.count(cast) - after.count(cast) for cast in casting._CASTS))
        # On CPUs those that cast nothing too: Gloo's gathers that allocate are not safe.
        assert after.count(GATHER) == 0
        assert before.count(GATHER) == after.count(casting.INTO) == after.count(casting.OPERATION) == joined
        late = [[str(node.target) for node in weights_read_late(one.graph)] for one in (module, changed)]
        assert late[0] == late[1]
        assert bool(late[0]) == (world > 1)
        changed.graph.lint()
        changed.recompile()
        return changed.forward

    tokens = torch.tensor([rank, 3, 6])
    compiled = mf.compile(mf.value_and_grad(loss_fn), backend=backend)
    assert_same(compiled(state, tokens), mf.value_and_grad(loss_fn)(state, tokens))
    # All units in forward, and in backward all but the embedding. Uneven segments are padded in between.
    even = [len(set(state.spec.groups[n].gathers[0].sizes)) == 1 for n in state.spec.unit_groups("embed")]
    whole = [len(set(group.gathers[0].sizes)) == 1 for group in state.spec.groups]
    assert found == [0 if world == 1 else 2 * sum(whole) - sum(even)], (found, whole, even)
    assert all(whole) == (layout == "padded" or world == 1)


@pytest.mark.parametrize(("world", "layout"), [(2, "padded"), (2, "unpadded"), (1, "padded")])
def test_a_graph_for_kernels_casts_into_the_gather(world: int, layout: str) -> None:
    run_ranks(world, rewritten, layout, timeout=120)
