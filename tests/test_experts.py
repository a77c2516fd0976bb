"""Experts on a data-parallel mesh of their own, beside dense parameters: the full batch on one rank, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import experts
import mfsdp_fn as mf
from experts import ON_EXPERTS, made, part, whole
from models import EXACT, PRESETS, accumulated, assert_equal, batch_of, mesh_of, plain_training, sgd, trainable
from pool import run_ranks

# Placements of dense units over a mesh, and of experts.
MIXES = [
    ("zero3", "zero3", 1),
    ("zero1", "zero1", 1),
    ("zero2", "zero2", 1),
    ("hsdp", "zero3", 2),
    ("hfsdp", "zero1", 2),
    ("ddp", "zero3", 1),
    ("zero3", "ddp", 1),
]


def train(rank: int, world: int, ep: int, mixes: list[tuple[str, str, int]]) -> None:
    expected = plain_training(whole(), world, steps=3, micros=2, loss=experts.plain_loss)
    for dense, on_experts, axes in mixes:
        shape = (world,) if axes == 1 else (2, world // 2)
        for options in ({}, {"shard_layout": "unpadded"}):
            state, group = made(PRESETS[dense], PRESETS[on_experts], shape, ep, **options)
            for step in range(3):
                batches: list[Any] = [batch_of(step, micro, rank) for micro in range(2)]
                state = sgd(state, accumulated(experts.sharded_loss, state, batches, float(world), group))
            place = experts.expert_mesh(ep, world // ep).get_local_rank("ep")
            assert_equal(mf.unshard(state), part(expected, place, ep), (dense, on_experts, ep))


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (4, 1)])
def test_training_equals_the_full_batch(world: int, ep: int) -> None:
    mixes = [mix for mix in MIXES if world > 1 or mix[2] == 1]
    run_ranks(world, train, ep, mixes if (world, ep) == (4, 2) else mixes[::3])
