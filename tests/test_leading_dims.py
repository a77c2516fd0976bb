"""Tensors cut inside dim 0, as (E * a, b): every transform still gives and takes the logical (E, a, b)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import mfsdp_fn as mf
from mfsdp_fn.owner_planning import plan_owners
from models import EXACT, PRESETS, assert_equal, integers, mesh_of, trainable
from pool import run_ranks

SHAPES = {"experts": (5, 5, 4), "deep": (2, 3, 2, 3), "w": (5, 3), "scale": (), "none": (0, 4, 2), "b": (7,)}
LAYOUTS = ("padded", "unpadded", "auto")


def params_of(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    made = {name: integers(*shape, seed=i, high=8, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    return trainable(made)


def made(shape: tuple[int, ...], preset: str, layout: str, leading: Any, dtype: torch.dtype = torch.float64):
    params = params_of(dtype)
    spec = mf.plan(
        params,
        mesh_of(*shape),
        PRESETS[preset](),
        units=("experts",),
        precision=EXACT,
        shard_layout=layout,
        leading_dims=leading,
        grad_scale=float(math.prod(shape)),  # gradients are sums: a third is not exact
    )
    return mf.shard(params, spec), params


def data(name: str, micro: int, rank: int) -> torch.Tensor:
    return integers(*SHAPES[name], seed=100 + 10 * micro + rank, high=6)


def summed(world: int, micros: int) -> dict[str, torch.Tensor]:
    parts = {name: [data(name, micro, at) for micro in range(micros) for at in range(world)] for name in SHAPES}
    return {name: torch.stack(tensors).sum(0) for name, tensors in parts.items()}


def gradients(state: mf.ShardState, rank: int) -> mf.ShardState:
    def loss(state: mf.ShardState, micro: int) -> torch.Tensor:
        whole = mf.unshard(state)
        assert {name: tuple(p.shape) for name, p in whole.items()} == SHAPES
        return sum(((p * data(name, micro, rank)).sum() for name, p in whole.items()), torch.zeros(()))

    grads = None
    for micro in range(2):
        grads = mf.value_and_grad(loss, is_last_microbatch=micro == 1, accumulate=grads)(state, micro)[1]
    assert grads is not None
    return grads


def transforms(rank: int, world: int, shape: tuple[int, ...], presets: tuple[str, ...]) -> set[int]:
    rows = set()
    for preset in presets:
        for layout, leading in (("padded", 2), ("unpadded", {"experts": 2, "deep": 3})):
            state, params = made(shape, preset, layout, leading)
            for group in state.spec.groups:
                buffer = mf.DBuffer.from_state(state, group)
                for index, view in group.local_views(buffer.local, group.main_range).items():
                    assert torch.equal(buffer.get_tensor_view(index), view)
            assert_equal(mf.unshard(state), params, (preset, layout))
            grads = gradients(state, rank)
            wanted = summed(world, micros=2)
            assert_equal(mf.unshard(grads), wanted, (preset, layout))
            mine = {name: data(name, 0, rank) for name in SHAPES}
            reduced = mf.finish_grad_sync(mf.reduce(mine, state.spec))
            assert_equal(mf.unshard(reduced), summed(world, micros=1), (preset, layout))
            found = mf.to_dtensors(state)
            for name, value in params.items():
                got = found[name].redistribute(placements=[Replicate()] * len(shape)).to_local()
                assert torch.equal(got, value.detach()), (preset, layout, name)
            for group, main in zip(state.spec.groups, state.main, strict=True):
                for index, view in group.local_views(main, group.main_range).items():
                    assert view.shape[1:] == group.layout.row_shape(index)
                    if group.paths[index] == "experts":
                        assert view.shape[1:] == (4,)
                        rows.add(len(view))
    return rows


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values_and_gradients(world: int) -> None:
    rows = set().union(*run_ranks(world, transforms, (world,), ("zero1", "zero3")))
    assert any(n % 5 for n in rows) == (world > 1)  # some cut lies inside an expert


def test_two_axes() -> None:
    run_ranks(4, transforms, (2, 2), ("hsdp", "hfsdp"))


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def optimizers(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    """The updates of three steps of each optimizer are those of the plan that cuts dim 0 only, bit for bit."""

    class Halve:
        def init(self, params: Any) -> tuple[()]:
            return ()

        def update(self, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
            assert all(updates[name].shape == params[name].shape for name in SHAPES)
            return {name: -0.5 * grad for name, grad in updates.items()}, state

    found = []
    choices = {
        "adamw": mf.optim.adamw(lr=0.1, weight_decay=0.1),
        "muon": mf.optim.muon(lr=0.1, fallback=mf.optim.sgd(lr=0.1)),
        "batched muon": mf.optim.muon(lr=0.1, fallback=mf.optim.sgd(lr=0.1), batched=True, buckets=1),
        "transformation": mf.optim.from_gradient_transformation(Halve()),
    }
    for name, optimizer in choices.items():
        for layout in ("padded", "unpadded"):
            results = []
            for leading in (1, {"experts": 2, "deep": 3}):
                state, _ = made((world,), "zero3", layout, leading, torch.float32)
                opt_state = optimizer.init(state)
                for _ in range(3):
                    state, opt_state = optimizer.step(gradients(state, rank), opt_state, state)
                results.append(whole(mf.unshard(state)))
            assert_equal(results[1], results[0], (name, layout))
            found.append(results[0])
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_optimizers(world: int) -> None:
    run_ranks(world, optimizers)


def owners(rank: int, world: int) -> list[tuple[int, ...]]:
    shapes = []
    for layout in LAYOUTS:
        state, params = made((world,), "zero3", layout, 2)
        for group, owner_layout in plan_owners(state.spec).items():
            views = group.local_views(state.main[group.number], group.main_range)
            shards = {index: views[index] for index in owner_layout.mine}
            fulls = mf.gather_to_owner(shards, owner_layout)
            assert set(fulls) == set(owner_layout.owned)
            for index, full in fulls.items():
                assert torch.equal(full, params[group.paths[index]].detach())
                shapes.append(tuple(full.shape))
            back = mf.scatter_from_owner({i: 2 * full for i, full in fulls.items()}, owner_layout)
            at = owner_layout.ranks.index(owner_layout.this_rank)
            for index, shard in back.items():
                assert shard.shape == group.layout.local_shape(index, at)
                assert torch.equal(shard, 2 * views[index])
        doubled = mf.owner_map(lambda full: 2 * full, batched=True)(state, plan_owners(state.spec))
        assert_equal(mf.unshard(doubled), {name: p * (2 if p.dim() > 1 else 1) for name, p in params.items()}, layout)
    return shapes


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_owners_see_the_logical_tensor(world: int) -> None:
    seen = [shape for shapes in run_ranks(world, owners) for shape in shapes]
    assert sorted(seen) == sorted([(5, 5, 4), (2, 3, 2, 3), (5, 3), *([(0, 4, 2)] if (0, 4, 2) in seen else [])] * 3)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(integers(3, 5, 4, seed=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eab,nb->ena", self.weight, x).sum(0)


def called(rank: int, world: int) -> None:
    module = Experts()
    spec = mf.plan(
        mf.params_of(module), mesh_of(world), mf.zero3(), precision=EXACT, leading_dims=2, grad_scale=float(world)
    )
    state, x = mf.shard(mf.params_of(module), spec), integers(2, 4, seed=3 + rank)

    def loss(state: mf.ShardState, x: torch.Tensor) -> torch.Tensor:
        return mf.functional_call(module, state, (x,)).sum()

    value, grads = mf.value_and_grad(loss)(state, x)
    assert torch.equal(value, module(x).sum())
    inputs = [integers(2, 4, seed=3 + at) for at in range(world)]
    expected = torch.autograd.grad(torch.stack([module(given).sum() for given in inputs]).sum(), module.weight)[0]
    assert torch.equal(mf.unshard(grads)["weight"], expected)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_functional_call(world: int) -> None:
    run_ranks(world, called)


def test_local_shapes() -> None:
    params = {"e": torch.zeros(2, 3, 4, requires_grad=True)}
    spec = mf.plan(params, mf.AbstractMesh((4,), ("dp",), 1), mf.zero3(), leading_dims=2)
    layout = spec.groups[0].layout
    assert (layout.tensor_shapes, layout.leading_dims) == ((torch.Size([2, 3, 4]),), (2,))
    assert [tuple(layout.local_shape(0, rank)) for rank in range(4)] == [(2, 4), (2, 4), (2, 4), (0, 4)]
    assert spec.leaf("e").leading_dims == 2 and spec.leaf("e").shape == (2, 3, 4)
    assert spec.digest() != mf.plan(params, mf.AbstractMesh((4,), ("dp",), 1), mf.zero3()).digest()


def test_rules_about_rows_are_refused_where_nothing_is_cut() -> None:
    mesh = mf.AbstractMesh((2,), ("dp",))
    rules: dict[str, Any] = {"leading_dims": 2, "split_by_row_size": True, "shard_layout": "unpadded"}
    for name, value in rules.items():
        with pytest.raises(mf.PlanError, match=f"`{name}` got {value!r}; expected none where nothing is cut"):
            mf.plan(params_of(), mesh, mf.ddp(), precision=EXACT, **{name: value})
    spec = mf.plan(params_of(), mesh, mf.ddp(), precision=EXACT, shard_layout="auto")  # nothing to choose
    assert spec == mf.plan(params_of(), mesh, mf.ddp(), precision=EXACT)
