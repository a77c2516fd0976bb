"""Whole steps as one graph under ragged layouts: uneven gathers and reductions, and what backward gathers again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from layouts import planned, rich, rich_sharded
from models import EXACT, assert_equal, batch_of, bilinear
from pool import run_ranks
from test_compile import Spy, headed_loss, make_step, run
from test_layout_training import expected


def train(rank: int, world: int, layout: str) -> None:
    for shape, placements in (((2,), mf.zero3()), ((2, 1), mf.hfsdp())):
        torch._dynamo.reset()
        params, step = rich(), make_step(2, donate=True, factor=float(world), loss_fn=rich_sharded)
        spec = planned(layout, placements, params, *shape)
        compiled = mf.compile(step, backend="aot_eager")
        state = run(mf.shard(params, spec), compiled, step.init, rank, 3, 2)  # type: ignore[attr-defined]
        assert_equal(mf.unshard(state), expected(world), (layout, shape))


@pytest.mark.parametrize("layout", ["unpadded", "tensor"])
def test_compiled_training_equals_the_unsharded_model(layout: str) -> None:
    run_ranks(2, train, layout, timeout=300)


def spied(rank: int, world: int, layout: str) -> tuple[list[str], int]:
    """Kinds of nodes; and how many joined buffers of the forward the backward reads."""
    torch._dynamo.reset()
    params, spy, step = bilinear(), Spy(), make_step(donate=True, loss_fn=headed_loss)
    spec = planned(layout, mf.zero3(), params, world, precision=EXACT)
    run(mf.shard(params, spec), mf.compile(step, backend=spy), step.init, rank, 1, 1)  # type: ignore[attr-defined]
    return spy.kinds(), len(spy.graphs)


@pytest.mark.parametrize("layout", ["unpadded", "tensor"])
def test_backward_gathers_uneven_weights_again(layout: str) -> None:
    for kinds, graphs in run_ranks(2, spied, layout, timeout=120):
        assert graphs == 1
        assert (kinds.count("gather"), kinds.count("scatter"), kinds.count("matmul")) == (8, 4, 12)
