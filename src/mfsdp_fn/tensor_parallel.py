"""Parameters that are DTensors over other axes than the data-parallel ones: their local part, and the way back.

A rank plans and shards what it holds of such a tensor (`to_local`); `unshard` gives the DTensor again, on its own mesh
with its own placements. `DTensor.from_local` is differentiable: a gradient that is partial over those axes is made
into the parameter's placement by DTensor itself, before the data-parallel reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TensorPlacement

from .communicators import Mesh, ranks_of, this_rank
from .errors import PlanError, StateError, bad
from .mesh import AbstractMesh


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How a DTensor lies over its mesh; `shape` and `stride` are the whole tensor's."""

    placements: tuple[TensorPlacement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    mesh: DeviceMesh = dataclasses.field(compare=False, repr=False)

    def is_whole(self, dims: Sequence[int]) -> bool:
        """Whether none of these dimensions is cut."""
        return not any(isinstance(placement, Shard) and placement.dim in dims for placement in self.placements)


def parallel_of(tensor: torch.Tensor) -> TensorParallel | None:
    """How a DTensor lies over its mesh; None for any other tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return TensorParallel(tensor.placements, tensor.shape, tensor.stride(), tensor.device_mesh)


def planned(tensor: torch.Tensor, path: str) -> TensorParallel | None:
    """What a plan keeps of a parameter: as `parallel_of`, and contiguous, as views of gathered buffers are.

    Raises:
        PlanError: a DTensor that can't be served, naming its path.
    """
    found = parallel_of(tensor)
    if found is None:
        return None
    odd = [placement for placement in found.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise PlanError(
            bad(
                "params",
                f"a DTensor with {odd[0]} at {path!r}",
                "Shard and Replicate",
                "redistribute it before planning",
            )
        )
    if found.mesh.get_coordinate() is None:
        raise PlanError(
            bad("params", f"a DTensor without this rank at {path!r}", "its mesh to hold it", "plan its parts")
        )
    stride = torch.empty(found.shape, device="meta").stride()
    return dataclasses.replace(found, stride=stride)


def check_beside(parallel: TensorParallel, mesh: Mesh, path: str) -> None:
    """Refuse a DTensor whose axes are no other ones than the data-parallel axes.

    Raises:
        PlanError: naming the path.
    """
    if isinstance(mesh, AbstractMesh):
        raise PlanError(
            bad(
                "params",
                f"a DTensor at {path!r} with an AbstractMesh",
                "plain tensors there",
                "plan meta tensors of the local shapes, or use a DeviceMesh",
            )
        )
    shared = sorted((set(ranks_of(parallel.mesh)) & set(ranks_of(mesh))) - {this_rank(mesh)})
    if shared:
        raise PlanError(
            bad(
                "params",
                f"a DTensor at {path!r} over ranks {sorted(ranks_of(parallel.mesh))}, of which {shared} are on the "
                f"data-parallel mesh too",
                "DTensors over other axes than data-parallel ones",
                'pass the sub-mesh without those axes: mesh["dp"]',
            )
        )
    if parallel.mesh.device_type != mesh.device_type:
        raise PlanError(
            bad(
                "params",
                f"a {parallel.mesh.device_type} DTensor at {path!r}",
                f"one on the mesh's device, {mesh.device_type}",
                "move the model first",
            )
        )


def same_mesh(one: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes have the same ranks in the same places."""
    if one is other:
        return True
    return (
        one.device_type == other.device_type
        and one.mesh_dim_names == other.mesh_dim_names
        and torch.equal(one.mesh, other.mesh)
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without gradient; another tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


def whole_of(parallel: TensorParallel, local: torch.Tensor) -> DTensor:
    """The DTensor of which `local` is this rank's part. Differentiable; communicates nothing."""
    return DTensor.from_local(
        local,
        parallel.mesh,
        parallel.placements,
        run_check=False,
        shape=parallel.shape,
        stride=parallel.stride,
    )


def check_as_planned(tensor: torch.Tensor, parallel: TensorParallel | None, argument: str, path: str) -> None:
    """Refuse a tensor that lies otherwise over other axes than was planned.

    Raises:
        StateError: naming the path.
    """
    got = parallel_of(tensor)
    if got is None and parallel is None:
        return
    if got is None or parallel is None or got.placements != parallel.placements or got.shape != parallel.shape:
        same = False
    else:
        same = same_mesh(got.mesh, parallel.mesh)
    if not same:
        raise StateError(
            bad(
                argument,
                f"{_said(got)} at {path!r}",
                f"{_said(parallel)}, as planned",
                "plan again, or redistribute it",
            )
        )


def local_gradient(grad: torch.Tensor, parallel: TensorParallel | None, path: str) -> torch.Tensor:
    """This rank's part of a gradient in the parameter's placement; a partial one is reduced over the DTensor's mesh.

    Raises:
        StateError: a gradient that lies over another mesh, naming the path.
    """
    got = parallel_of(grad)
    if got is None and parallel is None:
        return grad
    if got is None or parallel is None or not same_mesh(got.mesh, parallel.mesh) or got.shape != parallel.shape:
        expected = f"a gradient that lies as {_said(parallel)}, as planned"
        raise StateError(
            bad("grads", f"{_said(got)} at {path!r}", expected, "give autograd's gradient of the parameter")
        )
    assert isinstance(grad, DTensor)
    if grad.placements != parallel.placements:
        grad = grad.redistribute(parallel.mesh, parallel.placements)
    return local_of(grad)


def _said(parallel: TensorParallel | None) -> str:
    if parallel is None:
        return "a plain tensor"
    return f"a DTensor of shape {tuple(parallel.shape)} with {parallel.placements} over {parallel.mesh.mesh_dim_names}"


def description(parallel: TensorParallel | None) -> str:
    """What ranks compare."""
    if parallel is None:
        return ""
    return f" of {tuple(parallel.shape)} {parallel.placements} over {tuple(parallel.mesh.shape)}"
