"""Whole steps and parts of them, compiled: equal to eager bit for bit with `aot_eager`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf
from models import (
    BLOCKS,
    EXACT,
    ROUNDS_ALPHA,
    assert_equal,
    batch_of,
    bilinear,
    block,
    integers,
    mesh_of,
    plain_loss,
    plain_training,
    sgd,
)
from pool import run_ranks

FP32 = mf.MixedPrecisionPolicy(compute=torch.bfloat16)


def mlp(depth: int = 3) -> dict[str, torch.Tensor]:
    """Matrices of rows that straddle two and three ranks, and a bias."""
    generator = torch.Generator().manual_seed(3)
    params = {}
    for i in range(depth):
        params[f"blocks.{i}.up"] = torch.randn(14, 6, generator=generator).requires_grad_()
        params[f"blocks.{i}.down"] = torch.randn(6, 14, generator=generator).requires_grad_()
        params[f"blocks.{i}.bias"] = torch.randn(6, generator=generator).requires_grad_()
    return params


def mlp_block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["up"].T) @ p["down"].T + p["bias"]


def mlp_loss(state: mf.ShardState, x: torch.Tensor, call: Callable[..., torch.Tensor] = mlp_block) -> torch.Tensor:
    for name in state.spec.units_matching("blocks.*"):
        x = call(mf.unshard(state[name]), x)
    return x.square().mean(dtype=torch.float64)


OPTIMIZERS = {
    "adamw": lambda: mf.optim.adamw(lr=0.01),
    "sgd": lambda: mf.optim.sgd(lr=0.1, momentum=0.9),
    "muon": lambda: mf.optim.muon(lr=0.02, fallback=mf.optim.sgd(lr=0.01)),
}


def whole_steps(rank: int, world: int, optimizer: str, donate: bool, preset: str, shape: tuple[int, ...]) -> int:
    """Steps as the README writes them: accumulation, clipping, update. Gives the number of graphs compiled."""
    torch._dynamo.reset()
    params, opt = mlp(), OPTIMIZERS[optimizer]()
    precision, dtype = (EXACT, torch.float64) if optimizer == "adamw" else (FP32, torch.bfloat16)
    params = {
        name: value.detach().to(torch.float64 if optimizer == "adamw" else torch.float32).requires_grad_()
        for name, value in params.items()
    }
    spec = mf.plan(params, mesh_of(*shape), getattr(mf, preset)(), units=BLOCKS, precision=precision)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(state: mf.ShardState, opt_state: Any, batches: tuple[torch.Tensor, torch.Tensor]) -> Any:
        _, grads = mf.value_and_grad(mlp_loss, is_last_microbatch=False)(state, batches[0])
        loss, grads = mf.value_and_grad(mlp_loss, accumulate=grads)(state, batches[1])
        grads, norm = mf.optim.clip_by_global_norm(grads, 0.5)
        state, opt_state = opt.step(grads, opt_state, state, donate=donate)
        return state, opt_state, loss, norm

    results = []
    for form in (step, mf.compile(step, backend=counter)):
        state = mf.shard(params, spec)
        opt_state, seen = opt.init(state), []
        for number in range(20 if donate else 3):
            generator = torch.Generator().manual_seed(10 * number + rank)
            data = torch.randn(2, 4, 6, generator=generator).to(dtype)
            batches = (data[0], data[1])
            state, opt_state, loss, norm = form(state, opt_state, batches)
            seen.append((loss, norm))
            if number == 2:
                results.append((seen, [main.clone() for main in state.main]))
    (seen, mains), (compiled_seen, compiled_mains) = results
    # AdamW's bias corrections are Python numbers in eager code; in a graph they come from the fp32 step counter.
    tolerance = 1e-5 if optimizer == "adamw" else 0.0
    if ROUNDS_ALPHA:  # Newton-Schulz in bf16 makes a last bit of fp32 a last bit of bf16
        tolerance = {"adamw": 1e-5, "sgd": 1e-6, "muon": 1e-2}[optimizer]
    for pair, compiled_pair in zip(seen[:3], compiled_seen[:3], strict=True):
        torch.testing.assert_close(compiled_pair, pair, rtol=tolerance, atol=tolerance)
    for main, compiled_main in zip(mains, compiled_mains, strict=True):
        torch.testing.assert_close(compiled_main, main, rtol=tolerance, atol=tolerance)
    return counter.frame_count


@pytest.mark.parametrize(
    ("optimizer", "donate", "preset", "shape"),
    [
        ("adamw", True, "zero3", (2,)),
        ("adamw", False, "zero1", (2,)),
        ("sgd", True, "zero2", (2,)),
        ("muon", True, "zero3", (2,)),
        ("muon", False, "hsdp", (2, 2)),
        ("adamw", True, "hfsdp", (2, 2)),
    ],
)
def test_whole_steps_equal_eager_in_one_graph(
    optimizer: str, donate: bool, preset: str, shape: tuple[int, ...]
) -> None:
    world = 4 if len(shape) == 2 else 2
    found = run_ranks(world, whole_steps, optimizer, donate, preset, shape, timeout=240)
    assert found == [1] * world  # one graph, and the same one in every step


def checkpointed(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(mlp_block, p, x, use_reentrant=False)  # type: ignore[return-value]


def with_checkpoints(rank: int, world: int) -> None:
    torch._dynamo.reset()
    params = mlp()
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=BLOCKS, precision=FP32)
    state, x = mf.shard(params, spec), torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).bfloat16()

    def loss(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
        return mlp_loss(state, x, checkpointed)

    value, grads = mf.value_and_grad(loss)(state, x)
    compiled_value, compiled_grads = mf.compile(mf.value_and_grad(loss), backend="aot_eager")(state, x)
    assert torch.equal(value, compiled_value)
    for a, b in zip(grads.main, compiled_grads.main, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("world", [1, 2])
def test_activation_checkpoints_in_a_graph(world: int) -> None:
    run_ranks(world, with_checkpoints, timeout=120)


def parts_compiled(rank: int, world: int) -> None:
    """A compiled block gets views of one flat buffer; a compiled loss gathers through the eager tape."""
    torch._dynamo.reset()
    params = bilinear()
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=BLOCKS, precision=EXACT)
    compiled_block = torch.compile(block, backend="aot_eager", fullgraph=True)

    def loss_of(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def loss(state: mf.ShardState, batch: Any, factor: float) -> torch.Tensor:
            tokens, target = batch
            e = mf.unshard(state[""])["embed"][tokens]
            x = e
            for name in spec.units_matching("blocks.*"):
                x = call(mf.unshard(state[name]), e, x)
            return (x * target).sum() * factor

        return loss

    expected = plain_training(params, world, steps=3, micros=1)
    compiled_rest = torch.compile(plain_loss, backend="aot_eager", fullgraph=True)
    forms = (
        loss_of(compiled_block),
        lambda state, batch, factor: compiled_rest(mf.unshard(state), batch, factor),
        torch.compile(loss_of(block), backend="aot_eager"),  # breaks at each unshard
    )
    # Dynamo asks every input for its `.grad`.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
    for form in forms:
        state, transformed = mf.shard(params, spec), mf.value_and_grad(form)
        for step in range(3):
            state = sgd(state, transformed(state, batch_of(step, 0, rank), float(world))[1])
        assert_equal(mf.unshard(state), expected, form)


@pytest.mark.parametrize("world", [1, 2])
def test_compiled_parts_with_the_eager_tape(world: int) -> None:
    run_ranks(world, parts_compiled, timeout=120)


def test_a_compiled_loss_refuses_fullgraph_by_name() -> None:
    params = {"w": integers(2, 2, seed=1).requires_grad_()}
    spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), precision=EXACT)
    loss = torch.compile(lambda state: mf.unshard(state)["w"].sum(), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"compile the whole of it with mf\.compile"):
        mf.value_and_grad(loss)(mf.shard(params, spec))
