"""`DBuffer`: one flat buffer over a mesh as a value, to redistribute and to look into (seed: dbuffer)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import optree
import torch

from . import communicators
from .buffer import segment
from .checks import check_flag, shown
from .communicators import Axis, Mesh
from .dbuffer_checks import check_dtype, check_layout, checked_placements
from .errors import LayoutError, StateError, bad
from .group import GroupSpec
from .layout import GlobalLayout
from .model_weights import weights_of
from .placement import Partial, Placement, Replicate, sharded_axes
from .ranges import Range
from .redistribution import redistribute
from .state import EVERYWHERE, NOTHING, ShardState, check_state, placement_of


@dataclasses.dataclass(frozen=True, eq=False)
class DBuffer:
    """A flat buffer that holds tensors end to end, this rank's part of it, and how it lies over a mesh.

    A value: nothing here writes to `local`, and `redistribute` gives another. A node of optree and torch pytrees,
    with `local` as its one leaf. Make it with `from_tensors`, `from_local` or `from_state`; the constructor checks
    nothing.

    Args:
        local: this rank's part, 1-D, padding included.
        layout: where each tensor lies, over at least as many shards as the placements make.
        placements: one a mesh axis, outer to inner.
        mesh: the mesh.
        axes: its axes with their communicators.

    Sources: Megatron-FSDP v2's `DBuffer`; the placements follow `torch.distributed.tensor`.

    >>> from mfsdp_fn import AbstractMesh, Replicate, RowAtomic, build_for_row_atomic
    >>> layout = build_for_row_atomic([(3, 2), (2,)], 2)
    >>> tensors = [torch.arange(6.0).view(3, 2), torch.ones(2)]
    >>> whole = DBuffer.from_tensors(tensors, layout, AbstractMesh((2,), ("dp",), rank=1), (Replicate(),))
    >>> part = whole.redistribute((RowAtomic(),))
    >>> part.held, part.local, part.get_tensor_view(0)
    (Range(start=4, stop=8), tensor([4., 5., 1., 1.]), tensor([[4., 5.]]))
    """

    local: torch.Tensor
    layout: GlobalLayout
    placements: tuple[Placement, ...]
    mesh: Mesh = dataclasses.field(repr=False)
    axes: tuple[Axis, ...] = dataclasses.field(repr=False)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        layout: GlobalLayout,
        mesh: Mesh,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype | None = None,
    ) -> DBuffer:
        """This rank's part of whole tensors, copied; padding is zero.

        Every rank gives all tensors: the same where an axis is replicated or sharded, its own summand where one is
        Partial. Collective over the mesh: its communicators are made and warmed (one 1-element all-reduce each).

        Args:
            tensors: whole tensors, one for each of ``layout.tensor_shapes``.
            layout: the layout; its number of ranks a multiple of the shards that `placements` make.
            mesh: a `DeviceMesh` or `AbstractMesh`.
            placements: one a mesh axis, outer to inner.
            dtype: the buffer's; by default the tensors' own.

        Raises:
            StateError: tensors that don't fit the layout, of several dtypes without `dtype`, or on the meta device.
            LayoutError: a layout that is none or doesn't fit the placements.
            PlanError: something that is no placement or no mesh.
        """
        checked = checked_placements(layout, placements, mesh)
        check_dtype(dtype)
        if not isinstance(tensors, (tuple, list)):
            raise StateError(bad("tensors", shown(tensors), "whole tensors", "write [tensor, …]"))
        given, shapes = list(tensors), layout.tensor_shapes
        got = [tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else shown(tensor) for tensor in given]
        if got != [tuple(shape) for shape in shapes]:
            raise StateError(
                bad(
                    "tensors",
                    f"shapes {got}",
                    f"{[tuple(shape) for shape in shapes]}, as in the layout",
                    "give one whole tensor for each of layout.tensor_shapes",
                )
            )
        dtypes = {tensor.dtype for tensor in given}
        if dtype is None and len(dtypes) != 1:
            raise StateError(
                bad("tensors", f"dtypes {sorted(map(str, dtypes))}", "one dtype", "pass the buffer's `dtype`")
            )
        if any(tensor.is_meta for tensor in given):
            raise StateError(bad("tensors", "a meta tensor", "tensors with values", "make them first"))
        axes = communicators.axes_of(mesh)
        held = segment(layout, checked, axes)
        local = torch.zeros(held.size, dtype=dtype or dtypes.pop(), device=communicators.device_of(mesh))
        for index, tensor in enumerate(given):
            part = layout.tensor_range(index).intersect(held)
            if part.size:
                flat = tensor.detach().reshape(-1).narrow(0, part.start - layout.tensor_to_offset[index], part.size)
                local.narrow(0, part.start - held.start, part.size).copy_(flat)
        return cls(local, layout, checked, mesh, axes)

    @classmethod
    def from_local(
        cls, local: torch.Tensor, layout: GlobalLayout, mesh: Mesh, placements: Sequence[Placement]
    ) -> DBuffer:
        """A buffer from this rank's part itself, not copied. Collective over the mesh, as `from_tensors`.

        Raises:
            StateError: a part of another size than the placements give this rank.
            LayoutError: a layout that is none or doesn't fit the placements.
            PlanError: something that is no placement or no mesh.
        """
        checked, axes = checked_placements(layout, placements, mesh), communicators.axes_of(mesh)
        size = segment(layout, checked, axes).size
        given: Any = local
        if not isinstance(given, torch.Tensor) or tuple(given.shape) != (size,):
            got = str(tuple(given.shape)) if isinstance(given, torch.Tensor) else shown(given)
            raise StateError(bad("local", got, f"({size},), this rank's part", "see layout.rank_range"))
        return cls(local.detach(), layout, checked, mesh, axes)

    @classmethod
    def from_state(cls, state: ShardState, group: GroupSpec, *, compute: bool = False) -> DBuffer:
        """A group's buffer of a state, not copied: don't use it after the state was donated. Communicates nothing.

        Args:
            state: weights, gradients (finished or accumulating) or moments.
            group: one of ``state.spec.groups``.
            compute: the compute weights, in their placement, instead of the main buffer.

        Raises:
            StateError: a group of another plan, one that holds nothing (frozen, in gradients and moments), or no
                compute weights.

        >>> import mfsdp_fn as mf
        >>> params = {"w": torch.ones(2, 2, requires_grad=True)}
        >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
        >>> mf.DBuffer.from_state(state, state.spec.group_of("w")).local
        tensor([1., 1., 1., 1.])
        """
        check_state(state, "state")
        check_flag("compute", compute)
        number = group.number if isinstance(group, GroupSpec) else len(state.spec.groups)
        if number >= len(state.spec.groups) or state.spec.groups[number] != group:
            raise StateError(
                bad(
                    "group", repr(getattr(group, "name", group)), "a group of the state's plan", "see state.spec.groups"
                )
            )
        main = state.main[number]
        if tuple(main.shape) == NOTHING:
            raise StateError(
                bad("group", f"{group.name!r}, frozen", "a group that the state holds", "ask the state of weights")
            )
        if compute:
            local, placements = weights_of(group, main, state.compute[number]), group.placements.parameter
        else:
            local, placements = main, placement_of(state, group)
        return cls(local, group.layout, placements, group.mesh, group.axes)

    @property
    def held(self) -> Range:
        """This rank's part, in elements of the whole buffer."""
        return segment(self.layout, self.placements, self.axes)

    def get_tensor_view(self, index: int) -> torch.Tensor:
        """This rank's rows of a tensor, as a view of `local`; where it holds none, a tensor of its own without rows.

        Raises:
            LayoutError: there is no such tensor.
        """
        span, held, shape = self.layout.tensor_range(index), self.held, self.layout.tensor_shapes[index]
        part = span.intersect(held)
        cut = bool(sharded_axes(self.placements))
        if not part.size:
            return self.local.new_empty((0, *self.layout.row_shape(index)) if cut else shape)
        rows = self.local.narrow(0, part.start - held.start, part.size)
        return rows.view((-1, *self.layout.row_shape(index)) if cut and shape else shape)

    def full_tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, whole, as views of one buffer. Communicates what `redistribute` to Replicate does."""
        whole = self.redistribute(tuple(Replicate() for _ in self.placements))
        return tuple(whole.get_tensor_view(index) for index in range(len(self.layout.tensor_shapes)))

    def redistribute(
        self,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype | None = None,
        layout: GlobalLayout | None = None,
    ) -> DBuffer:
        """The same tensors under other placements, in another layout or dtype.

        In this order, each where it applies; N is an axis' size, bytes are of this rank's buffer at that step:

        1. Sharded axes that don't stay sharded are gathered, outermost first: one all-gather an axis, receiving
           (N-1)/N of the result. Sharded axes stay if they are sharded before and after, and so are all sharded axes
           inside them.
        2. Another `layout`: one ``all_to_all_single`` over the axes that stayed, sending only elements that change
           their rank; none at all if no element does, on any rank. RowAtomic, BlockAtomic and TensorAtomic differ by
           their layouts, so this is how one becomes another.
        3. Axes that become sharded, innermost first: Partial by one reduce-scatter, sending (N-1)/N; Replicate by
           copying a slice.
        4. Partial axes that become Replicate, innermost first: one all-reduce each.

        A cast comes before step 1 if it makes the wire narrower and nothing is summed, else after step 4. Without any
        change the result shares `local`. Not differentiable.

        Args:
            placements: one a mesh axis, outer to inner. A Partial axis may stay so.
            dtype: of the result; by default the buffer's.
            layout: of the result: the same tensors, laid out otherwise.

        Raises:
            StateError: an axis that would become Partial, a sum of bool or float8, or communication over an
                `AbstractMesh`.
            LayoutError: a layout of other tensors, or one that doesn't fit the placements, such as TensorAtomic in a
                layout that cuts tensors.
            PlanError: something that is no placement.
        """
        check_dtype(dtype)
        target = self.layout if layout is None else layout
        check_layout(target)
        if target.tensor_shapes != self.layout.tensor_shapes:
            raise LayoutError(
                bad(
                    "layout",
                    f"tensors {[tuple(shape) for shape in target.tensor_shapes]}",
                    f"{[tuple(shape) for shape in self.layout.tensor_shapes]}, as in the buffer",
                    "lay out the same tensors in the same order",
                )
            )
        checked = checked_placements(target, placements, self.mesh)
        for axis, (old, new) in enumerate(zip(self.placements, checked, strict=True)):
            if isinstance(new, Partial) and not isinstance(old, Partial):
                raise StateError(
                    bad(
                        "placements",
                        f"{new} on axis {axis}, which is {old}",
                        "Partial only where the buffer is Partial",
                        "make a buffer of summands with from_tensors or from_local",
                    )
                )
        have, wanted = self.local.dtype, dtype or self.local.dtype
        sums = any(isinstance(old, Partial) and old != new for old, new in zip(self.placements, checked, strict=True))
        if sums and (have == torch.bool or (have.is_floating_point and have.itemsize == 1)):
            raise StateError(bad("placements", f"a sum of {have}", "a dtype that backends add", "cast it first"))
        local = self.local.to(wanted) if not sums and wanted.itemsize < have.itemsize else self.local
        local = redistribute(local, self.layout, self.placements, target, checked, self.mesh, self.axes)
        return DBuffer(local.to(wanted), target, checked, self.mesh, self.axes)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What two buffers must share to be combined leaf by leaf.

    The mesh by its ranks: equality of meshes includes a thread's number.
    """

    layout: GlobalLayout
    placements: tuple[Placement, ...]
    ranks: tuple[int, ...]
    mesh: Mesh = dataclasses.field(compare=False, repr=False)
    axes: tuple[Axis, ...] = dataclasses.field(compare=False, repr=False)


def flatten_buffer(buffer: DBuffer) -> tuple[tuple[torch.Tensor], _Static]:
    """The leaf and the static part, for tree libraries."""
    ranks = communicators.ranks_of(buffer.mesh)
    return (buffer.local,), _Static(buffer.layout, buffer.placements, ranks, buffer.mesh, buffer.axes)


def unflatten_buffer(cls: type, static: _Static, children: Any) -> Any:
    """The buffer again; its leaf may be anything that a tree function returned."""
    (local,) = children
    return cls(local, static.layout, static.placements, static.mesh, static.axes)


def _flatten_for_optree(buffer: Any) -> tuple[Any, ...]:
    return *flatten_buffer(buffer), ("local",)


def _unflatten_for_optree(static: Any, children: Any) -> Any:
    return unflatten_buffer(DBuffer, static, children)


_node: Any = DBuffer  # optree's annotations want a collection
optree.register_pytree_node(_node, _flatten_for_optree, _unflatten_for_optree, namespace=EVERYWHERE)
