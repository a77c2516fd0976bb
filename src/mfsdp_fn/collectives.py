"""What a step launches. The only file that calls collectives, with three that it launches through: `messages.py`,
`ragged.py` and `symmetric.py`; the groups to call them on are made, and warmed, in `communicators.py`.

They and a few others use private torch API; `tests/test_private_api.py` names each with what it uses.

Collectives are asynchronous functional ops (``torch.ops._c10d_functional``: private, but what
`torch.distributed._functional_collectives` and every compiler pass are built on): a launch returns a tensor
that must be waited for, in eager code and in compiled graphs alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

# Private: groups travel by name, as the functional operators take them, and the list collectives want the group.
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateImportUsage]
)

from . import messages, ragged
from .communicators import Axis, Peers, connect
from .errors import StateError, bad
from .messages import PendingMessages
from .simulation import Arrival
from .symmetric import Staged

_ops = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class PendingCollective:
    """A launched collective. `wait` gives its result; one that is dropped unwaited leaks its buffers.

    `sizes` are the true sizes of an uneven gather's segments, where they were padded to the largest. `work` is what
    to wait for where it isn't the tensor itself; `source` what the transfer reads, alive until then. Over one rank
    nothing is `on_wire`.
    """

    raw: torch.Tensor | Arrival | Staged
    sizes: tuple[int, ...] | None
    dtype: torch.dtype
    work: dist.Work | None = None
    source: torch.Tensor | None = None
    on_wire: bool = True

    def wait(self) -> torch.Tensor:
        """The result, ordered after the collective on the current stream."""
        if isinstance(self.raw, (Arrival, Staged)):
            done = self.raw.wait()
        elif not self.on_wire:
            done = self.raw
        elif self.work is None:
            done = _ops.wait_tensor(self.raw)
        else:
            self.work.wait()
            done = self.raw
        if self.sizes is not None:
            done = ragged.without_padding(done, self.sizes)
        return done if done.dtype == self.dtype else done.view(self.dtype)


# Gloo and NCCL agree on these; anything else (float8, int16, …) travels as bytes.
_WIRE_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_WIRE_DTYPES |= {torch.int8, torch.uint8, torch.int32, torch.int64}


def _group(name: str | None, what: str) -> str:
    if name is None:
        raise StateError(bad("mesh", "an AbstractMesh", f"a DeviceMesh to {what} over", "plan again with a real mesh"))
    return name


def _ragged_group(wire: torch.Tensor, name: str) -> dist.ProcessGroup | None:
    """The group, if it takes uneven segments as they are."""
    if torch.compiler.is_compiling() or wire.device.type != "cuda":
        return None
    group = _resolve_process_group(name)  # pyright: ignore[reportArgumentType]  # newer releases have a type of names
    return group if ragged.takes_lists(group, wire.device) else None


def rank_in(name: str) -> int:
    """This process' rank in the group `name`."""
    return _resolve_process_group(name).rank()  # pyright: ignore[reportArgumentType]


def _alone(tensor: torch.Tensor) -> PendingCollective:
    """What any collective over an axis of one rank is: a copy, and nothing is sent."""
    return PendingCollective(tensor.clone(), None, tensor.dtype, on_wire=False)


def all_gather(
    local: torch.Tensor, sizes: Sequence[int], axis: Axis, dtype: torch.dtype | None = None
) -> PendingCollective:
    """Launch an all-gather of 1-D segments of `sizes[rank]` elements over `axis`, cast to `dtype` before.

    Bytes received a rank: (sum of sizes - own) times the element size. Uneven sizes: NCCL writes each segment where
    it belongs; on other backends, and in compiled graphs, the wire carries the largest size for everyone.
    """
    if dtype is not None and dtype != local.dtype:
        if _can_cast_in_place(local, sizes, axis, dtype):
            name = _group(axis.gather_group, "all-gather")
            whole, own = cast_in_place(local, dtype, axis.size, axis.rank)
            return PendingCollective(_ops.all_gather_into_tensor_out(own, axis.size, name, out=whole), None, dtype)
        local = local.to(dtype)
        if axis.size == 1:
            return PendingCollective(local, None, dtype, on_wire=False)
    if axis.size == 1:
        return _alone(local)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.all_gather(local, sizes), None, local.dtype)
    name = _group(axis.gather_group, "all-gather")
    wire = local if local.dtype in _WIRE_DTYPES else local.view(torch.uint8)
    scale = local.dtype.itemsize // wire.dtype.itemsize
    widest = max(sizes)
    if all(size == widest for size in sizes):
        if axis.gather_staging is not None and (staged := axis.gather_staging.all_gather(wire, axis.size, name)):
            return PendingCollective(staged, None, local.dtype)
        return PendingCollective(_even_gather(wire, axis.size, name), None, local.dtype)
    group = _ragged_group(wire, name)
    if group is not None:
        flat, work = ragged.gather(wire, [size * scale for size in sizes], group)
        return PendingCollective(flat, None, local.dtype, work, wire)
    padded = ragged.with_padding(wire, [wire.numel()], widest * scale)
    return PendingCollective(_even_gather(padded, axis.size, name), tuple(s * scale for s in sizes), local.dtype)


def _even_gather(wire: torch.Tensor, size: int, name: str) -> torch.Tensor:
    if wire.device.type == "cpu" and not torch.compiler.is_compiling():
        # Gloo runs the plain functional op as a *coalesced* all-gather, whose name its two worker threads write to
        # one unguarded string when they finish together: rare heap corruption (seen with torch 2.13). The out
        # variant is an ordinary all-gather there.
        return _ops.all_gather_into_tensor_out(wire, size, name, out=wire.new_empty(wire.numel() * size))
    return _ops.all_gather_into_tensor(wire, size, name)


