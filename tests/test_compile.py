"""Whole steps as one graph: what is in it, in which order, and that it computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from models import (
    EXACT,
    PRESETS,
    assert_equal,
    batch_of,
    bilinear,
    block,
    integers,
    mesh_of,
    plain_training,
    sharded_loss,
    trainable,
)
from pool import run_ranks

KINDS = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "reduce",
         "wait_tensor": "wait", "mm": "matmul", "addmm": "matmul"}  # fmt: skip


class Spy:
    """A backend that keeps what it was given: one list of kinds of nodes a graph."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(module.graph)
        return module.forward

    def kinds(self) -> list[str]:
        (graph,) = self.graphs
        names = [
            str(node.target).split(".")[-2] for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
        ]
        return [KINDS[name] for name in names if name in KINDS]

    def beside(self) -> list[tuple[str, int]]:
        """For each wait: what was launched, and the matmuls between launch and wait."""
        (graph,) = self.graphs
        nodes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        named = [(node, KINDS.get(str(node.target).split(".")[-2])) for node in nodes]
        place = {node: number for number, node in enumerate(nodes)}
        found = []
        for node, kind in named:
            if kind == "wait":
                between = named[place[node.args[0]] : place[node]]
                found.append((str(between[0][1]), sum(k == "matmul" for _, k in between)))
        return found


def make_step(
    micros: int = 1, *, donate: bool = False, factor: float = 1.0, loss_fn: Any = sharded_loss
) -> Callable[..., Any]:
    opt = mf.optim.sgd(lr=2.0**-4)

    def step(state: mf.ShardState, opt_state: Any, batches: list[Any]) -> Any:
        grads: Any = None
        loss = torch.zeros(())
        for number, batch in enumerate(batches):
            transformed = mf.value_and_grad(loss_fn, is_last_microbatch=number == micros - 1, accumulate=grads)
            loss, grads = transformed(state, batch, factor)
        state, opt_state = opt.step(grads, opt_state, state, donate=donate)
        return state, opt_state, loss

    step.init = opt.init  # type: ignore[attr-defined]
    return step


def run(state: mf.ShardState, step: Any, init: Any, rank: int, steps: int, micros: int) -> mf.ShardState:
    opt_state = init(state)
    for number in range(steps):
        state, opt_state, _ = step(state, opt_state, [batch_of(number, micro, rank) for micro in range(micros)])
    return state


def train_compiled(rank: int, world: int, shape: tuple[int, ...], presets: list[str]) -> None:
    for preset in presets:
        for micros, donate in ((1, True), (2, False)):
            torch._dynamo.reset()
            params = bilinear()
            step = make_step(micros, donate=donate, factor=float(world))
            spec = mf.plan(params, mesh_of(*shape), PRESETS[preset](), units=("blocks.*",), precision=EXACT)
            compiled = mf.compile(step, backend="aot_eager")
            state = run(mf.shard(params, spec), compiled, step.init, rank, 3, micros)  # type: ignore[attr-defined]
            assert_equal(mf.unshard(state), plain_training(params, world, steps=3, micros=micros), (preset, micros))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_compiled_training_equals_the_unsharded_model(world: int) -> None:
    run_ranks(world, train_compiled, (world,), ["ddp", "zero1", "zero2", "zero3"], timeout=240)


@pytest.mark.parametrize("preset", [pytest.param("hsdp", marks=pytest.mark.soak), "hfsdp"])
def test_compiled_training_on_two_axes(preset: str) -> None:
    run_ranks(4, train_compiled, (2, 2), [preset], timeout=240)


def headed_loss(state: mf.ShardState, batch: Any, factor: float) -> torch.Tensor:
    """`sharded_loss` with the embedding as head too: backward needs the root's weights, as it does the blocks'."""
    tokens, target = batch
    embed = mf.unshard(state[""])["embed"]
    e = embed[tokens]
    x = e
    for name in state.spec.units_matching("blocks.*"):
        x = block(mf.unshard(state[name]), e, x)
    return (x * target).sum() + (x @ embed.T).sum() * factor


