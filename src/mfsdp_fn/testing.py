"""Helpers for tests of code that uses this library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .checks import check_function
from .errors import SimulationError
from .simulated_mesh import SimulatedMesh, check_shape
from .simulation import Collective, World, check_alone

__all__ = ["Collective", "SimulatedMesh", "Simulation", "simulate", "single_rank"]

P = ParamSpec("P")
T = TypeVar("T")


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


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` returns: call it with a function to run that on every rank, any number of times."""

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __call__(self, fn: Callable[Concatenate[SimulatedMesh, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """``fn(mesh, *args, **kwargs)`` on every rank; what each returned, by rank.

        Raises:
            Exception: what `fn` raised on the first rank that did, with a note that names the rank.
            OrderError: ranks that launch different collectives, or wait for one that others never launch.
            SimulationError: something that can't be simulated, or no function.
        """
        check_function("fn", fn, "simulate(2)(lambda mesh: mesh.get_rank())", SimulationError)
        check_alone()
        world = World(math.prod(self.shape))
        table = torch.arange(math.prod(self.shape)).view(self.shape)
        meshes = [SimulatedMesh(world, table, self.names, rank) for rank in range(table.numel())]
        results = world.turns.run([functools.partial(fn, mesh, *args, **kwargs) for mesh in meshes])
        world.check_ended()
        return results


def simulate(world_size: int | tuple[int, ...], names: tuple[str, ...] | None = None) -> Simulation:
    """Simulated ranks in this process, on the CPU: to test a step, a layout or a transform at any world size.

    ``simulate(4)(fn)`` calls ``fn(mesh)`` once a rank, with that rank's mesh, and gives what they returned as a list.
    Inside, everything works that works over a `DeviceMesh` of CPUs, unchanged: `plan`, `shard`, `unshard`, `reduce`,
    `value_and_grad`, `vjp`, optimizers, owner transforms. Where sums are exact, results equal those of real processes
    bit for bit; elsewhere they are the same in every run, since sums are taken in the order of ranks.

    Ranks are threads that run one at a time and take turns where they wait for a collective. So ranks that don't agree
    on their collectives, which hang in reality, are an error that names both; so is a write to a buffer that is still
    travelling. ``mesh.collectives`` lists what the rank has launched so far (modes that count torch's operators see
    none: no operator of torch.distributed runs).

    Each rank has a random generator of its own (torch's CPU generator; it starts as the caller's, which is left as it
    was). What else is global to a process is shared: `random`, numpy's generator, torch's default dtype, modules and
    tensors made outside `fn`. Gradient modes and other contexts around the call don't reach into it.

    Not simulated, and refused: CUDA tensors, `mfsdp_fn.compile`, `to_dtensors` and whatever else needs a process group.
    Nothing runs beside anything else, so it says nothing of time, overlap or memory.

    Args:
        world_size: the number of ranks, or a tuple of mesh axis sizes, outer to inner.
        names: the axis names; by default ``("dp",)``, or ``("outer", "inner")`` for two axes.

    Returns:
        A function of ``(fn, *args, **kwargs)``, which are the same on every rank.

    Raises:
        SimulationError: sizes or names that make no mesh. Its calls: see `Simulation`.

    >>> import torch, mfsdp_fn as mf
    >>> def one_step(mesh, lr):
    ...     params = {"w": torch.tensor([1.0, 2.0, 3.0], requires_grad=True)}
    ...     state = mf.shard(params, mf.plan(params, mesh, mf.zero3()))
    ...     before = len(mesh.collectives)
    ...     loss_fn = lambda state: (mesh.get_rank() + 1) * mf.unshard(state)["w"].square().sum()
    ...     loss, grads = mf.value_and_grad(loss_fn)(state)
    ...     state, _ = mf.optim.sgd(lr).step(grads, mf.optim.sgd(lr).init(state), state)
    ...     return mf.unshard(state)["w"].tolist(), [c.kind for c in mesh.collectives[before:]]
    >>> simulate(2)(one_step, 0.5)[1]  # gradients are 2w and 4w, on average 3w
    ([-0.5, -1.0, -1.5], ['all_gather', 'all_gather', 'reduce_scatter', 'all_gather'])
    """
    return Simulation(*check_shape(world_size, names))
