"""Weights used in parts: whatever the view, one graph gathers them again in backward and keeps none from forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import mfsdp_fn as mf
from mfsdp_fn.graph import GATHER, WAIT, is_backward, is_view
from models import integers, mesh_of
from pool import run_ranks

Apply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LAYERS = 3
# Of a weight of (8, 4): every kind is read by the next one's backward.
PARTS: dict[str, Apply] = {
    "chunk": lambda x, w: sum((x @ part for part in w.chunk(2)), x),
    "split": lambda x, w: sum((x @ part for part in w.split([4, 4])), x),
    "unbind": lambda x, w: sum((x @ part for part in w.view(2, 4, 4)), x),
    "rows": lambda x, w: x @ w[:4] + x @ w[4:],
    "every other": lambda x, w: x @ w[::2] + x @ w[1::2],
    "diagonal": lambda x, w: (x @ w[:4]) * w.diagonal(),
    "unfold": lambda x, w: x @ w.unfold(0, 4, 4).select(0, 1),
    "swapped": lambda x, w: x @ w.movedim(0, 1)[:, :4] + x @ w.unflatten(0, (2, 4)).flatten(0, 1)[4:],
    "strides": lambda x, w: x @ w.as_strided((4, 4), (4, 1)),
}


def loss_of(kind: str) -> Callable[[mf.ShardState, torch.Tensor], torch.Tensor]:
    def loss_fn(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
        for unit in state.spec.units_matching("l.*"):
            x = PARTS[kind](x, mf.unshard(state[unit])["w"])
        return (x * x).sum()

    return loss_fn


def is_kept(wait: fx.Node) -> bool:
    """Whether backward reads what forward gathered, under any name."""
    names = [wait]
    for name in names:
        names += [user for user in name.users if is_view(user)]
    return any(is_backward(user) for name in names for user in name.users)


def gathered_again(rank: int, world: int) -> None:
    params: dict[str, Any] = {f"l.{i}.w": integers(8, 4, seed=i, high=1).requires_grad_() for i in range(LAYERS)}
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=("l.*",), precision=mf.MixedPrecisionPolicy(main=None))
    state, x = mf.shard(params, spec), integers(3, 4, seed=9 + rank)
    for kind in PARTS:
        torch._dynamo.reset()
        graphs: list[fx.Graph] = []

        def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(module.graph)  # noqa: B023  # called before the next round
            return module.forward

        transformed = mf.value_and_grad(loss_of(kind))
        loss, grads = mf.compile(transformed, backend=backend)(state, x)
        expected, expected_grads = transformed(state, x)
        assert torch.equal(loss, expected), kind
        for got, wanted in zip(grads.main, expected_grads.main, strict=True):
            assert torch.equal(got, wanted), kind
        (graph,) = graphs
        waits = [n for n in graph.nodes if n.target is WAIT and n.all_input_nodes[0].target is GATHER]
        # Nothing needs the gradient of the input, so only a diagonal makes backward read the first unit's weights.
        assert len(waits) == 2 * LAYERS - (kind != "diagonal"), kind
        assert not any(is_kept(wait) for wait in waits if not is_backward(wait)), kind


@pytest.mark.parametrize("world", [2])
def test_parts_of_weights_are_gathered_again(world: int) -> None:
    run_ranks(world, gathered_again, timeout=120)
