"""A mesh without processes, for planning on one machine what will run on many."""

from __future__ import annotations

import dataclasses
import math

from .checks import is_integer, shown
from .errors import PlanError, bad


@dataclasses.dataclass(frozen=True)
class AbstractMesh:
    """Shape and names of a device mesh, seen from one rank, with no process group behind it.

    Layouts, specs and plans can be made with it, and `shard` gives that rank's shards; whatever would
    communicate is refused.

    Args:
        shape: axis sizes, outer to inner.
        names: axis names, as `DeviceMesh.mesh_dim_names`.
        rank: the rank to see it from, row-major.

    >>> AbstractMesh((2, 4), ("outer", "inner"), rank=5).get_coordinate()
    (1, 1)
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    rank: int = 0

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Axis names, under the name `DeviceMesh` uses."""
        return self.names

    @property
    def device_type(self) -> str:
        """Buffers of an abstract mesh live on the CPU."""
        return "cpu"

    def size(self, axis: int | None = None) -> int:
        """Size of an axis, or of the whole mesh."""
        return math.prod(self.shape) if axis is None else self.shape[axis]

    def get_coordinate(self) -> tuple[int, ...]:
        """This rank's index on every axis."""
        rest, coordinate = self.rank, []
        for size in reversed(self.shape):
            coordinate.append(rest % size)
            rest //= size
        return tuple(reversed(coordinate))


def check_abstract_mesh(mesh: AbstractMesh) -> None:
    """Refuse a mesh that can't exist.

    Raises:
        PlanError: naming the field.
    """
    if not isinstance(mesh.shape, tuple) or not isinstance(mesh.names, tuple):
        raise PlanError(
            bad(
                "mesh",
                f"AbstractMesh({mesh.shape!r}, {mesh.names!r})",
                "two tuples",
                'write AbstractMesh((2,), ("dp",))',
            )
        )
    if not mesh.shape or not all(is_integer(size) and size > 0 for size in mesh.shape):
        raise PlanError(bad("mesh.shape", mesh.shape, "one or more positive axis sizes", "give each axis its size"))
    if len(mesh.names) != len(mesh.shape):
        raise PlanError(bad("mesh.names", mesh.names, f"{len(mesh.shape)} names", "name each axis"))
    if not all(isinstance(name, str) for name in mesh.names):
        raise PlanError(bad("mesh.names", shown(mesh.names), "strings", 'write ("dp",)'))
    if not is_integer(mesh.rank) or not 0 <= mesh.rank < mesh.size():
        raise PlanError(bad("mesh.rank", shown(mesh.rank), f"a rank in [0, {mesh.size()})", "give a rank of that mesh"))
