"""Whole steps as one graph under ragged layouts: uneven gathers and reductions, and what backward gathers again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from layouts import planned, rich, rich_sharded
from models import EXACT, assert_equal, bilinear
from pool import run_ranks
from test_compile import Spy, headed_loss, make_step, run
from test_layout_training import expected


def train(rank: int, world: int, layout: str, shape: tuple[int, ...], placements: mf.Placements) -> None:
    torch._dynamo.reset()
    params, step = rich(), make_step(2, donate=True, factor=float(world), loss_fn=rich_sharded)
    spec = planned(layout, placements, params, *shape)
    compiled = mf.compile(step, backend="aot_eager")
    state = run(mf.shard(params, spec), compiled, step.init, rank, 3, 2)  # type: ignore[attr-defined]
    assert_equal(mf.unshard(state), expected(world), (layout, shape))


@pytest.mark.parametrize(
    ("layout", "shape", "placements"), [("unpadded", (2, 1), mf.hfsdp()), ("tensor", (2,), mf.zero3())]
)
def test_compiled_training_equals_the_unsharded_model(layout: str, shape: Any, placements: mf.Placements) -> None:
    run_ranks(2, train, layout, shape, placements, timeout=300)


def spied(rank: int, world: int) -> list[str]:
    torch._dynamo.reset()
    params, spy, step = bilinear(), Spy(), make_step(donate=True, loss_fn=headed_loss)
    spec = planned("tensor", mf.zero3(), params, world, precision=EXACT)
    run(mf.shard(params, spec), mf.compile(step, backend=spy), step.init, rank, 1, 1)  # type: ignore[attr-defined]
    return spy.kinds()  # fails unless there is exactly one graph


def test_backward_gathers_uneven_weights_again() -> None:
    for kinds in run_ranks(2, spied, timeout=120):
        assert (kinds.count("gather"), kinds.count("scatter"), kinds.count("matmul")) == (8, 4, 12)
