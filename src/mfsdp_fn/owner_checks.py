"""What owner layouts are made of, refused where it can't be: mesh and axes, layout, tensor indices, owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import communicators
from .checks import check_mapping, is_integer, shown
from .communicators import Mesh
from .errors import PlanError, bad
from .layout import GlobalLayout
from .mesh import AbstractMesh, check_abstract_mesh


def checked_ranks(mesh: Mesh, layout: GlobalLayout, axes: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks that share the buffer, in its order.

    Raises:
        PlanError: not a mesh, a layout or axes; not as many ranks as the layout has.
    """
    checked_layout(layout)
    if not isinstance(mesh, Mesh):
        raise PlanError(bad("mesh", shown(mesh), "a DeviceMesh or an AbstractMesh", "pass the plan's mesh"))
    if isinstance(mesh, AbstractMesh):
        check_abstract_mesh(mesh)
    given: Any = axes
    if given is not None and (
        not isinstance(given, (tuple, list))
        or not all(is_integer(axis) and 0 <= axis < mesh.ndim for axis in given)
        or len(set(given)) < len(given)
    ):
        raise PlanError(
            bad("axes", shown(axes), f"different axes of the mesh's {mesh.ndim}, or None", "write (0,), or (1, 0)")
        )
    ranks = communicators.ranks_of(mesh, axes)
    if len(ranks) != layout.dp_size:
        raise PlanError(
            bad(
                "mesh",
                f"{len(ranks)} ranks that share the buffer",
                f"the layout's {layout.dp_size}",
                "pass the sub-mesh, or the `axes`, over which the buffer is sharded",
            )
        )
    return ranks


def checked_indices(layout: GlobalLayout, indices: Iterable[int], argument: str) -> list[int]:
    """The tensor indices, as a list.

    Raises:
        PlanError: one that the layout doesn't have.
    """
    try:
        found = list(indices)
    except TypeError:
        raise PlanError(bad(argument, shown(indices), "tensor indices", "write [0, 1]")) from None
    for index in found:
        if not is_integer(index) or not 0 <= index < len(layout.tensor_shapes):
            raise PlanError(
                bad(
                    argument,
                    f"tensor {shown(index)}",
                    f"indices of the layout's {len(layout.tensor_shapes)} tensors",
                    "count tensors as layout.tensor_shapes does",
                )
            )
    return found


def checked_layout(layout: Any) -> None:
    """Refuse what isn't a layout.

    Raises:
        PlanError: naming the argument.
    """
    if not isinstance(layout, GlobalLayout):
        raise PlanError(bad("layout", shown(layout), "a GlobalLayout", "pass group.layout, or build one"))


def checked_tensor_to_owner(layout: GlobalLayout, tensor_to_owner: Any) -> None:
    """Refuse what doesn't say owners by the layout's tensors.

    Raises:
        PlanError: naming the argument.
    """
    expected, fix = "owners by tensor index", "pass what assign_owner_work returned, or {0: 1}"
    check_mapping("tensor_to_owner", tensor_to_owner, expected, fix, PlanError)
    checked_indices(layout, tensor_to_owner, "tensor_to_owner")
    for index, owner in tensor_to_owner.items():
        if not is_integer(owner):
            raise PlanError(bad("tensor_to_owner", f"owner {shown(owner)} for tensor {index}", "a global rank", fix))
