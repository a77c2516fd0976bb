"""Weight gradients multiplied straight into the packed buffer: the same numbers, and no product by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mfsdp_fn as mf
from mfsdp_fn.packing import OPERATION, PRODUCTS_OPERATION
from mfsdp_fn.products import compute_into_packed
from models import integers, mesh_of
from pool import run_ranks

MM = torch.ops.aten.mm.default
LOOKUP = torch.ops.aten.embedding_dense_backward.default


def tokens_loss(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
    """Products of every kind: of 3-D inputs, either way round, reshaped, tied, a bias, and one used twice."""
    a, b = mf.unshard(state["a"]), mf.unshard(state["b"])
    h = F.linear(x, a["w"], a["bias"]) * x
    h = h + x @ b["right"] + F.linear(h, b["flat"].view(4, 4))
    h = h + F.linear(x, b["twice"]) + F.linear(h, b["twice"])
    tokens = x[..., 0].abs().long()
    h = h + F.embedding(tokens, b["table"]) + F.embedding(tokens, b["padded"], padding_idx=1)
    h = h + F.embedding(tokens, b["narrow"]).sum()
    return (h * x + F.linear(x, a["tied"])).sum()


def weights(dtype: torch.dtype) -> dict[str, Any]:
    shapes = {
        "a.w": (4, 4),
        "a.bias": (4,),
        "b.right": (4, 4),
        "b.flat": (16,),
        "b.twice": (4, 4),
        "b.unused": (2, 3),
        "b.table": (3, 4),
        "b.padded": (3, 4),
        "b.narrow": (3, 0),
    }
    made = {
        name: integers(*shape, seed=n, dtype=dtype).requires_grad_() for n, (name, shape) in enumerate(shapes.items())
    }
    return {**made, "a.tied": made["a.w"]}


def is_mean(node: torch.fx.Node, world: int) -> bool:
    return node.target is torch.ops.aten.mul.Tensor and node.args[1:] == (1 / world,)


def rewritten(rank: int, world: int, dtype: torch.dtype, wire: torch.dtype) -> None:
    torch._dynamo.reset()
    params, x = weights(dtype), integers(2, 3, 4, seed=100 + rank, high=1, dtype=dtype)
    precision = mf.MixedPrecisionPolicy(main=None, grad=wire, reduce=wire)
    state = mf.shard(params, mf.plan(params, mesh_of(world), mf.zero3(), units=("a", "b"), precision=precision))
    found: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        changed = copy.deepcopy(module)
        found.append(compute_into_packed(changed.graph))
        changed.graph.lint()
        changed.recompile()
        before, after = ([n.target for n in m.graph.nodes] for m in (module, changed))
        assert before.count(OPERATION) == after.count(OPERATION) + after.count(PRODUCTS_OPERATION)
        assert before.count(MM) + before.count(LOOKUP) == after.count(MM) + after.count(LOOKUP) + found[0]
        assert after.count(LOOKUP) == (1 if found[0] else 3)
        # The mean over two ranks goes into the products; a third would round them.
        means = [sum(is_mean(node, world) for node in m.graph.nodes) for m in (module, changed)]
        assert means[0] == (2 if world > 1 else 0)
        assert means[0] - means[1] == (after.count(PRODUCTS_OPERATION) if world == 2 else 0)
        return changed.forward

    expected_loss, expected = mf.value_and_grad(tokens_loss)(state, x)
    loss, grads = mf.compile(mf.value_and_grad(tokens_loss), backend=backend)(state, x)
    assert torch.equal(loss, expected_loss)
    for got, wanted in zip(grads.main, expected.main, strict=True):
        assert torch.equal(got, wanted)
    # On a CPU products can't be written in another dtype: those stay as they were. `w` and `tied` are summed, `twice`
    # too, so that theirs are sums and no products.
    assert found == [4 if dtype == wire else 0]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("wire", [torch.float64, torch.float32])
def test_products_go_straight_into_the_packed_buffer(world: int, wire: torch.dtype) -> None:
    run_ranks(world, rewritten, torch.float64, wire, timeout=120)


def scaled(rank: int, world: int) -> None:
    """Partial gradients of 100 and -99 in fp16: times 1024 before their sum they would be infinite."""
    torch._dynamo.reset()
    params: Any = {"w": torch.ones(4, 4, dtype=torch.float16).requires_grad_()}
    state = mf.shard(params, mf.plan(params, mesh_of(world), mf.zero3(), grad_scale=float(world)))
    x = torch.full((1, 4), 100.0 if rank == 0 else -99.0, dtype=torch.float16)

    def step(state: mf.ShardState, x: torch.Tensor) -> mf.ShardState:
        _, grads = mf.value_and_grad(lambda state, x: (x @ mf.unshard(state)["w"]).sum())(state, x)
        return mf.tree_map(lambda grad: grad * 1024.0, grads)

    for grads in (step(state, x), mf.compile(step)(state, x)):
        assert torch.equal(grads.main[0], torch.full_like(grads.main[0], 1024.0))


def test_a_factor_of_the_users_is_not_taken_for_the_mean() -> None:
    run_ranks(2, scaled, timeout=120)
