"""What a compiler must not compute again from forward's weights, which are gone by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mfsdp_fn as mf
from mfsdp_fn.graph import weights_read_late
from models import batch_of, bilinear, block, mesh_of
from pool import run_ranks


def own_unit_loss(state: mf.ShardState, batch: Any) -> torch.Tensor:
    tokens, target = batch
    e = mf.unshard(state["embed"] if "embed" in state.spec.units else state[""])
    e = (e if isinstance(e, torch.Tensor) else e["embed"])[tokens]
    x = e
    for name in state.spec.units_matching("blocks.*"):
        x = block(mf.unshard(state[name]), e, x)
    return (x * target).sum()


def found(rank: int, world: int, units: tuple[str, ...], stored: bool) -> list[str]:
    torch._dynamo.reset()
    names: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        names.extend(str(node.target) for node in weights_read_late(module.graph))
        return module.forward

    params, precision = bilinear(), mf.MixedPrecisionPolicy(compute=torch.float64, main=torch.float32)
    runtime = mf.RuntimePolicy(store_compute_weights=stored)
    spec = mf.plan(params, mesh_of(world), mf.zero3(), units=units, precision=precision, runtime=runtime)
    mf.compile(mf.value_and_grad(own_unit_loss), backend=backend)(mf.shard(params, spec), batch_of(0, 0, rank))
    return names


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("units", [("blocks.*",), ("blocks.*", "embed")])
def test_an_embedding_is_kept_and_not_its_table(units: tuple[str, ...], stored: bool) -> None:
    for names in run_ranks(2, found, units, stored, timeout=120):
        assert "aten.index.Tensor" in names
        assert set(names) <= {"aten.index.Tensor", "aten.add.Tensor"}  # sums with a bias are read in backward too
