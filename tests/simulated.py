"""Run a pool's function on simulated ranks: as many as it takes, where real processes are few."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mfsdp_fn.testing import SimulatedMesh, simulate

T = TypeVar("T")

_local = threading.local()  # a simulated rank is a thread


def run_simulated(world_size: int, fn: Callable[..., T], *args: object) -> list[T]:
    """`fn(rank, world_size, *args)` on every simulated rank, as `run_ranks` does on real ones."""

    def on_rank(mesh: SimulatedMesh) -> T:
        _local.mesh = mesh
        return fn(mesh.get_rank(), world_size, *args)

    return simulate(world_size)(on_rank)


def here() -> SimulatedMesh | None:
    """The caller's mesh of all ranks; None on a real rank."""
    return getattr(_local, "mesh", None)
