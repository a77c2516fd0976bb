"""The mesh of a simulated rank: what a `DeviceMesh` says of itself, over ranks that are threads of this process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from .errors import SimulationError, bad
from .simulation import Collective, Communicator, World


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedMesh:
    """A device mesh on the CPU, seen from one simulated rank. `testing.simulate` makes them.

    It answers what a `DeviceMesh` does about shapes and places. There is no process group behind it, so nothing that
    wants one takes it: `to_dtensors`, `get_group`, torch.distributed.

    Args:
        world: what the simulation's ranks share.
        mesh: the global ranks, as `DeviceMesh.mesh`.
        mesh_dim_names: axis names, outer to inner.
        rank: the global rank from which it is seen.
    """

    world: World = dataclasses.field(repr=False)
    mesh: torch.Tensor = dataclasses.field(repr=False)
    mesh_dim_names: tuple[str, ...]
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, outer to inner."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.mesh.ndim

    @property
    def device_type(self) -> str:
        """Buffers of a simulated rank live on the CPU."""
        return "cpu"

    def size(self, axis: int | None = None) -> int:
        """Size of an axis, or of the whole mesh."""
        return self.mesh.numel() if axis is None else self.mesh.shape[axis]

    def get_coordinate(self) -> tuple[int, ...]:
        """This rank's index on every axis."""
        return tuple((self.mesh == self.rank).nonzero()[0].tolist())

    def get_rank(self) -> int:
        """This rank's global number."""
        return self.rank

    def get_local_rank(self, axis: int | str | None = None) -> int:
        """This rank's index on one axis; on a mesh of one axis it need not be named."""
        if axis is None and self.ndim > 1:
            raise SimulationError(bad("axis", None, f"one of {self.mesh_dim_names}", "name the axis"))
        return self.get_coordinate()[0 if axis is None else self._number(axis)]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What this rank has launched so far, in order, on all meshes of the simulation.

        The exchange of objects with which `plan` compares digests is not among them.
        """
        return tuple(self.world.launched[self.rank])

    def __getitem__(self, names: str | tuple[str, ...]) -> SimulatedMesh:
        """The part of the mesh that this rank shares along some axes, in the mesh's order."""
        names = (names,) if isinstance(names, str) else tuple(names)
        kept = [self._number(name) for name in names]
        if kept != sorted(set(kept)):
            raise SimulationError(bad("names", names, f"names out of {self.mesh_dim_names}, in order", "sort them"))
        return SimulatedMesh(self.world, self._along(kept), names, self.rank)

    def reshaped(self, shape: Sequence[int], names: Sequence[str]) -> SimulatedMesh:
        """Another mesh over the same ranks, row-major, as a second `init_device_mesh` makes one."""
        checked = check_shape(tuple(shape), tuple(names))
        if math.prod(checked[0]) != self.size():
            raise SimulationError(bad("shape", tuple(shape), f"axis sizes for {self.size()} ranks", "mend the sizes"))
        return SimulatedMesh(self.world, self.mesh.reshape(checked[0]), checked[1], self.rank)

    def get_group(self, axis: int | str | None = None) -> NoReturn:
        """Refused: there is none."""
        raise SimulationError(
            bad("mesh", "a simulated mesh, which has no process group", "a DeviceMesh", "run this on real processes")
        )

    def communicator(self, axes: Sequence[int]) -> Communicator:
        """The ranks that share `axes`."""
        ranks = tuple(self._along(sorted(axes)).reshape(-1).sort().values.tolist())
        axis = "+".join(self.mesh_dim_names[number] for number in sorted(axes))
        return Communicator(self.world, axis, ranks, ranks.index(self.rank))

    def _along(self, axes: Sequence[int]) -> torch.Tensor:
        here = self.get_coordinate()
        return self.mesh[tuple(slice(None) if axis in axes else here[axis] for axis in range(self.ndim))]

    def _number(self, axis: int | str) -> int:
        if axis in self.mesh_dim_names:
            return self.mesh_dim_names.index(str(axis))
        if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < self.ndim:
            raise SimulationError(bad("axis", repr(axis), f"one of {self.mesh_dim_names}", "name an axis of the mesh"))
        return axis


_NAMES = {1: ("dp",), 2: ("outer", "inner")}


def check_shape(shape: Any, names: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Axis sizes and names, with defaults filled in.

    Raises:
        SimulationError: naming the argument.
    """
    sizes = shape if isinstance(shape, tuple) else (shape,)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise SimulationError(
            bad("world_size", repr(shape), "a positive number of ranks, or a tuple of axis sizes", "write 4, or (2, 2)")
        )
    names = _NAMES.get(len(sizes)) if names is None else names
    if not isinstance(names, tuple) or len(set(names)) != len(sizes) or not all(isinstance(n, str) for n in names):
        raise SimulationError(
            bad("names", repr(names), f"a tuple of {len(sizes)} different axis names", "name each axis, outer to inner")
        )
    return sizes, names
