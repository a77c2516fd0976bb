"""The same model gives the same weights under every layout: padded, ragged, in blocks, whole tensors on owners."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from layouts import LAYOUTS, ONE_AXIS, TWO_AXES, planned, rich, rich_plain, rich_sharded
from models import Params, accumulated, assert_equal, batch_of, plain_training, sgd
from pool import run_ranks

MESHES = {1: ((1,), (1, 1)), 2: ((2,), (2, 1), (1, 2)), 3: ((3,),), 4: ((4,), (2, 2), (4, 1), (1, 4))}


@functools.cache
def expected(world: int) -> Params:
    """Three steps of two microbatches without sharding; a frozen tensor stays, a tied one counts once."""
    params = rich()
    frozen = {name: value for name, value in params.items() if not value.requires_grad}
    free = {name: value for name, value in params.items() if name not in (*frozen, "blocks.0.tied")}

    def loss(now: Params, batch: Any, factor: float) -> torch.Tensor:
        return rich_plain(now | frozen, batch, factor)

    trained = plain_training(free, world, steps=3, micros=2, loss=loss) | frozen
    trained["blocks.0.tied"] = trained["blocks.0.w"]
    return {name: trained[name].detach() for name in params}


def mean_options(world: int) -> tuple[float, dict[str, Any]]:
    """A factor for the loss and options of the plan with which the mean over ranks is exact."""
    return (1.0, {"grad_scale": 3.0}) if world == 3 else (float(world), {})


def train(rank: int, world: int, layout: str) -> None:
    factor, options = mean_options(world)
    for shape in MESHES[world]:
        for name, placements in (ONE_AXIS if len(shape) == 1 else TWO_AXES).items():
            if 1 in shape and name not in ("zero3", "hsdp", "hfsdp"):
                continue  # all of them on (2, 2) and one axis
            params = rich()
            state = mf.shard(params, planned(layout, placements, params, *shape, **options))
            for step in range(3):
                batches = [batch_of(step, micro, rank) for micro in range(2)]
                state = sgd(state, accumulated(rich_sharded, state, batches, factor))
            assert_equal(mf.unshard(state), expected(world), (layout, shape, name))


@pytest.mark.parametrize("world", sorted(MESHES))
# Blocks of one row are plain rows, and blocks of four differ from blocks of two by a number.
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.soak) if name in ("block 1", "block 4") else name for name in LAYOUTS],
)
def test_the_same_model_gives_the_same_weights_under_every_layout(layout: str, world: int) -> None:
    run_ranks(world, train, layout)
