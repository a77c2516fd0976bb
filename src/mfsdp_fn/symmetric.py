"""Messages in NCCL's symmetric memory: a ring of buffers a communicator, with a copy in and a copy out.

NCCL's symmetric kernels rely on one promise: a message starts at the same place of the same registered buffer on every
rank of the communicator. Tensors that a caching allocator places as they come and go can't keep it, since when Python
frees a gathered weight differs between ranks. A ring can: its buffers are made once, by all ranks together, and the
n-th launch on a communicator uses buffer n modulo their number, everywhere. What comes out of a launch is copied
to ordinary memory when it is waited for, so that users may hold it as long as they like.

Private torch API here: `torch.ops._c10d_functional`, as in `collectives.py`, and `ProcessGroup._get_backend`, whose
public form newer releases have.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh

from .mesh import AbstractMesh
from .simulated_mesh import SimulatedMesh

_ops = torch.ops._c10d_functional

_SLOTS = 2  # one under way while the next is launched
_NCCL = (2, 27)  # the first with symmetric windows


def why_not(mesh: DeviceMesh | AbstractMesh | SimulatedMesh) -> str | None:
    """Why messages over `mesh` can't lie in symmetric memory; None if they can."""
    if isinstance(mesh, AbstractMesh):
        return "an AbstractMesh has no communicators"
    if isinstance(mesh, SimulatedMesh):
        return "simulated ranks have no communicators"
    if mesh.device_type != "cuda":
        return f"it is NCCL's, and the mesh is on {mesh.device_type!r}"
    if mesh.size() == 1:
        return "a single rank sends nothing"
    if not hasattr(torch.cuda, "MemPool"):
        return f"torch {torch.__version__} has no memory pools"
    version = nccl.version()
    if tuple(version)[:2] < _NCCL:
        return f"NCCL {'.'.join(map(str, version))} is older than 2.27"
    for axis in range(mesh.ndim):
        backend = _backend(mesh.get_group(axis))
        if not hasattr(backend, "register_mem_pool") or not hasattr(backend, "mem_allocator"):
            return f"the backend {type(backend).__name__} registers no memory pools"
    return None


def _backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda", torch.cuda.current_device()))


class Staged:
    """A message under way; `wait` waits for it and copies it out, once."""

    def __init__(self, slot: _Slot, raw: torch.Tensor) -> None:
        self.slot, self.raw = slot, raw
        self.result: torch.Tensor | None = None
        slot.staged = self

    def wait(self) -> torch.Tensor:
        """The message in memory of its own; the buffer is free for the next one."""
        if self.result is not None:
            return self.result
        # On the stream that launches: the next message is copied in after this one was copied out.
        self.result = result = _ops.wait_tensor(self.raw).clone()
        self.slot.staged = None
        return result


class _Slot:
    """One registered buffer for whole messages, and one for a rank's part of them."""

    def __init__(self, whole: int, part: int, device: torch.device) -> None:
        self.whole = torch.empty(whole, dtype=torch.uint8, device=device)
        self.part = torch.empty(part, dtype=torch.uint8, device=device)
        self.staged: Staged | None = None


def _room(buffer: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return buffer.narrow(0, 0, numel * dtype.itemsize).view(dtype)


class Staging:
    """The ring of one communicator, for messages of at most `whole` bytes, of which a rank's part has at most `part`.

    Args:
        whole, part: the limits.
        device: where the buffers are.
        pool: what they are allocated from; None for ordinary memory.
    """

    def __init__(self, whole: int, part: int, device: torch.device, pool: torch.cuda.MemPool | None = None) -> None:
        self.limits = (whole, part)
        self.launched = 0
        with contextlib.nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device):
            self.slots = [_Slot(whole, part, device) for _ in range(_SLOTS)]
        self.pool = pool  # after the slots: an object's attributes go in order, and tensors before their pool

    def _next(self, whole: int, part: int) -> _Slot | None:
        """The next launch's buffers; None for a message that is too large, on every rank."""
        if whole > self.limits[0] or part > self.limits[1]:
            return None
        slot = self.slots[self.launched % _SLOTS]
        self.launched += 1
        if slot.staged is not None:
            slot.staged.wait()  # launched long ago and still not asked for
        return slot

    def all_gather(self, local: torch.Tensor, ranks: int, name: str) -> Staged | None:
        """Launch an all-gather of equal segments."""
        slot = self._next(local.nbytes * ranks, local.nbytes)
        if slot is None:
            return None
        part = _room(slot.part, local.numel(), local.dtype).copy_(local)
        whole = _room(slot.whole, local.numel() * ranks, local.dtype)
        return Staged(slot, _ops.all_gather_into_tensor_out(part, ranks, name, out=whole))

    def reduce_scatter(self, full: torch.Tensor, ranks: int, name: str) -> Staged | None:
        """Launch a sum reduce-scatter into equal segments."""
        slot = self._next(full.nbytes, full.nbytes // ranks)
        if slot is None:
            return None
        whole = _room(slot.whole, full.numel(), full.dtype).copy_(full)
        part = _room(slot.part, full.numel() // ranks, full.dtype)
        return Staged(slot, _ops.reduce_scatter_tensor_out(whole, "sum", ranks, name, out=part))

    def all_reduce(self, full: torch.Tensor, name: str) -> Staged | None:
        """Launch a sum all-reduce."""
        slot = self._next(full.nbytes, 0)
        if slot is None:
            return None
        return Staged(slot, _ops.all_reduce_(_room(slot.whole, full.numel(), full.dtype).copy_(full), "sum", name))


# Registered memory belongs to its communicator, and lives as long as that or a plan that uses it.
_stagings: weakref.WeakKeyDictionary[dist.ProcessGroup, Staging] = weakref.WeakKeyDictionary()


def staging_of(group: dist.ProcessGroup, whole: int, part: int, device: torch.device) -> Staging | None:
    """The communicator's ring, made if there is none that is large enough: collective then. None for no messages."""
    if not whole:
        return None
    known = _stagings.get(group)
    if known is not None:
        if known.limits[0] >= whole and known.limits[1] >= part:
            return known
        whole, part = max(whole, known.limits[0]), max(part, known.limits[1])
    backend = _backend(group)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    made = Staging(whole, part, device, pool)
    # With all of the pool's memory allocated: what it gets later is registered by the allocator, at a time of its own
    # on each rank, or not at all.
    backend.register_mem_pool(pool, symm=True)
    _stagings[group] = made
    return made
