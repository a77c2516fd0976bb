"""The ranks of a benchmark: torchrun's, or this process alone; on GPUs over NCCL, else on the CPU over Gloo."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ALONE = "one rank: overhead and memory, nothing is communicated"


@dataclasses.dataclass(frozen=True)
class World:
    """This rank and the others."""

    device: torch.device
    mesh: DeviceMesh
    rank: int
    size: int

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def most(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        found = torch.tensor(float(number), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def describe(self) -> str:
        kind = torch.cuda.get_device_name() if self.cuda else "CPU"
        return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {self.size} x {kind}"


def begin() -> World:
    """Join the other ranks."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not there on every machine
    if cuda:
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"backend": "nccl" if cuda else "gloo", "timeout": datetime.timedelta(minutes=5)}
    if cuda:
        options["device_id"] = device
    if "RANK" not in os.environ:  # not under torchrun
        store = os.path.join(tempfile.mkdtemp(), "store")
        options |= {"init_method": f"file://{store}", "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return World(device, mesh, dist.get_rank(), dist.get_world_size())


def end() -> None:
    dist.destroy_process_group()
