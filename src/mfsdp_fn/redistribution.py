"""From one placement of a flat buffer to another: which gathers, exchanges and reductions, in which order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from . import collectives, communicators
from .buffer import launch_gather, moves, segment
from .communicators import Axis, Mesh
from .layout import GlobalLayout
from .placement import Partial, Placement, Replicate, RowAtomic, sharded_axes

PerAxis = tuple[Placement, ...]


def common_order(old: PerAxis, new: PerAxis) -> tuple[int, ...]:
    """The sharded axes, inner to outer, that stay sharded from `old` to `new`: the leading ones that both have."""
    pairs = zip(sharded_axes(old), sharded_axes(new), strict=False)
    return tuple(axis for axis, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def redistribute(
    local: torch.Tensor,
    layout: GlobalLayout,
    old: PerAxis,
    new_layout: GlobalLayout,
    new: PerAxis,
    mesh: Mesh,
    axes: Sequence[Axis],
) -> torch.Tensor:
    """A rank's local part under `old` to its part under `new`, by the steps that `DBuffer.redistribute` documents.

    `old` and `new` were checked: both fit their layouts, and no axis becomes Partial.
    """
    kept, goal = common_order(old, new), sharded_axes(new)
    local = launch_gather(local, moves(layout, old, _over(kept, len(axes)), axes)).wait()
    if new_layout != layout:
        local = _exchange(local, layout, new_layout, kept, mesh, axes)
    done = kept
    for axis in goal[len(kept) :]:
        here, there = _over(done, len(axes)), _over((*done, axis), len(axes))
        if isinstance(old[axis], Partial):
            (move,) = moves(new_layout, there, here, axes)
            if sum(move.sizes):
                local = collectives.reduce_scatter(local, move.sizes, move.axis).wait()
        else:
            whole, part = segment(new_layout, here, axes), segment(new_layout, there, axes)
            # A copy: the part alone should stay in memory.
            local = local.narrow(0, part.start - whole.start, part.size).clone()
        done = (*done, axis)
    for axis in reversed(range(len(axes))):
        if isinstance(old[axis], Partial) and isinstance(new[axis], Replicate) and local.numel():
            local = collectives.all_reduce(local, axes[axis]).wait()
    return local


def _over(order: Sequence[int], ndim: int) -> PerAxis:
    """Sharded over the axes `order` alone."""
    return tuple(RowAtomic() if axis in order else Replicate() for axis in range(ndim))


def _exchange(
    local: torch.Tensor,
    layout: GlobalLayout,
    new_layout: GlobalLayout,
    order: tuple[int, ...],
    mesh: Mesh,
    axes: Sequence[Axis],
) -> torch.Tensor:
    """From the segments of one layout to those of another over the same shards: one all-to-all, or none."""
    parts = math.prod(axes[axis].size for axis in order)
    old, new = layout.coarsen(layout.dp_size // parts), new_layout.coarsen(new_layout.dp_size // parts)
    shard = 0
    for axis in order:
        shard = shard * axes[axis].size + axes[axis].rank
    fresh = local.new_zeros(new.rank_range(shard).size)
    mine, theirs = old.rank_range(shard).start, new.rank_range(shard).start
    for _, index, start, stop in (piece for piece in _pieces(old, new, shard) if piece[0] == shard):
        source = local.narrow(0, old.tensor_to_offset[index] + start - mine, stop - start)
        fresh.narrow(0, new.tensor_to_offset[index] + start - theirs, stop - start).copy_(source)
    if not _moves(old, new):
        return fresh
    peers = communicators.peers_of(mesh, order)
    place = [peers.group_order.index(rank) for rank in peers.ranks]  # of each shard, in the communicator's order
    going = sorted((place[peer], i, a, b) for peer, i, a, b in _pieces(old, new, shard) if peer != shard)
    coming = sorted((place[peer], i, a, b) for peer, i, a, b in _pieces(new, old, shard) if peer != shard)
    sources = [local.narrow(0, old.tensor_to_offset[i] + a - mine, b - a) for _, i, a, b in going]
    # As bytes: every dtype travels.
    wire = torch.cat(sources or [local.narrow(0, 0, 0)]).view(torch.uint8)
    sizes = [[0] * parts for _ in range(2)]
    for row, pieces in zip(sizes, (coming, going), strict=True):
        for peer, _, start, stop in pieces:
            row[peer] += (stop - start) * local.dtype.itemsize
    received = collectives.all_to_all(wire, sizes[0], sizes[1], peers).wait().view(local.dtype)
    at = 0
    for _, index, start, stop in coming:
        target = fresh.narrow(0, new.tensor_to_offset[index] + start - theirs, stop - start)
        target.copy_(received.narrow(0, at, stop - start))
        at += stop - start
    return fresh


def _held(layout: GlobalLayout, index: int, shard: int) -> tuple[int, int]:
    """First and last element, counted in the tensor, that a shard holds of it."""
    held = layout.local_range(index, shard)
    return held.start - layout.tensor_to_offset[index], held.stop - layout.tensor_to_offset[index]


def _pieces(old: GlobalLayout, new: GlobalLayout, shard: int) -> list[tuple[int, int, int, int]]:
    """What `shard` holds in `old`, by where `new` has it: (shard there, tensor, start, stop in the tensor)."""
    found = []
    for index in old.local_tensors(shard):
        first, last = _held(old, index, shard)
        for peer in new.ranks_of(index):
            start, stop = _held(new, index, peer)
            start, stop = max(first, start), min(last, stop)
            if start < stop:
                found.append((peer, index, start, stop))
    return found


def _moves(old: GlobalLayout, new: GlobalLayout) -> bool:
    """Whether any element changes its shard. From the layouts alone: every rank finds the same."""
    for index in range(len(old.tensor_shapes)):
        for shard in old.ranks_of(index):
            first, last = _held(old, index, shard)
            start, stop = _held(new, index, shard)
            if first < last and not (start <= first and last <= stop):
                return True
    return False
