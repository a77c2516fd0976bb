"""Helpers for tests of code that uses this library."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextlib.contextmanager
def single_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, on the CPU; made and torn down here.

    >>> with single_rank() as mesh:
    ...     mesh.size()
    1
    """
    with tempfile.TemporaryDirectory() as folder:
        # Public and documented, but imported by torch.distributed without being in an `__all__`.
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        finally:
            dist.destroy_process_group()
