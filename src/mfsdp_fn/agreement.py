"""Whether all ranks planned the same: what they compare, and what they are told if not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from . import communicators, tensor_parallel
from .communicators import Mesh
from .errors import PlanError, bad
from .group import GroupSpec
from .mesh import AbstractMesh
from .runtime import RuntimePolicy
from .spec import LeafSpec, ShardSpec


def description(
    leaves: Sequence[LeafSpec], groups: Sequence[GroupSpec], mesh: Mesh, runtime: RuntimePolicy
) -> list[str]:
    """What ranks must agree on, a line a fact, leaves first."""
    lines = [
        f"leaf {leaf.path!r}: {tuple(leaf.shape)} {leaf.dtype} requires_grad={leaf.requires_grad} unit={leaf.unit!r} "
        f"group={leaf.group} index={leaf.index}{f' leading_dims={leaf.leading_dims}' if leaf.leading_dims > 1 else ''}"
        f"{tensor_parallel.description(leaf.parallel)}"
        for leaf in leaves
    ]
    for group in groups:
        numbers = hashlib.sha256(repr((group.layout.tensor_to_offset, group.layout.rank_to_offset)).encode())
        lines.append(
            f"group {group.name!r}: size={group.layout.size} layout={numbers.hexdigest()[:16]} "
            f"{group.placements} {group.dtypes} grad_scale={group.grad_scale}"
            + ("" if group.mesh is mesh else f" {_said(group.mesh)}")
        )
    lines.append(_said(mesh))
    lines.append(f"runtime {runtime}")
    return lines


def _said(mesh: Mesh) -> str:
    """A mesh as every rank sees it: the ranks of a cell (one set of experts, say) are not the other cells'."""
    return f"mesh {tuple(mesh.size(axis) for axis in range(mesh.ndim))} {mesh.mesh_dim_names}"


def agree(mesh: Mesh, spec: ShardSpec | None, failure: Exception | None) -> None:
    """Raise on every rank if a rank failed to plan or planned something else."""
    mine = spec.digest() if spec is not None else f"error: {failure}"
    meshes = () if spec is None or isinstance(mesh, AbstractMesh) else spec.meshes
    cells = tuple(communicators.ranks_of(one) for one in meshes)
    told = communicators.exchange_objects(mesh, (mine, communicators.this_rank(mesh), cells))
    digests = [digest for digest, _, _ in told]
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, text in enumerate(digests) if text.startswith("error: ")]
    if failed:
        rank, text = failed[0]
        raise PlanError(f"`params` could not be planned on rank {rank} of the mesh: {text.removeprefix('error: ')}")
    if all(digest == digests[0] for digest in digests):
        if not isinstance(mesh, AbstractMesh):
            _check_cells({rank: sets for _, rank, sets in told})
        return
    assert spec is not None
    described = communicators.exchange_objects(mesh, description(spec.leaves, spec.groups, spec.mesh, spec.runtime))
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = described[0], described[other]

    def leaves_of(lines: list[str]) -> list[str]:
        return [line for line in lines if line.startswith("leaf ")]

    if leaves_of(first) != leaves_of(second):  # the tree itself: leave out what follows from it
        first, second = leaves_of(first), leaves_of(second)
    line = next((i for i in range(max(len(first), len(second))) if first[i : i + 1] != second[i : i + 1]), 0)
    said = [lines[line] if line < len(lines) else "nothing more" for lines in (first, second)]
    raise PlanError(
        bad(
            "params",
            f"a plan that differs between ranks: rank 0 of the mesh has «{said[0]}», rank {other} has «{said[1]}»",
            "the same tree, in the same order, and the same options on every rank",
            "build the model the same way everywhere",
        )
    )


def _check_cells(cells: dict[int, tuple[tuple[int, ...], ...]]) -> None:
    """Refuse meshes by unit that are no partition of the default one: ranks of a cell have that very cell."""
    for rank, mine in cells.items():
        for number, cell in enumerate(mine):
            other = next((other for other in cell if cells[other][number] != cell), None)
            if other is not None:
                raise PlanError(
                    bad(
                        "mesh",
                        f"cell {list(cell)} on rank {rank} and {list(cells[other][number])} on rank {other}",
                        "cells that no two ranks see differently",
                        'give every rank its slice of one mesh: ep_mesh["edp"]',
                    )
                )