def spied(
    rank: int, world: int, preset: str, steps: int, micros: int = 1, options: dict[str, Any] | None = None
) -> tuple[list[str], list[tuple[str, int]]]:
    torch._dynamo.reset()
    params, spy, step = bilinear(), Spy(), make_step(micros, donate=True, loss_fn=headed_loss)
    options = {"precision": EXACT, **(options or {})}
    frozen = options.pop("frozen", "")
    for name, param in params.items():
        param.requires_grad_(not frozen or not name.startswith(frozen))
    shape = (2, 2) if preset in ("hsdp", "hfsdp") else (world,)
    spec = mf.plan(params, mesh_of(*shape), PRESETS[preset](), units=("blocks.*",), **options)
    run(mf.shard(params, spec), mf.compile(step, backend=spy), step.init, rank, steps, micros)  # type: ignore[attr-defined]
    return spy.kinds(), spy.beside()  # fails unless there is exactly one graph


@pytest.mark.parametrize(
    ("preset", "gathers", "scatters", "reduces"),
    [("ddp", 0, 0, 4), ("zero1", 4, 4, 0), ("zero2", 4, 4, 0), ("zero3", 8, 4, 0)],
)
def test_one_graph_has_the_collectives_of_the_table(preset: str, gathers: int, scatters: int, reduces: int) -> None:
    for kinds, _ in run_ranks(2, spied, preset, 20, timeout=120):
        count = Counter(kinds)
        assert (count["gather"], count["scatter"], count["reduce"]) == (gathers, scatters, reduces)
        # Forward and both sides of backward of each of the three blocks and of the head.
        assert count["matmul"] == 12
        assert count["wait"] == gathers + scatters + reduces


CAST = {"precision": mf.MixedPrecisionPolicy(compute=torch.float32, main=torch.float64, grad=torch.float64),
        "runtime": mf.RuntimePolicy(store_compute_weights=False)}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "options", "gathers", "scatters", "reduces"),
    [
        ("ddp", {}, 0, 0, 4),
        ("zero1", {}, 4, 4, 0),
        ("zero2", {}, 4, 12, 0),
        ("zero3", {}, 24, 12, 0),
        ("zero3", {"shard_layout": "unpadded"}, 24, 12, 0),
        ("zero3", CAST, 24, 12, 0),
        ("zero3", {"frozen": "blocks.1"}, 24, 9, 0),
        ("zero3", {"runtime": mf.RuntimePolicy(keep_gathered=("", "blocks.1"))}, 18, 12, 0),
    ],
)
def test_every_microbatch_of_one_graph_gathers_again(
    preset: str, options: dict[str, Any], gathers: int, scatters: int, reduces: int
) -> None:
    for kinds, _ in run_ranks(2, spied, preset, 2, 3, options, timeout=120):
        count = Counter(kinds)
        assert (count["gather"], count["scatter"], count["reduce"]) == (gathers, scatters, reduces)


@pytest.mark.parametrize(
    ("preset", "gathers", "scatters", "reduces"),
    # A microbatch: 2 gathers and 1 reduce-scatter of each of 4 units over the inner axis. A step: 1 over the outer.
    [("hsdp", 16, 8, 4), ("hfsdp", 16 + 4, 8 + 4, 0)],
)
def test_two_axes_in_one_graph(preset: str, gathers: int, scatters: int, reduces: int) -> None:
    for kinds, _ in run_ranks(4, spied, preset, 2, 2, timeout=120):
        count = Counter(kinds)
        assert (count["gather"], count["scatter"], count["reduce"]) == (gathers, scatters, reduces)


def test_launches_stand_ahead_of_compute_and_waits_behind_it() -> None:
    kinds, beside = run_ranks(2, spied, "zero3", 1)[0]
    ahead = 0
    for kind in kinds[: kinds.index("scatter")]:
        ahead += (kind == "gather") - (kind == "wait")
        assert ahead <= 2  # the one that is waited for next, and one more
    gathers = [matmuls for launched, matmuls in beside if launched == "gather"]
    # The root's and the first block's gathers have nothing before them to run beside; each later one has a matmul,
    # in backward too, where the head's comes first.
    assert gathers[:2] == [0, 0]
    assert all(matmuls >= 1 for matmuls in gathers[2:])
    scatters = [matmuls for launched, matmuls in beside if launched == "scatter"]
    # Beside the first block's reduction runs the embedding's backward, which is no matmul; the root's is the last.
    assert all(matmuls >= 1 for matmuls in scatters[:-2])


