"""One group of a plan: its tensors, its layout, and the facts about its flat buffer that every step reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import torch

from .buffer import Move, moves, segment
from .communicators import Axis, Mesh
from .layout import GlobalLayout
from .layout_choice import LayoutChoice
from .placement import Placement, Placements
from .precision import GroupDtypes
from .ranges import Range


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """The tensors of one (unit, dtype, requires_grad), or of one row size of those, laid out in one flat buffer.

    `paths` and `layout` are in buffer-planning order: tensors that keep the next one aligned come first, and layers
    that look alike begin with different matrices. A tied tensor counts once, under the path it has first. `axes` are
    this rank's communicators over `mesh`; `choice` is what was predicted for the layout, and why it was picked.
    """

    name: str
    unit: str
    number: int
    dtype: torch.dtype
    requires_grad: bool
    paths: tuple[str, ...]
    layout: GlobalLayout
    placements: Placements
    dtypes: GroupDtypes
    grad_scale: float
    store_compute: bool
    mesh: Mesh = dataclasses.field(compare=False, repr=False)
    axes: tuple[Axis, ...] = dataclasses.field(compare=False, repr=False)
    choice: LayoutChoice = dataclasses.field(compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.name, self.layout.size))

    @functools.cached_property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        count = 1
        for axis in self.axes:
            count *= axis.size
        return count

    @functools.cached_property
    def scale(self) -> float:
        """The factor on each gradient contribution: the mean over ranks, times `grad_scale`."""
        return self.grad_scale / self.ranks

    def range_of(self, placement: tuple[Placement, ...]) -> Range:
        """The part of the buffer that this rank holds under `placement`."""
        return segment(self.layout, placement, self.axes)

    @functools.cached_property
    def main_range(self) -> Range:
        """This rank's part of main weights, moments and finished gradients."""
        return self.range_of(self.placements.optimizer)

    @functools.cached_property
    def compute_range(self) -> Range:
        """This rank's part of compute weights."""
        return self.range_of(self.placements.parameter)

    @functools.cached_property
    def grad_range(self) -> Range:
        """This rank's part of gradients while they accumulate."""
        return self.range_of(self.placements.gradient)

    @functools.cached_property
    def main_pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(index, start, stop) of each tensor's part of this rank's main buffer, in order; padding is in none."""
        held, found = self.main_range, []
        for index, (offset, _, numel) in sorted(enumerate(self.views), key=lambda item: item[1][0]):
            start, stop = max(offset, held.start), min(offset + numel, held.stop)
            if start < stop:
                found.append((index, start - held.start, stop - held.start))
        return tuple(found)

    @functools.cached_property
    def main_runs(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the maximal runs without padding in this rank's main buffer."""
        return self.runs_of(range(len(self.paths)))

    def runs_of(self, indices: Collection[int]) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the maximal runs of some tensors' parts in this rank's main buffer."""
        runs: list[tuple[int, int]] = []
        for index, start, stop in self.main_pieces:
            if index not in indices:
                continue
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return tuple(runs)

    @functools.cached_property
    def has_compute(self) -> bool:
        """Whether compute weights need a buffer of their own beside the main weights."""
        if self.placements.parameter != self.placements.optimizer:
            return True
        return self.dtypes.compute != self.dtypes.main and (self.store_compute or not self.gathers)

    @functools.cached_property
    def gathers(self) -> tuple[Move, ...]:
        """The gathers of an `unshard`."""
        whole = tuple(_WHOLE for _ in self.axes)
        return moves(self.layout, self.placements.parameter, whole, self.axes)

    @functools.cached_property
    def sync_gathers(self) -> tuple[Move, ...]:
        """The gathers from main to compute weights, once a step."""
        return moves(self.layout, self.placements.optimizer, self.placements.parameter, self.axes)

    @functools.cached_property
    def grad_scatters(self) -> tuple[Move, ...]:
        """The reduce-scatters of every microbatch, in order."""
        whole = tuple(_WHOLE for _ in self.axes)
        return moves(self.layout, self.placements.gradient, whole, self.axes)[::-1]

    @functools.cached_property
    def wire_gathers(self) -> tuple[Move, ...]:
        """`gathers` without axes of one rank, over which the gathered buffer is the local one itself."""
        return tuple(move for move in self.gathers if move.axis.size > 1)

    @functools.cached_property
    def wire_scatters(self) -> tuple[Move, ...]:
        """`grad_scatters` without axes of one rank, over which the sum is what was packed."""
        return tuple(move for move in self.grad_scatters if move.axis.size > 1)

    @functools.cached_property
    def deferred_scatters(self) -> tuple[Move, ...]:
        """The reduce-scatters that wait for the last microbatch, in order."""
        return moves(self.layout, self.placements.optimizer, self.placements.gradient, self.axes)[::-1]

    @functools.cached_property
    def deferred_all_reduces(self) -> tuple[Axis, ...]:
        """The axes over which the last microbatch all-reduces."""
        pairs = zip(self.placements.gradient, self.placements.optimizer, self.axes, strict=True)
        return tuple(axis for grad, optimizer, axis in pairs if not grad.is_sharded and not optimizer.is_sharded)

    @functools.cached_property
    def defers(self) -> bool:
        """Whether accumulated gradients differ from finished ones."""
        return bool(self.deferred_scatters or self.deferred_all_reduces)

    @functools.cached_property
    def views(self) -> tuple[tuple[int, torch.Size, int], ...]:
        """(offset, shape, numel) of each tensor in the whole buffer."""
        pairs = zip(self.layout.tensor_to_offset, self.layout.tensor_shapes, strict=True)
        return tuple((offset, shape, shape.numel()) for offset, shape in pairs)

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of the padding in the whole buffer."""
        found, end = [], 0
        for offset, _, numel in sorted((view for view in self.views if view[2]), key=lambda view: view[0]):
            if offset > end:
                found.append((end, offset - end))
            end = offset + numel
        if self.layout.size > end:
            found.append((end, self.layout.size - end))
        return tuple(found)

    def local_views(self, buffer: torch.Tensor, held: Range) -> dict[int, torch.Tensor]:
        """The rows of each tensor inside `buffer`, which holds `held`; tensors with none of theirs are left out.

        Shapes are those of `layout.local_shape`.
        """
        found = {}
        if buffer.dim() != 1:  # a frozen group of gradients or moments holds nothing
            return found
        for index, (offset, shape, numel) in enumerate(self.views):
            start, stop = max(offset, held.start), min(offset + numel, held.stop)
            if start < stop:
                rows = buffer.narrow(0, start - held.start, stop - start)
                found[index] = rows.view((-1, *self.layout.row_shape(index)) if shape else shape)
        return found


class _Whole(Placement):
    """Stands for any placement that is not sharded."""


_WHOLE = _Whole()
