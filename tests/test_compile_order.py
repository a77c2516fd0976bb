"""Every rank's graph launches the same collectives in the same order, whatever the rank holds of the model.

A rank without elements of a unit updates nothing there, so its graph differs. A pass that moves launches as far as
their inputs allow would move them differently there, and ranks would wait for each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from models import EXACT, PRESETS, batch_of, bilinear, integers, mesh_of, sharded_loss
from pool import run_ranks

LAUNCHES = "all_gather_into_tensor|reduce_scatter_tensor|all_reduce|all_to_all_single|broadcast"


def a_step(optimizer: mf.optim.Optimizer, micros: int, steps: int) -> Callable[..., Any]:
    """`steps` whole steps in one call, each with clipping and `micros` microbatches."""

    def step(state: mf.ShardState, opt_state: Any, batches: list[Any]) -> Any:
        for _ in range(steps):
            grads: Any = None
            for number, batch in enumerate(batches):
                grad_fn = mf.value_and_grad(sharded_loss, is_last_microbatch=number == micros - 1, accumulate=grads)
                _, grads = grad_fn(state, batch)
            grads, _ = mf.optim.clip_by_global_norm(grads, 1.0)
            state, opt_state = optimizer.step(grads, opt_state, state, donate=True)
        return state, opt_state

    return step


def launches(
    rank: int, world: int, preset: str, shape: tuple[int, ...], optimizer: str, backend: str, options: dict[str, Any]
) -> list[tuple[str, int]]:
    """Kind and axis of each collective, in the order of the compiled code; axes in the order of their first use."""
    torch._dynamo.reset()
    micros = 1
    params: dict[str, Any] = bilinear()
    # Smaller than the world, so that some rank holds none of it: a vector of one, a scalar, an empty matrix.
    extra = {"blocks.3.w": integers(1, 4, seed=7), "blocks.3.b": integers(4, seed=8)}
    params |= {name: value.requires_grad_() for name, value in extra.items()}
    spec = mf.plan(params, mesh_of(*shape), PRESETS[preset](), units=("blocks.*",), precision=EXACT, **options)
    adamw = mf.optim.adamw(lr=2.0**-4)
    opt = mf.optim.muon(lr=2.0**-4, fallback=adamw) if optimizer == "muon" else adamw
    state = mf.shard(params, spec)
    args = state, opt.init(state), [batch_of(0, micro, rank) for micro in range(micros)]
    step = a_step(opt, micros, 2)
    if backend == "inductor":
        from torch._inductor.utils import run_and_get_code

        _, (source,) = run_and_get_code(mf.compile(step), *args)
        found = re.findall(rf"_c10d_functional\.({LAUNCHES})_?\.default\(.*'([^']*)'\)", source)
    else:
        graphs: list[torch.fx.Graph] = []

        def spy(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(module.graph)
            return module.forward

        mf.compile(step, backend=spy)(*args)
        (graph,) = graphs
        named = [(re.search(rf"_c10d_functional\.({LAUNCHES})\.", f"{node.target}"), node) for node in graph.nodes]
        found = [(match[1], node.args[-1]) for match, node in named if match]
    axes: list[str] = []
    for _, name in found:
        if name not in axes:
            axes.append(name)
    return [(kind, axes.index(name)) for kind, name in found]


CASES = [
    ("hfsdp", (2, 2), "adamw", {}),
    pytest.param("hfsdp", (2, 2), "adamw", {"shard_layout": "unpadded"}, marks=pytest.mark.soak),
    ("zero3", (3,), "muon", {}),
]


@pytest.mark.parametrize(("preset", "shape", "optimizer", "options"), CASES)
def test_every_rank_launches_in_one_order(
    preset: str, shape: tuple[int, ...], optimizer: str, options: dict[str, Any]
) -> None:
    orders = run_ranks(math.prod(shape), launches, preset, shape, optimizer, "spy", options, timeout=200)
    assert len({kind for kind, _ in orders[0]}) >= 2
    for order in orders[1:]:
        assert order == orders[0]


@pytest.mark.soak
@pytest.mark.parametrize(("preset", "shape", "optimizer", "options"), CASES)
def test_every_rank_launches_in_one_order_after_inductor(
    preset: str, shape: tuple[int, ...], optimizer: str, options: dict[str, Any]
) -> None:
    orders = run_ranks(math.prod(shape), launches, preset, shape, optimizer, "inductor", options, timeout=500)
    for order in orders:
        assert order == orders[0]
        assert len(order) > 20


def launches_of_two_steps(rank: int, world: int, kept: tuple[str, ...]) -> list[str]:
    """Backward doesn't need these weights: a step's last gather is one of forward, as is the next step's first."""
    torch._dynamo.reset()
    params = {f"u{i}.a": integers(1, 4, seed=i).requires_grad_() for i in range(2)}  # one row: a rank has none of it
    runtime = mf.RuntimePolicy(keep_gathered=kept)
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=("u*",), precision=EXACT, runtime=runtime)
    opt = mf.optim.sgd(lr=0.5)

    def loss_fn(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
        parts = [mf.unshard(state[unit])["a"] for unit in ("u0", "u1")]
        return sum(((part * part if kept else part) * x).sum() for part in parts)  # type: ignore[return-value]

    def step(state: mf.ShardState, opt_state: Any, x: torch.Tensor) -> Any:
        for _ in range(2):
            _, grads = mf.value_and_grad(loss_fn)(state, x)
            state, opt_state = opt.step(grads, opt_state, state)
        return state, opt_state

    graphs: list[torch.fx.Graph] = []

    def spy(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    state, x = mf.shard(params, spec), torch.ones((), dtype=torch.float64)
    mf.compile(step, backend=spy)(state, opt.init(state), x)
    found = [re.search(rf"_c10d_functional\.({LAUNCHES})\.", f"{node.target}") for node in graphs[0].nodes]
    return [match[1] for match in found if match]


@pytest.mark.parametrize("kept", [(), ("u*",)])
def test_no_launch_moves_ahead_of_the_update_before_it(kept: tuple[str, ...]) -> None:
    first, second = run_ranks(2, launches_of_two_steps, kept, timeout=120)
    assert first == second == ["all_gather_into_tensor", "all_gather_into_tensor", *["reduce_scatter_tensor"] * 2] * 2
