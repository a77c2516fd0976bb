"""This rank's process group, device and mesh, and the mean of a number over all ranks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import launch


@contextlib.contextmanager
def world(shape: Sequence[int] | None) -> Iterator[DeviceMesh]:
    """Join the other ranks; the mesh has axes (outer, inner) if a shape of two is given, else one axis."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shape = tuple(shape or (ranks,))
    if math.prod(shape) != ranks:
        raise SystemExit(f"--mesh got {shape}; expected sizes whose product is the number of ranks, {ranks}.")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, launch.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=launch.store_url(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
        device_id=device if device.type == "cuda" else None,
    )
    names = ("dp",) if len(shape) == 1 else ("outer", "inner")
    yield init_device_mesh(device.type, shape, mesh_dim_names=names)
    # Not in a `finally`: after an error other ranks may be inside a collective, and this would wait for them.
    dist.destroy_process_group()


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a 0-D tensor over all ranks: the same number on each."""
    total = value.detach().to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
