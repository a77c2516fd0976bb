"""`to_dtensors`: values survive redistribution, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import mfsdp_fn as mf
from mfsdp_fn.testing import single_rank
from models import PRESETS, layouts_of, mesh_of
from pool import run_ranks


def tree() -> dict[str, torch.Tensor]:
    shapes: list[Any] = [(4, 2), (), (3,), (0, 3), (1, 4), (5, 4), (7, 3)]
    params = {f"p{i}": torch.arange(float(torch.Size(s).numel())).view(s) + i for i, s in enumerate(shapes)}
    return {name: value.requires_grad_() for name, value in params.items()} | {"frozen": torch.ones(1, 4)}


def values_survive(rank: int, world: int, shape: tuple[int, ...], presets: list[str]) -> None:
    params, mesh = tree(), mesh_of(*shape)
    assert isinstance(mesh, DeviceMesh)
    for preset in presets:
        for layout in layouts_of(preset, "padded", "unpadded"):
            spec = mf.plan(params, mesh, PRESETS[preset](), units=("p5",), shard_layout=layout)
            state = mf.shard(params, spec)
            found = mf.to_dtensors(state)
            assert list(found) == list(params)
            for name, value in params.items():
                whole = found[name].redistribute(mesh, [Replicate()] * len(shape)).to_local()
                assert torch.equal(whole, value.detach()), (preset, layout, name)
                assert found[name].shape == value.shape
            # A frozen group of moments holds nothing, on every rank alike.
            assert "frozen" not in mf.to_dtensors(mf.zeros_like(state))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_survive_redistribution(world: int) -> None:
    run_ranks(world, values_survive, (world,), ["ddp", "zero1", "zero3"])


def test_values_survive_on_two_axes() -> None:
    run_ranks(4, values_survive, (2, 2), ["hsdp", "hfsdp"])


def test_where_rows_agree_nothing_is_copied() -> None:
    with single_rank() as mesh:
        params = {"w": torch.ones(2, 2, requires_grad=True)}
        state = mf.shard(params, mf.plan(params, mesh, mf.zero3()))
        assert mf.to_dtensors(state)["w"].to_local().data_ptr() == state.main[0].data_ptr()


def test_an_abstract_mesh_is_refused() -> None:
    params = {"w": torch.ones(2, 2, requires_grad=True)}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    with pytest.raises(mf.StateError, match=r"`state` got a state on an AbstractMesh; expected one on a DeviceMesh"):
        mf.to_dtensors(state)
