"""Communicators made by ranks that are in different numbers of process groups."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_fn as mf
from mfsdp_fn.communicators import peers_of
from models import BLOCKS, EXACT, assert_equal, bilinear
from pool import run_ranks


def uneven(rank: int, world: int) -> None:
    """Rank r has made r groups of its own more than rank 0 when the library makes its first ones on a new mesh."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    params = bilinear()
    halves = mf.plan(params, mesh["inner"], mf.zero3(), units=BLOCKS, precision=EXACT)  # each half by itself
    assert_equal(mf.unshard(mf.shard(params, halves)), params)
    if rank % 2:
        dist.new_group([rank], use_local_synchronization=True)
    both = mf.plan(params, mesh, mf.hfsdp(), units=BLOCKS, precision=EXACT)
    assert_equal(mf.unshard(mf.shard(params, both)), params)
    if rank < 2:
        dist.new_group([rank], use_local_synchronization=True)
    peers = peers_of(mesh)
    assert peers.group is not None and sorted(peers.ranks) == list(range(world))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_different_numbers_of_groups_plan_together(world: int) -> None:
    run_ranks(world, uneven)
