"""Placements: how a flat buffer lies over one mesh axis, and the presets that combine them."""

from __future__ import annotations

import dataclasses
import enum

from .checks import is_integer, shown
from .errors import PlanError, bad


class ShardLayout(enum.Enum):
    """Whether rank segments are padded to one size or packed without padding (seed: layout_builder)."""

    PADDED = "padded"
    UNPADDED = "unpadded"


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a buffer lies over one mesh axis; see the subclasses."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank of the axis holds only a segment."""
        return isinstance(self, (RowAtomic, TensorAtomic))


@dataclasses.dataclass(frozen=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole buffer, with equal values."""


@dataclasses.dataclass(frozen=True)
class Partial(Placement):
    """Every rank of the axis holds a whole-sized summand; the value is the sum over ranks."""


@dataclasses.dataclass(frozen=True)
class RowAtomic(Placement):
    """Each rank holds a segment; no row (dim 0 slice) of a tensor is cut.

    With `ShardLayout.PADDED` all segments have one size, with ``UNPADDED`` nothing is padded.
    """


@dataclasses.dataclass(frozen=True)
class BlockAtomic(RowAtomic):
    """As `RowAtomic`, and no block of `block_size` rows, counted from a tensor's first, is cut.

    ``plan(…, block_size=n)`` makes it of every `RowAtomic`.
    """

    block_size: int = 1


@dataclasses.dataclass(frozen=True)
class TensorAtomic(Placement):
    """Each rank holds whole tensors: those it owns, as ``plan(…, owners=…)`` says. Nothing is padded.

    An owner may own nothing, and tensors of any shape can be owned. All sharded axes of a plan are TensorAtomic or
    none is.
    """


@dataclasses.dataclass(frozen=True)
class Placements:
    """One placement a mesh axis, outer to inner, for parameters, gradients and optimizer state.

    ``parameter`` is where compute weights rest between uses, ``gradient`` where gradients accumulate over
    microbatches, ``optimizer`` where main weights, moments and the finished gradient live.

    >>> zero3().gradient
    (RowAtomic(),)
    >>> hsdp().gradient
    (Partial(), RowAtomic())
    """

    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    @property
    def ndim(self) -> int:
        """Number of mesh axes these placements are for."""
        return len(self.parameter)


_R, _P, _S = Replicate(), Partial(), RowAtomic()


def ddp(*, axes: int = 1) -> Placements:
    """Everything replicated; gradients are all-reduced once a step. `axes` is the number of mesh axes.

    Raises:
        PlanError: not a positive number of axes.
    """
    if not is_integer(axes) or axes < 1:
        raise PlanError(bad("axes", shown(axes), "a positive number of mesh axes", "leave it out for one"))
    return Placements((_R,) * axes, (_P,) * axes, (_R,) * axes)


def zero1() -> Placements:
    """Optimizer state sharded: one reduce-scatter and one all-gather of every unit a step."""
    return Placements((_R,), (_P,), (_S,))


def zero2() -> Placements:
    """Gradients sharded too: one reduce-scatter a microbatch, one all-gather a step."""
    return Placements((_R,), (_S,), (_S,))


def zero3() -> Placements:
    """Weights sharded too: two all-gathers and one reduce-scatter of every unit a microbatch."""
    return Placements((_S,), (_S,), (_S,))


def hsdp() -> Placements:
    """`zero3` on the inner axis, replicas on the outer one; one outer all-reduce a step."""
    return Placements((_R, _S), (_P, _S), (_R, _S))


def hfsdp() -> Placements:
    """`zero3` on the inner axis, optimizer state sharded over both; one outer reduce-scatter and gather a step."""
    return Placements((_R, _S), (_P, _S), (_S, _S))


def sharded_axes(placement: tuple[Placement, ...]) -> tuple[int, ...]:
    """Indices of the axes over which a buffer is sharded, inner to outer.

    >>> sharded_axes(hfsdp().optimizer)
    (1, 0)
    """
    return tuple(axis for axis in reversed(range(len(placement))) if placement[axis].is_sharded)


def check_placements(placements: Placements, mesh_ndim: int, argument: str = "placements") -> None:
    """Refuse combinations that no sequence of transforms can serve; `argument` is what errors call them.

    Raises:
        PlanError: naming the role and axis that is wrong.
    """
    roles = {
        "parameter": placements.parameter,
        "gradient": placements.gradient,
        "optimizer": placements.optimizer,
    }
    for role, per_axis in roles.items():
        if not isinstance(per_axis, tuple):
            raise PlanError(
                bad(
                    f"placements.{role}",
                    repr(per_axis),
                    "a tuple with one placement a mesh axis",
                    "write (Replicate(), RowAtomic()), outer to inner",
                )
            )
        if len(per_axis) != mesh_ndim:
            raise PlanError(
                bad(
                    f"{argument}.{role}",
                    f"{len(per_axis)} placements",
                    f"one for each of the mesh's {mesh_ndim} axes, outer to inner",
                    "use a preset made for that many axes (ddp/zero1/zero2/zero3 for one, hsdp/hfsdp for two) "
                    "or pass a sub-mesh",
                )
            )
        for axis, placement in enumerate(per_axis):
            check_placement(f"placements.{role}", axis, placement)
    order = sharded_axes(placements.optimizer)
    for role, per_axis in roles.items():
        mine = sharded_axes(per_axis)
        if mine != order[: len(mine)]:
            raise PlanError(
                bad(
                    f"{argument}.{role}",
                    f"shards over axes {mine}",
                    f"the first of the optimizer's sharded axes, inner to outer {order}",
                    "shard the optimizer state over every axis that parameters or gradients are sharded over, "
                    "and leave out inner axes last",
                )
            )
        for axis, placement in enumerate(per_axis):
            if isinstance(placement, Partial) and role != "gradient":
                raise PlanError(
                    bad(
                        f"{argument}.{role}",
                        f"Partial on axis {axis}",
                        "Replicate or a sharded placement",
                        "only gradients can be partial",
                    )
                )
            if isinstance(placement, Replicate) and role == "gradient":
                raise PlanError(
                    bad(
                        f"{argument}.gradient",
                        f"Replicate on axis {axis}",
                        "Partial or a sharded placement",
                        "gradients arrive as summands: use Partial to reduce them once a step",
                    )
                )
    for axis in range(mesh_ndim):
        kinds = {per_axis[axis] for per_axis in roles.values() if per_axis[axis].is_sharded}
        if len(kinds) > 1:
            raise PlanError(
                bad(
                    argument,
                    f"{sorted(map(repr, kinds))} on axis {axis}",
                    "one kind of sharding an axis",
                    "all buffers of a group share one layout",
                )
            )
    if len({isinstance(placements.optimizer[axis], TensorAtomic) for axis in order}) > 1:
        raise PlanError(
            bad(
                "placements.optimizer",
                f"{placements.optimizer}",
                "TensorAtomic on all sharded axes or on none",
                "a tensor that has one owner can't be cut over another axis",
            )
        )


def check_placement(argument: str, axis: int, placement: object) -> None:
    """Refuse what is no placement.

    Raises:
        PlanError: naming the argument and the axis.
    """
    if not isinstance(placement, (Replicate, Partial, RowAtomic, TensorAtomic)):
        raise PlanError(
            bad(
                argument,
                f"{getattr(placement, '__name__', repr(placement))} on axis {axis}",
                "a placement",
                "write Replicate(), Partial(), RowAtomic(), BlockAtomic(n) or TensorAtomic()",
            )
        )
    size = placement.block_size if isinstance(placement, BlockAtomic) else 1
    if type(size) is not int or size < 1:
        raise PlanError(
            bad(
                argument,
                f"{placement} on axis {axis}",
                "a positive block size",
                "write RowAtomic() for single rows",
            )
        )


def with_block_size(placements: Placements, block_size: int) -> Placements:
    """Replace `RowAtomic` by `BlockAtomic(block_size)` when `block_size` is over 1."""
    if block_size == 1:
        return placements

    def swap(per_axis: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(BlockAtomic(block_size) if type(p) is RowAtomic else p for p in per_axis)

    return Placements(swap(placements.parameter), swap(placements.gradient), swap(placements.optimizer))
