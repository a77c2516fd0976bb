"""A group's flat buffer over the mesh: which segment a placement gives a rank, and the moves between placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from . import collectives
from .communicators import Axis
from .labels import labelled
from .layout import GlobalLayout
from .placement import Placement, sharded_axes
from .ranges import Range


def _coarse(layout: GlobalLayout, order: tuple[int, ...], axes: Sequence[Axis]) -> GlobalLayout:
    """`layout` seen by shards over the axes `order` alone."""
    parts = 1
    for axis in order:
        parts *= axes[axis].size
    return layout.coarsen(layout.dp_size // parts)


def _shard_index(order: tuple[int, ...], axes: Sequence[Axis]) -> int:
    """This rank's shard number: the inner axis is the most significant digit.

    So a shard over (inner, outer) is a piece of the inner shard, and gathering over the outer axis joins
    neighbours.
    """
    index = 0
    for axis in order:
        index = index * axes[axis].size + axes[axis].rank
    return index


def segment(layout: GlobalLayout, placement: tuple[Placement, ...], axes: Sequence[Axis]) -> Range:
    """The part of the flat buffer that this rank holds under `placement`, in global elements.

    >>> from mfsdp_fn import build_for_row_atomic, RowAtomic, Replicate
    >>> layout = build_for_row_atomic([(4, 2)], 2)
    >>> segment(layout, (RowAtomic(),), [Axis(size=2, rank=1)])
    Range(start=4, stop=8)
    >>> segment(layout, (Replicate(),), [Axis(size=2, rank=1)])
    Range(start=0, stop=8)
    """
    order = sharded_axes(placement)
    return _coarse(layout, order, axes).rank_range(_shard_index(order, axes))


@dataclasses.dataclass(frozen=True)
class Move:
    """One gather, or the reduce-scatter that is its transpose: over which axis, and each rank's size."""

    axis: Axis
    sizes: tuple[int, ...]


def moves(
    layout: GlobalLayout, fine: tuple[Placement, ...], coarse: tuple[Placement, ...], axes: Sequence[Axis]
) -> tuple[Move, ...]:
    """The gathers that lead from placement `fine` to `coarse`, in order; read backwards, the reduce-scatters.

    `coarse` must be sharded over a leading part of `fine`'s axes, inner to outer (`check_placements` sees to it).
    """
    order, result = sharded_axes(fine), []
    while order != sharded_axes(coarse):
        *rest, last = order
        parent = _shard_index(tuple(rest), axes)
        layout_here, size = _coarse(layout, order, axes), axes[last].size
        ranges = [layout_here.rank_range(parent * size + rank) for rank in range(size)]
        result.append(Move(axes[last], tuple(r.stop - r.start for r in ranges)))
        order = tuple(rest)
    return tuple(result)


@dataclasses.dataclass(frozen=True)
class PendingGather:
    """A gather over one or more axes whose first step was launched; `wait` launches and waits for the rest."""

    local: torch.Tensor
    first: collectives.PendingCollective | None
    rest: tuple[Move, ...]
    label: tuple[str, str] = ("", "")

    def wait(self) -> torch.Tensor:
        """The gathered flat buffer."""
        if self.first is None and not self.rest:
            return self.local
        with labelled("wait for all-gather", *self.label):
            flat = self.local if self.first is None else self.first.wait()
            for move in self.rest:
                if not sum(move.sizes):
                    continue
                flat = collectives.all_gather(flat, move.sizes, move.axis).wait()
            return flat


def launch_gather(
    local: torch.Tensor,
    steps: Sequence[Move],
    *,
    dtype: torch.dtype | None = None,
    label: tuple[str, str] = ("", ""),
) -> PendingGather:
    """Launch the gathers `steps` of a local segment, cast to `dtype` on the way.

    No steps: the buffer itself, or its cast. Nothing to move: no collective.

    A first step with nothing to move is not made up for by launching the second one at once: the ranks that share the
    second step may have something to move in the first, and they launch the second when they wait.

    `label` is (what is gathered, phase) for profiler traces.
    """
    if not steps:
        return PendingGather(local if dtype is None else local.to(dtype), None, ())
    step, rest = steps[0], tuple(steps[1:])
    if not sum(step.sizes):
        return PendingGather(local if dtype is None else local.to(dtype), None, rest, label)
    with labelled("launch all-gather", *label):
        return PendingGather(local, collectives.all_gather(local, step.sizes, step.axis, dtype), rest, label)