def odd_models(rank: int, world: int) -> None:
    """A frozen unit, a tied pair, mixed dtypes, a unit used twice: compiled equals eager bit for bit."""
    w = integers(4, 4, seed=3)
    params: dict[str, Any] = {
        "a.w": w.clone().requires_grad_(),
        "a.tied": None,
        "b.w": integers(4, 4, seed=4),
        "c.w": integers(4, 4, seed=5, dtype=torch.float32).requires_grad_(),
        "c.v": integers(4, 4, seed=6).requires_grad_(),
    }
    params["a.tied"] = params["a.w"]
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=("a", "b", "c"), precision=EXACT)
    state = mf.shard(params, spec)
    x = integers(3, 4, seed=10 + rank)

    def loss(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
        a = mf.unshard(state["a"])
        h = (x @ a["w"]) * x + x @ a["tied"]
        h = h + x @ mf.unshard(state["b"])["w"]
        c = mf.unshard(state["c"])
        h = (x.float() @ c["w"]).double() + x @ c["v"] + h
        return (h + x @ mf.unshard(state["b"])["w"]).sum()

    torch._dynamo.reset()
    transformed = mf.value_and_grad(loss)
    value, grads = mf.compile(transformed, backend="aot_eager")(state, x)
    expected, expected_grads = transformed(state, x)
    assert torch.equal(value, expected)
    for got, wanted in zip(grads.main, expected_grads.main, strict=True):
        assert got.shape == wanted.shape
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("world", [1, 2])
def test_odd_models_compile_to_the_same(world: int) -> None:
    run_ranks(world, odd_models, timeout=120)


def test_compile_is_a_decorator_and_sets_nothing_for_good() -> None:
    before = torch._dynamo.config.trace_autograd_ops
    params = trainable({"w": integers(2, 2, seed=1)})
    spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), precision=EXACT)

    @mf.compile(backend="aot_eager")
    def step(state: mf.ShardState) -> Any:
        return mf.value_and_grad(lambda s: mf.unshard(s)["w"].square().sum())(state)

    loss, grads = step(mf.shard(params, spec))
    assert torch.equal(grads.main[0], 2 * params["w"].detach().flatten())
    assert loss.item() == params["w"].square().sum().item()
    assert torch._dynamo.config.trace_autograd_ops == before


def test_a_mode_that_is_not_served_is_refused() -> None:
    with pytest.raises(mf.MfsdpError, match=r"`mode` got 'reduce-overhead'; expected no mode, or 'default'"):
        mf.compile(lambda: None, mode="reduce-overhead")


def aux_of_a_compiled_step(rank: int, world_size: int) -> None:
    params = {"w": torch.eye(2).requires_grad_()}
    state = mf.shard(params, mf.plan(params, mesh_of(world_size), mf.zero3()))

    def loss_fn(state: mf.ShardState) -> tuple[torch.Tensor, dict[str, Any]]:
        total = mf.unshard(state)["w"].sum()
        return total, {"twice": 2 * total, "list": [total, 3]}

    run = mf.value_and_grad(loss_fn, has_aux=True)
    for step in (run, mf.compile(lambda state: run(state), backend="aot_eager")):
        (loss, aux), grads = step(state)
        assert loss.item() == 2 and aux["twice"].item() == 4 and aux["list"][0].item() == 2 and aux["list"][1] == 3
        assert not any(t.requires_grad for t in (loss, aux["twice"], aux["list"][0]))
        assert torch.equal(grads.main[0], torch.ones_like(grads.main[0]))


def test_aux_may_depend_on_the_weights() -> None:
    run_ranks(2, aux_of_a_compiled_step)


def vjp_in_a_compiled_step(rank: int, world_size: int) -> None:
    params = {"w": torch.eye(2).requires_grad_()}
    state = mf.shard(params, mf.plan(params, mesh_of(world_size), mf.zero3()))

    def step(state: mf.ShardState) -> Any:
        out, pullback = mf.vjp(lambda state: mf.unshard(state)["w"].sum(), state)
        return out, pullback(torch.ones(()))[0]

    with pytest.raises(Exception, match="`fn` got vjp inside a compiled step; expected an eager call"):
        mf.compile(step, backend="aot_eager")(state)


def test_vjp_in_a_compiled_step_is_refused() -> None:
    run_ranks(1, vjp_in_a_compiled_step)
