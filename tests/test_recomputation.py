"""What one graph keeps from forward to backward: nothing that is cheap to compute again; results are the same."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import mfsdp_fn as mf
from mfsdp_fn import recomputation
from mfsdp_fn.graph import GATHER, is_backward, is_view
from models import integers, mesh_of
from pool import run_ranks

DIM, HIDDEN, LAYERS = 8, 16, 3
Loss = Callable[[mf.ShardState, torch.Tensor], torch.Tensor]
UNITS = ("l.*",)


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    shapes = {"up": (2 * HIDDEN, DIM), "down": (DIM, HIDDEN), "norm": (DIM,), "bias": (DIM,)}
    return {
        f"l.{layer}.{name}": (integers(*shape, seed=17 * layer + len(name), high=1) / 4).to(dtype).requires_grad_()
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }


def gated(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """A norm, a gated product, a residual sum: forward's cheap values are most of what autograd saves."""
    for unit in state.spec.units_matching("l.*"):
        w = mf.unshard(state[unit])
        gate, value = (F.rms_norm(x, (DIM,), w["norm"]) @ w["up"].T).chunk(2, -1)
        x = x + (F.silu(gate) * value) @ w["down"].T + w["bias"]
    return x.square().sum()


def dropping(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """Random numbers, and a cast down and up."""
    for unit in state.spec.units_matching("l.*"):
        w = mf.unshard(state[unit])
        x = F.dropout(torch.tanh(x @ w["up"][:DIM].T), 0.5).float().to(x.dtype) * w["norm"]
    return x.square().sum()


def chained(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """Elementwise from end to end: all of it could be computed again from its input, and then all would be alive."""
    x = x * mf.unshard(state["l.0"])["bias"]
    for _ in range(60):
        x = torch.sin(x)
    return x.sum()


def shifted(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """Sums with weights that backward doesn't read: it gathers none of them again."""
    for unit in state.spec.units_matching("l.*"):
        x = torch.tanh(x + mf.unshard(state[unit])["bias"])
    return x.sum()


def two_lives(state: mf.ShardState, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cheap value that leaves the call, too."""
    w = mf.unshard(state["l.0"])
    cheap = torch.tanh(x @ w["up"][:DIM].T)
    return (cheap * cheap).sum(), cheap


def spied(
    loss_fn: Callable[..., Any], state: mf.ShardState, x: torch.Tensor, *, aux: bool = False
) -> tuple[Any, fx.Graph]:
    """What the compiled call gives, and its graph."""
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch.manual_seed(5)
    result = mf.compile(mf.value_and_grad(loss_fn, has_aux=aux), backend=backend)(state, x)
    (graph,) = graphs
    return result, graph


def root(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def kept(graph: fx.Graph) -> Counter[str]:
    """By operator, the values of forward that backward reads."""
    found = {
        root(needed)
        for node in graph.nodes
        if is_backward(node)
        for needed in node.all_input_nodes
        if not is_backward(root(needed)) and root(needed).op == "call_function"
    }
    return Counter(str(node.target).split(".")[-2] for node in found if isinstance(node.meta["val"], torch.Tensor))


def most_alive(graph: fx.Graph) -> int:
    """The largest sum of bytes of what is computed and still read later."""
    nodes = list(graph.nodes)
    last = {root(needed): place for place, node in enumerate(nodes) for needed in node.all_input_nodes}
    alive = most = 0
    for place, node in enumerate(nodes):
        if node.op == "call_function" and not is_view(node) and isinstance(node.meta["val"], torch.Tensor):
            alive += node.meta["val"].nbytes
            most = max(most, alive)
            last.setdefault(node, place)
        for dead in [one for one, end in last.items() if end == place and isinstance(one.meta["val"], torch.Tensor)]:
            alive -= dead.meta["val"].nbytes if dead.op == "call_function" else 0
    return most


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    with mock.patch.object(recomputation, "recompute", lambda graph, regathered: 0):
        yield


def state_of(world: int, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[mf.ShardState, torch.Tensor]:
    params = weights(dtype)
    options = {"precision": mf.MixedPrecisionPolicy(main=None), "units": UNITS} | options
    state = mf.shard(params, mf.plan(params, mesh_of(world), mf.zero3(), **options))
    return state, integers(6, DIM, seed=3).to(dtype)


def assert_same(got: Any, wanted: Any) -> None:
    assert torch.equal(got[0], wanted[0])
    for a, b in zip(got[1].main, wanted[1].main, strict=True):
        assert torch.equal(a, b)


def trained(rank: int, world: int) -> None:
    for loss_fn in (gated, dropping, chained, shifted):
        for dtype in (torch.float64, torch.bfloat16) if loss_fn is gated else (torch.float64,):
            state, x = state_of(world, dtype)
            x = x + rank
            torch.manual_seed(5)
            eager = mf.value_and_grad(loss_fn)(state, x)
            result, graph = spied(loss_fn, state, x)
            assert_same(result, eager)
            with switched_off():
                plain, longer = spied(loss_fn, state, x)
            assert_same(plain, eager)
            gathers = [sum(node.target is GATHER for node in one.nodes) for one in (graph, longer)]
            assert gathers[0] == gathers[1]
            assert sum(kept(graph).values()) <= sum(kept(longer).values())


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_what_is_computed_again_is_the_same_and_costs_no_gather(world: int) -> None:
    run_ranks(world, trained, timeout=240)


def counted(rank: int, world: int) -> None:
    state, x = state_of(world)
    _, graph = spied(gated, state, x)
    with switched_off():
        _, longer = spied(gated, state, x)
    cheap = ("silu", "mul", "_to_copy", "neg", "sigmoid")
    assert all(kept(longer)[name] for name in ("silu", "mul"))
    assert not any(kept(graph)[name] for name in cheap), kept(graph)
    assert kept(graph)["mm"] == LAYERS  # gate and value, one product
    assert most_alive(graph) < most_alive(longer)
    products = [sum(node.target is torch.ops.aten.mm.default for node in one.nodes) for one in (graph, longer)]
    assert products[0] == products[1]


@pytest.mark.parametrize("world", [2])
def test_no_cheap_value_is_kept_and_no_product_is_made_twice(world: int) -> None:
    run_ranks(world, counted, timeout=120)


def drawn(rank: int, world: int) -> None:
    _, graph = spied(dropping, *state_of(world))
    random = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    assert len(random) == LAYERS


def test_random_numbers_are_drawn_once() -> None:
    run_ranks(1, drawn, timeout=120)


def lengths(rank: int, world: int) -> None:
    _, graph = spied(chained, *state_of(world))
    sines: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if is_backward(node) and node.target is torch.ops.aten.sin.default:
            sines[node] = 1 + sines.get(node.all_input_nodes[0], 0)
    assert 0 < max(sines.values()) <= recomputation._LONGEST
    assert 0 < kept(graph)["sin"] <= 60 // recomputation._LONGEST


def test_chains_of_what_is_computed_again_are_short() -> None:
    run_ranks(1, lengths, timeout=120)


def leaving(rank: int, world: int) -> None:
    state, x = state_of(world)
    (result, graph) = spied(two_lives, state, x, aux=True)
    (loss, aux), grads = result
    (wanted, wanted_aux), wanted_grads = mf.value_and_grad(two_lives, has_aux=True)(state, x)
    assert torch.equal(aux, wanted_aux)
    assert_same((loss, grads), (wanted, wanted_grads))
    assert sum(node.target is torch.ops.aten.tanh.default for node in graph.nodes) == 1  # it is kept in any case


def test_what_leaves_the_call_is_not_computed_again() -> None:
    run_ranks(2, leaving, timeout=120)


def two_batches(rank: int, world: int) -> None:
    state, x = state_of(world)

    def step(state: mf.ShardState, x: torch.Tensor) -> Any:
        _, first = mf.value_and_grad(gated, is_last_microbatch=False)(state, x)
        return mf.value_and_grad(gated, accumulate=first)(state, x + 1)

    torch._dynamo.reset()
    graphs: list[fx.Graph] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    assert_same(mf.compile(step, backend=backend)(state, x), step(state, x))
    (graph,) = graphs
    assert kept(graph)["mm"] == 2 * LAYERS
    assert not kept(graph)["silu"]


@pytest.mark.parametrize("world", [2])
def test_every_microbatch_has_its_own(world: int) -> None:
    run_ranks(world, two_batches, timeout=120)


def test_an_input_that_the_graph_writes_to_is_not_read_again() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cheap = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.call_function(torch.ops.aten.copy_.default, (x, cheap))
    late = graph.call_function(torch.ops.aten.mul.Tensor, (cheap, cheap))
    graph.output(late)
    late.meta["custom"] = {"phase": "backward"}
    for node in (x, cheap, late):
        node.meta["val"] = torch.zeros(4)
    assert recomputation.recompute(graph, {}) == 0
    assert late.all_input_nodes == [cheap]
