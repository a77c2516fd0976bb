"""Owner layouts: which rank computes on which whole tensor of a group, and which parts of it lie where."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import communicators
from .checks import check_function, is_integer, shown
from .communicators import Mesh
from .errors import PlanError, bad
from .group import GroupSpec
from .layout import GlobalLayout, validate_row_atomic
from .owner_balance import CostFn, checked_loads, greedy, select_ge_2d_params, works_of
from .owner_checks import checked_indices, checked_ranks, checked_tensor_to_owner
from .placement import sharded_axes
from .ranges import Range

EligibleFn = Callable[[torch.Tensor], bool]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A holder's part of a tensor: elements [start, stop) of the flattened tensor."""

    rank: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, eq=False)
class GroupOwnerLayout:
    """A group's buffer layout and the owners of its participating tensors.

    Frozen and hashable; what an exchange needs to know is computed from it once, at first use, and kept with it.

    Args:
        mesh: the device mesh over which the buffer is sharded.
        layout: the buffer's layout, participating tensors and others.
        tensor_to_owner: participating tensor index to the owner's global rank, which must hold part of it (any
            of the ranks, if it has no elements). Copied.
        axes: the mesh axes that the buffer is sharded over, inner to outer; None for all of them. The first is the
            most significant digit of a shard's number.
        dtype: dtype of the tensors, for ranks that can't tell it from what they are given; see
            `scatter_from_owner`.

    Raises:
        PlanError: an owner that doesn't hold part of its tensor, an unknown index, a mesh of another size, or an
            argument that is not as described.
        LayoutError: a layout whose parts don't fit together.

    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> layout = build_for_row_atomic([(6, 4), (4, 4)], 2)
    >>> owners = GroupOwnerLayout(AbstractMesh((2,), ("dp",), rank=1), layout, {0: 1, 1: 1})
    >>> owners.this_rank, owners.pieces[0]
    (1, (Piece(rank=0, start=0, stop=20), Piece(rank=1, start=20, stop=24)))
    >>> owners.traffic()
    {(0, 1): 20}
    """

    mesh: Mesh
    layout: GlobalLayout
    tensor_to_owner: dict[int, int]
    axes: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        ranks = checked_ranks(self.mesh, self.layout, self.axes)
        validate_row_atomic(self.layout)
        checked_tensor_to_owner(self.layout, self.tensor_to_owner)
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise PlanError(bad("dtype", shown(self.dtype), "a torch.dtype or None", "write torch.float32, say"))
        # The caller's dict may change; what was computed from it would not.
        object.__setattr__(self, "tensor_to_owner", dict(self.tensor_to_owner))
        for index, owner in self.tensor_to_owner.items():
            held = [piece.rank for piece in self.pieces[index]]
            if not is_integer(owner) or owner not in (held or ranks):
                raise PlanError(
                    bad(
                        "tensor_to_owner",
                        f"owner {shown(owner)} for tensor {index}",
                        f"one of the global ranks that hold part of it, {held or list(ranks)}",
                        "use assign_owner_work or plan_owners, which choose among the holders",
                    )
                )

    @classmethod
    def from_group(
        cls,
        group: GroupSpec,
        *,
        cost_fn: CostFn | None = None,
        eligible_fn: EligibleFn | None = None,
        initial_loads: Mapping[int, float] | None = None,
    ) -> GroupOwnerLayout:
        """Choose a group's participating tensors and balance their owners over its optimizer shards.

        With a replicated axis (hsdp) owners are ranks of this rank's own replica. With two sharded axes (hfsdp)
        they are all ranks that hold a piece; the communicator over both is made here, collectively.

        Args:
            group: the group, from ``spec.groups``.
            cost_fn: as in `assign_owner_work`.
            eligible_fn: whether a tensor takes part, asked with a meta tensor; by default those with two
                dimensions or more.
            initial_loads: as in `assign_owner_work`.

        Raises:
            PlanError: not a group, or as in `assign_owner_work`.
        """
        if not isinstance(group, GroupSpec):
            raise PlanError(bad("group", shown(group), "a GroupSpec", "take one of spec.groups"))
        axes = sharded_axes(group.placements.optimizer)
        ranks = checked_ranks(group.mesh, group.layout, axes)
        works = works_of(group.layout, ranks, eligible(group, eligible_fn), cost_fn)
        return made(group, group.layout, greedy(works, checked_loads(initial_loads)))

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        # Seen from this rank, over this kind of mesh: plans for a layout are cached by it.
        where = (self.ranks, self.this_rank, communicators.world_of(self.mesh))
        return (*where, self.layout, tuple(self.tensor_to_owner.items()), self.dtype)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.ranks, self.layout.size, tuple(self.tensor_to_owner.items())))

    def __eq__(self, other: object) -> bool:
        # Not by mesh: equality of meshes includes a thread's number.
        return self is other or (isinstance(other, GroupOwnerLayout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that share the buffer, in buffer order."""
        return communicators.ranks_of(self.mesh, self.axes)

    @functools.cached_property
    def peers(self) -> communicators.Peers:
        """The same ranks with their communicator; over several axes, collective over them the first time."""
        return communicators.peers_of(self.mesh, self.axes)

    @functools.cached_property
    def this_rank(self) -> int:
        """Global rank of the caller."""
        return communicators.this_rank(self.mesh)

    @functools.cached_property
    def rank_ranges(self) -> dict[int, Range]:
        """Each rank's part of the buffer, by global rank, in buffer order."""
        return {rank: self.layout.rank_range(number) for number, rank in enumerate(self.ranks)}

    @functools.cached_property
    def pieces(self) -> dict[int, tuple[Piece, ...]]:
        """Each participating tensor's holders and their parts, in buffer order."""
        found = {}
        for index in sorted(self.tensor_to_owner):
            span = self.layout.tensor_range(index)
            parts = []
            for number in self.layout.ranks_of(index):
                held = self.layout.local_range(index, number)
                if held.size:
                    parts.append(Piece(self.ranks[number], held.start - span.start, held.stop - span.start))
            found[index] = tuple(parts)
        return found

    @functools.cached_property
    def mine(self) -> dict[int, Piece]:
        """This rank's part of each participating tensor of which it holds elements."""
        parts = ((index, piece) for index, pieces in self.pieces.items() for piece in pieces)
        return {index: piece for index, piece in parts if piece.rank == self.this_rank}

    @functools.cached_property
    def spots(self) -> dict[int, tuple[int, int]]:
        """Where each of `mine` lies in this rank's flat buffer: (start, elements)."""
        before = self.rank_ranges[self.this_rank].start
        starts = self.layout.tensor_to_offset
        return {index: (starts[index] + piece.start - before, piece.size) for index, piece in self.mine.items()}

    @functools.cached_property
    def owned(self) -> tuple[int, ...]:
        """The tensors that this rank owns."""
        return tuple(index for index in self.pieces if self.tensor_to_owner[index] == self.this_rank)

    @functools.cached_property
    def boundary(self) -> frozenset[int]:
        """The tensors that more than one rank holds: those that travel."""
        return frozenset(index for index, pieces in self.pieces.items() if len(pieces) > 1)

    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements that a gather moves, by (holder, owner); a scatter moves them back. The same on every rank."""
        moved: dict[tuple[int, int], int] = {}
        for index, pieces in self.pieces.items():
            owner = self.tensor_to_owner[index]
            for piece in pieces:
                if piece.rank != owner:
                    moved[piece.rank, owner] = moved.get((piece.rank, owner), 0) + piece.size
        return moved

    def only(self, indices: Iterable[int]) -> GroupOwnerLayout:
        """The same layout with these participating tensors only."""
        kept = frozenset(checked_indices(self.layout, indices, "indices"))
        return dataclasses.replace(
            self, tensor_to_owner={i: owner for i, owner in self.tensor_to_owner.items() if i in kept}
        )


def eligible(group: GroupSpec, eligible_fn: EligibleFn | None) -> list[int]:
    """Indices of the group's tensors that take part."""
    asks: Callable[[torch.Tensor], Any] = select_ge_2d_params if eligible_fn is None else eligible_fn
    check_function("eligible_fn", asks, "lambda tensor: tensor.ndim == 2", PlanError)
    chosen = []
    for index, shape in enumerate(group.layout.tensor_shapes):
        answer = asks(torch.empty(shape, dtype=group.dtype, device="meta"))
        if not isinstance(answer, bool):
            raise PlanError(
                bad("eligible_fn", f"{shown(answer)} for {group.paths[index]!r}", "True or False", "return a bool")
            )
        if answer:
            chosen.append(index)
    return chosen


def made(group: GroupSpec, layout: GlobalLayout, tensor_to_owner: dict[int, int]) -> GroupOwnerLayout:
    """The owner layout of a group, with its communicator."""
    axes = sharded_axes(group.placements.optimizer)
    owners = GroupOwnerLayout(group.mesh, layout, tensor_to_owner, axes, group.dtypes.main)
    _ = owners.peers  # a new communicator, if one is needed, comes about here and not inside a step
    return owners


def split_layout(layout: GlobalLayout, sizes: Mapping[int, tuple[int, ...]]) -> tuple[GlobalLayout, tuple[int, ...]]:
    """See some tensors as several: the same buffer with more, smaller tensors in it.

    Args:
        layout: the layout.
        sizes: for a tensor index, the rows (dim 0) of each part. A part of one row of a 3-D tensor stays 3-D.

    Returns:
        The finer layout, and the original index of each of its tensors.

    >>> from mfsdp_fn import build_for_row_atomic
    >>> fine, origin = split_layout(build_for_row_atomic([(6, 4)], 2), {0: (4, 2)})
    >>> fine.tensor_shapes, fine.tensor_to_offset, origin
    ((torch.Size([4, 4]), torch.Size([2, 4])), (0, 16), (0, 0))
    """
    shapes, offsets, origin, leading = [], [], [], []
    for index, (shape, start) in enumerate(zip(layout.tensor_shapes, layout.tensor_to_offset, strict=True)):
        for rows in sizes.get(index, (shape[0],) if shape else (1,)):
            shapes.append(torch.Size((rows, *shape[1:])) if shape else shape)
            offsets.append(start)
            leading += layout.leading_dims[index : index + 1]
            start += rows * math.prod(shape[1:])
            origin.append(index)
    fine = GlobalLayout(tuple(shapes), tuple(offsets), layout.size, layout.rank_to_offset, tuple(leading))
    return fine, tuple(origin)
