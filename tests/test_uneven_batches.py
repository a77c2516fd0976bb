"""Ranks with batches of their own: their graphs differ, but launch the same collectives in the same order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import mfsdp_fn as mf
from mfsdp_fn.graph import GATHERS
from models import mesh_of
from pool import run_ranks

DIM = 8
Sizes = list[list[int]]


def between(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """What is cheap to compute again for one batch and costly for another reads the weights of two units."""
    first, norm, head = (mf.unshard(state[unit]) for unit in ("first", "norm", "head"))
    z = (x @ first["w"]) * norm["g"][0]
    y = z.sum(1, True) + z.mean(0) + norm["g"][0]
    return (y @ head["w"]).square().sum()


def normed(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """A norm and a product in each unit."""
    for unit in ("first", "norm", "head"):
        weights = mf.unshard(state[unit])
        x = torch.nn.functional.rms_norm(x, (DIM,), weights["g"][0]) @ weights["w"]
    return x.square().sum()


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    units = {"first": 2, "norm": 4, "head": 6}  # of sizes of their own, which tell them apart
    return {
        f"{unit}.{name}": torch.randn(DIM if name == "w" else rows, DIM).requires_grad_()
        for unit, rows in units.items()
        for name in ("w", "g")
    }


def shards(graph: fx.Graph) -> list[str]:
    """The shapes of the shards that are gathered, in order."""
    return [str(tuple(node.args[0].meta["val"].shape)) for node in graph.nodes if node.target in GATHERS]


def trained(rank: int, world: int, loss_fn: Any, sizes: Sizes, dynamic: bool | None) -> list[list[str]]:
    params = weights()
    state = mf.shard(params, mf.plan(params, mesh_of(world), mf.zero3(), units=("*",)))
    graphs: list[fx.Graph] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    eager = mf.value_and_grad(loss_fn)
    compiled, found = mf.compile(eager, backend=backend, dynamic=dynamic), []
    for size in sizes[rank]:
        x = torch.randn(size, DIM)
        (loss, grads), (expected, expected_grads) = compiled(state, x), eager(state, x)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        for got, wanted in zip(grads.main, expected_grads.main, strict=True):
            # Wrong weights would give anything. Dynamo writes a mean over a symbolic size in another way.
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        found.append(shards(graphs[-1]))
    return found


SIZES = {
    "one is empty": [[4], [0]],
    "one is a row": [[4], [1]],
    "one compiles again": [[4, 6, 4], [4, 4, 4]],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("loss_fn", [between, normed])
def test_every_rank_gathers_in_one_order(loss_fn: Any, sizes: Sizes) -> None:
    first, second = run_ranks(2, trained, loss_fn, sizes, None, timeout=120)
    assert first == second


def test_sizes_may_be_symbols_from_the_start() -> None:
    run_ranks(2, trained, normed, [[4, 6, 8], [6, 4, 4]], True, timeout=120)


def fusing(state: mf.ShardState, x: torch.Tensor, y: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """What Inductor fuses depends on whether `x` and `y` have one shape, and with it what it computes when."""
    early = torch.cos(y * s)
    z = y @ mf.unshard(state["a"])["w"] + (early @ y.T).sum()
    b = mf.unshard(state["b"])["w"]
    late = torch.sin(x * s * b[0])
    return ((late @ s).sum() + (early @ b).sum() + z.square().sum()).float()


def fused(rank: int, world: int, sizes: list[int], lean: bool) -> list[str]:
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    width = 64
    params: dict[str, Any] = {f"{unit}.w": torch.randn(width, width).requires_grad_() for unit in "ab"}
    precision = mf.MixedPrecisionPolicy(compute=torch.bfloat16)
    runtime = mf.RuntimePolicy(store_compute_weights=not lean)
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=("*",), precision=precision, runtime=runtime)
    state = mf.shard(params, spec)
    torch.manual_seed(rank)
    x, y, s = (torch.randn(*shape).bfloat16() for shape in ((sizes[rank], width), (4, width), (width,)))
    transformed = mf.value_and_grad(fusing)
    expected_loss, expected = transformed(state, x, y, s)
    torch._dynamo.reset()
    (loss, grads), (source,) = run_and_get_code(mf.compile(transformed), state, x, y, s)
    torch.testing.assert_close(loss, expected_loss, rtol=0.05, atol=0.05)
    for got, wanted in zip(grads.main, expected.main, strict=True):
        # bf16 sums of some hundred terms of about 1; weights of another unit would be off by far more.
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))
    assert "cast_in_place" in source  # on CPUs gathers without a cast go into memory given, too
    return re.findall(r"_c10d_functional\.(\w+)\.default\(", source)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("sizes", [[4, 5], pytest.param([4, 4], marks=pytest.mark.soak)])
def test_inductor_keeps_the_order_whatever_it_fuses(sizes: list[int], lean: bool) -> None:
    first, second = run_ranks(2, fused, sizes, lean, timeout=180)
    launches = [[name for name in one if name != "wait_tensor"] for one in (first, second)]
    assert launches[0] == launches[1] != []