def _can_cast_in_place(local: torch.Tensor, sizes: Sequence[int], axis: Axis, dtype: torch.dtype) -> bool:
    """Whether the cast may be written where the gather would put it: an even gather, between real ranks."""
    real = axis.size > 1 and axis.simulated is None and axis.gather_staging is None
    return real and dtype in _WIRE_DTYPES and len(set(sizes)) == 1 and not torch.compiler.is_compiling()


def cast_in_place(local: torch.Tensor, dtype: torch.dtype, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for an even all-gather, and this rank's part of it, which holds `local` in `dtype`.

    The cast by itself never exists, and NCCL, which finds its input in its place, copies nothing.
    """
    whole = local.new_empty(local.numel() * size, dtype=dtype)
    return whole, whole.narrow(0, rank * local.numel(), local.numel()).copy_(local)


def reduce_scatter(full: torch.Tensor, sizes: Sequence[int], axis: Axis) -> PendingCollective:
    """Launch a sum reduce-scatter of a 1-D buffer into segments of `sizes[rank]` elements over `axis`.

    Bytes sent a rank: (sum of sizes - own) times the element size. Uneven sizes: as in `all_gather`.
    """
    if axis.size == 1:
        return _alone(full)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.reduce_scatter(full, sizes), None, full.dtype)
    name = _group(axis.reduce_group, "reduce")
    widest = max(sizes)
    if all(size == widest for size in sizes):
        if axis.reduce_staging is not None and (staged := axis.reduce_staging.reduce_scatter(full, axis.size, name)):
            return PendingCollective(staged, None, full.dtype)
        return PendingCollective(_ops.reduce_scatter_tensor(full, "sum", axis.size, name), None, full.dtype)
    group = _ragged_group(full, name)
    if group is not None:
        part, work = ragged.reduce_scatter(full, sizes, axis.rank, group)
        return PendingCollective(part, None, full.dtype, work, full)
    padded = ragged.with_padding(full, sizes, widest)
    raw = _ops.reduce_scatter_tensor(padded, "sum", axis.size, name)
    return PendingCollective(raw, (sizes[axis.rank],), full.dtype)


def all_reduce(full: torch.Tensor, axis: Axis) -> PendingCollective:
    """Launch a sum all-reduce of `full` over `axis` (out of place)."""
    if axis.size == 1:
        return _alone(full)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.all_reduce(full), None, full.dtype)
    name = _group(axis.reduce_group, "reduce")
    if axis.reduce_staging is not None and (staged := axis.reduce_staging.all_reduce(full, name)):
        return PendingCollective(staged, None, full.dtype)
    return PendingCollective(_ops.all_reduce(full, "sum", name), None, full.dtype)


def broadcast(tensor: torch.Tensor, axis: Axis) -> PendingCollective:
    """Launch a broadcast of the first rank's `tensor` over `axis` (out of place)."""
    if axis.size == 1:
        return _alone(tensor)
    if axis.simulated is not None:
        return PendingCollective(axis.simulated.broadcast(tensor), None, tensor.dtype)
    wire = tensor if tensor.dtype in _WIRE_DTYPES else tensor.view(torch.uint8)
    return PendingCollective(_ops.broadcast(wire, 0, _group(axis.gather_group, "broadcast")), None, tensor.dtype)


def all_to_all(wire: torch.Tensor, receive: Sequence[int], send: Sequence[int], peers: Peers) -> PendingCollective:
    """Launch an exchange of 1-D segments: `send[i]` elements of `wire` go to, `receive[i]` come from, peer `i`.

    Peers are counted in `Peers.group_order`. Bytes sent a rank: what `send` says, each peer's part straight to it.
    """
    if peers.simulated is not None:
        return PendingCollective(peers.simulated.all_to_all(wire, receive, send), None, wire.dtype)
    name = _group(peers.group, "exchange")
    raw = _ops.all_to_all_single(wire, list(receive), list(send), name)
    return PendingCollective(raw, None, wire.dtype)


def takes_messages(peers: Peers, device: torch.device) -> bool:
    """Whether `send_and_receive` serves these ranks. The same answer on all of them."""
    if torch.compiler.is_compiling() or peers.group is None or device.type != "cuda":
        return False
    group = _resolve_process_group(peers.group)  # pyright: ignore[reportArgumentType]
    return ragged.takes_lists(group, device)


def send_and_receive(
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    peers: Peers,
    device: torch.device,
) -> PendingMessages:
    """Launch messages of flat tensors to and from peers, counted in `Peers.group_order`; see `messages.launch`.

    Bytes sent a rank: those of `sends`. All peers call it: a rank without messages launches none, but the first call
    on a communicator connects them all.
    """
    group = _resolve_process_group(_group(peers.group, "exchange"))  # pyright: ignore[reportArgumentType]
    connect(group, device)
    there, here = (
        [(peers.group_order[peer], one if one.dtype in _WIRE_DTYPES else one.view(torch.uint8)) for peer, one in some]
        for some in (sends, receives)
    )
    return messages.launch(there, here, group)


def copy_many(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, casting, in as few kernels as there are dtype pairs.

    `torch._foreach_copy_` is private; there is no public fused form of many copies.
    """
    if destinations:
        # Pyright takes underscored names of a typed package for private, which this one is: see above.
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            list(destinations), list(sources)
        )


def add_many(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add each source to its destination, casting to the destination's dtype."""
    for destination, source in zip(destinations, sources, strict=True):
        destination.add_(source)
