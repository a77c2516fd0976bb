"""Parameters that are DTensors over a tensor-parallel axis, sharded over the data-parallel one."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mfsdp_fn as mf
from counting import Counting
from models import (
    DIM,
    EXACT,
    PRESETS,
    VOCAB,
    accumulated,
    assert_equal,
    batch_of,
    integers,
    plain_training,
    sgd,
    trainable,
)
from pool import run_ranks

Params = dict[str, torch.Tensor]
DEPTH = 4
HIDDEN = 6  # 3 rows a tensor-parallel rank, 2 and 1 of them on the data-parallel ones
LAYOUTS: dict[str, Any] = {"up": Shard(0), "down": Shard(1), "mix": Replicate()}


@functools.cache
def world_mesh(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def whole() -> Params:
    params = {"embed": integers(VOCAB, DIM, seed=1)}
    for i in range(DEPTH):
        params[f"blocks.{i}.up"] = integers(HIDDEN, DIM, seed=10 + i, high=1)
        params[f"blocks.{i}.down"] = integers(DIM, HIDDEN, seed=20 + i, high=1)
        params[f"blocks.{i}.mix"] = integers(DIM, DIM, seed=30 + i, high=1)
        params[f"blocks.{i}.bias"] = integers(DIM, seed=40 + i)
    return trainable(params)


def parallel(params: Params, tp: DeviceMesh) -> Params:
    """Matrices of blocks as DTensors."""
    found = {}
    for name, value in params.items():
        placement = LAYOUTS.get(name.split(".")[-1])
        value = value.detach().clone()
        found[name] = (value if placement is None else distribute_tensor(value, tp, [placement])).requires_grad_()
    return found


def run_block(p: Any, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """Linear in each of the unit's tensors up to a product of two: exact for small integers."""
    out = F.linear(F.linear(e, p["up"]), p["down"]) + F.linear(e, p["mix"])
    if isinstance(out, DTensor):  # partial over tp
        out = out.redistribute(placements=[Replicate()]).to_local()
    return x + out + p["bias"]


def sharded_loss(state: mf.ShardState, batch: Any, factor: float, tp: DeviceMesh | None) -> torch.Tensor:
    tokens, target = batch
    e = mf.unshard(state[""])["embed"][tokens]
    given = e if tp is None else DTensor.from_local(e, tp, [Replicate()])
    x = e
    for name in state.spec.units_matching("blocks.*"):
        x = run_block(mf.unshard(state[name]), x, given)
    return (x * target).sum() * factor


def plain_loss(params: Params, batch: Any, factor: float = 1.0) -> torch.Tensor:
    tokens, target = batch
    e = params["embed"][tokens]
    x = e
    for i in range(DEPTH):
        x = run_block({key: params[f"blocks.{i}.{key}"] for key in ("up", "down", "mix", "bias")}, x, e)
    return (x * target).sum() * factor


def made(preset: str, dp: int, tp: int, **options: Any) -> tuple[mf.ShardState, DeviceMesh]:
    mesh = world_mesh(dp, tp)
    params = parallel(whole(), mesh["tp"])
    options = {"units": ("blocks.*",), "precision": EXACT} | options
    return mf.shard(params, mf.plan(params, mesh["dp"], PRESETS[preset](), **options)), mesh


def fulls(tree: Params) -> Params:
    """DTensors over tp as whole tensors. Not `full_tensor`: for Gloo's coalesced all-gathers see collectives.py."""
    found = {}
    for name, value in tree.items():
        found[name] = value
        if isinstance(value, DTensor):
            parts: list[Any] = [None] * value.device_mesh.size()
            torch.distributed.all_gather_object(parts, value.to_local().detach(), group=value.device_mesh.get_group())
            (placement,) = value.placements
            found[name] = torch.cat(parts, placement.dim) if isinstance(placement, Shard) else parts[0]
    return found


def part_of(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor that lies as `like` does."""
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


def train(rank: int, world: int, dp: int, presets: list[str]) -> None:
    tp = world // dp
    expected = plain_training(whole(), dp, steps=3, micros=2, loss=plain_loss)
    for number, preset in enumerate(presets):
        state, mesh = made(preset, dp, tp, shard_layout="unpadded" if number % 2 else "padded")
        for step in range(3):
            batches: list[Any] = [batch_of(step, micro, mesh.get_local_rank("dp")) for micro in range(2)]
            state = sgd(state, accumulated(sharded_loss, state, batches, float(dp), mesh["tp"]))
        found = mf.unshard(state)
        for name, value in found.items():
            assert isinstance(value, DTensor) == (name.split(".")[-1] in LAYOUTS)
            if isinstance(value, DTensor):
                assert value.placements == (LAYOUTS[name.split(".")[-1]],) and value.device_mesh == mesh["tp"]
        assert_equal(fulls(found), expected, preset)
        combined = mf.to_dtensors(state, mesh=mesh)
        for name, value in expected.items():
            assert torch.equal(combined[name].to_local(), part_of(value, combined[name])), (preset, name)
            assert combined[name].device_mesh.ndim == (2 if isinstance(found[name], DTensor) else 1)


@pytest.mark.parametrize(("world", "dp"), [(4, 2), (2, 2), (2, 1), (4, 1)])
def test_training_equals_the_unsharded_model(world: int, dp: int) -> None:
    run_ranks(world, train, dp, ["zero3", "zero1", "ddp"] if (world, dp) == (4, 2) else ["zero3"])


def dtensors_of_any_rows(rank: int, world: int) -> None:
    """Rows that neither axis divides, over every placement."""
    mesh = world_mesh(2, 2)
    shapes = [(1, 4), (2, 3), (3, 4), (5, 1), (7, 5), (4, 4), (0, 3), (3,), (5,), ()]
    params: dict[str, Any] = {}
    values = {}
    for number, shape in enumerate(shapes):
        for dim in (None, *range(len(shape))):
            name = f"p{number}.{dim}"
            values[name] = torch.arange(float(math.prod(shape))).view(shape) + number
            placement = Replicate() if dim is None else Shard(dim)
            params[name] = distribute_tensor(values[name], mesh["tp"], [placement]).requires_grad_()
    for preset in ("zero3", "zero1", "ddp"):
        state = mf.shard(params, mf.plan(params, mesh["dp"], PRESETS[preset]()))
        assert_equal(fulls(mf.unshard(state)), values, preset)
        for name, found in mf.to_dtensors(state, mesh=mesh).items():
            assert found.placements[1] == params[name].placements[0] and found.shape == values[name].shape
            assert torch.equal(found.redistribute(placements=[Replicate()] * 2).to_local(), values[name]), (
                preset,
                name,
            )


def test_dtensors_of_rows_that_no_axis_divides() -> None:
    run_ranks(4, dtensors_of_any_rows)


def norms(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    expected = mf.plan(whole(), mf.AbstractMesh((1,), ("dp",)), mf.zero3(), precision=EXACT)
    leaves = trainable(whole())
    loss = plain_loss(leaves, batch_of(0, 0, 0), 0.5) + plain_loss(leaves, batch_of(0, 0, 1), 0.5)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    assert expected.numel == len(flat)
    for preset in ("zero3", "ddp", "zero1"):
        state, mesh = made(preset, 2, 2)
        _, mine = mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank // 2), 1.0, mesh["tp"])
        for norm_type in (1.0, 2.0, math.inf):
            norm = mf.optim.global_norm(mine, norm_type)
            torch.testing.assert_close(norm, torch.linalg.vector_norm(flat, norm_type), rtol=1e-12, atol=0)
            found.append(norm)
    return found


def test_the_norm_counts_shards_and_replicas_once() -> None:
    answers = run_ranks(4, norms)
    assert all(torch.equal(torch.stack(found), torch.stack(answers[0])) for found in answers)


def counted(rank: int, world: int) -> None:
    """Weights are gathered again in backward, and not kept by what DTensors save."""
    state, mesh = made("zero3", 2, 2)
    axis = state.spec.groups[0].axes[0]
    with Counting() as counting:
        mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, rank // 2), 1.0, mesh["tp"])
    assert counting.count("gather", axis.gather_group) == 10 and counting.count("scatter", axis.reduce_group) == 5
    assert counting.most_gathered <= 3, counting.most_gathered


def test_counts() -> None:
    run_ranks(4, counted)


def compiled(rank: int, world: int) -> None:
    state, mesh = made("zero3", 1, 2)
    transformed, tp = mf.value_and_grad(sharded_loss), mesh["tp"]
    torch._dynamo.reset()
    step = mf.compile(lambda state, batch: transformed(state, batch, 1.0, tp), backend="aot_eager")
    loss, grads = step(state, batch_of(0, 0, 0))
    expected, expected_grads = transformed(state, batch_of(0, 0, 0), 1.0, tp)
    assert torch.equal(loss, expected)
    assert_equal(fulls(mf.unshard(grads)), fulls(mf.unshard(expected_grads)))


def test_a_graph_with_dtensors() -> None:
    run_ranks(2, compiled, timeout=120)


def reduced(rank: int, world: int) -> None:
    """`reduce` of gradients in other placements: partial ones are summed over tp first."""
    mesh = world_mesh(2, 2)
    params = parallel(whole(), mesh["tp"])
    state = mf.shard(params, mf.plan(params, mesh["dp"], mf.zero3(), precision=EXACT))
    grads: dict[str, Any] = {}
    for name, value in params.items():
        ones = torch.ones(value.shape, dtype=torch.float64)
        is_parallel = isinstance(value, DTensor)
        grads[name] = DTensor.from_local(ones, mesh["tp"], [Partial()], run_check=False) if is_parallel else ones
    found = fulls(mf.unshard(mf.reduce(grads, state.spec)))
    for name, value in found.items():
        assert torch.equal(value, torch.full_like(value, 2.0 if isinstance(params[name], DTensor) else 1.0)), name
    with pytest.raises(mf.StateError, match=r"`grads` got a plain tensor at 'blocks\.0\.up'; expected a gradient that"):
        mf.reduce({"blocks.0.up": fulls(grads)["blocks.0.up"]} | {k: v for k, v in grads.items() if "0.up" not in k},
                  state.spec)  # fmt: skip


def test_partial_gradients_are_reduced() -> None:
    run_ranks(4, reduced)


def optimizers(rank: int, world: int) -> None:
    leaves = whole()
    alone = mf.shard(leaves, mf.plan(leaves, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), precision=EXACT))
    for optimizer in (mf.optim.adamw(lr=0.1), mf.optim.sgd(lr=0.1, momentum=0.5)):
        state, mesh = made("zero3", 2, 2)
        _, grads = mf.value_and_grad(sharded_loss)(state, batch_of(0, 0, 0), 1.0, mesh["tp"])
        wanted = mf.reduce(fulls(mf.unshard(grads)), alone.spec)
        state, _ = optimizer.step(grads, optimizer.init(state), state)
        expected, _ = optimizer.step(wanted, optimizer.init(alone), alone)
        assert_equal(fulls(mf.unshard(state)), mf.unshard(expected))
    muon = mf.optim.muon(lr=0.1, fallback=mf.optim.sgd(lr=0.1))
    with pytest.raises(
        mf.StateError, match=r"`exclude` got \(\), which leaves 'blocks\.0\.up', a DTensor whose matrices"
    ):
        muon.init(state)
    mf.optim.muon(lr=0.1, exclude=("up", "down"), fallback=mf.optim.sgd(lr=0.1)).init(state)
    with pytest.raises(mf.PlanError, match=r"`eligible_fn` got 'blocks\.0\.up', a DTensor of which this rank has only"):
        mf.plan_owners(state.spec)


def test_elementwise_optimizers_work_and_muon_is_refused() -> None:
    run_ranks(4, optimizers)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def as_module(rank: int, world: int) -> None:
    mesh = world_mesh(2, 2)
    torch.manual_seed(0)
    plain = nn.Sequential(Mlp(), Mlp(), nn.Linear(8, 1)).double()
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp(), nn.Linear(8, 1)).double()
    for name in "01":
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model.get_submodule(name), mesh["tp"], styles)
    params = mf.params_of(model)
    spec = mf.plan(params, mesh["dp"], mf.zero3(), units=("*",), precision=EXACT)
    state = mf.shard(params, spec)
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    part = x.chunk(2)[rank // 2]
    for _ in range(3):
        _, grads = mf.value_and_grad(lambda s: mf.functional_call(model, s, (part,)).square().mean())(state)
        state = sgd(state, grads)
        plain.zero_grad()
        plain(x).square().mean().backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter -= 2.0**-4 * parameter.grad
    for name, value in fulls(mf.unshard(state)).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-9, atol=1e-12)


def test_a_parallelized_module() -> None:
    run_ranks(4, as_module)


def refusals(rank: int, world: int) -> None:
    mesh = world_mesh(2, 2)
    w = torch.zeros(4, 4)

    def plan(tensor: torch.Tensor, on: Any = mesh["dp"], **more: torch.Tensor) -> mf.ShardSpec:
        tree = {"w": tensor.requires_grad_()} | more
        return mf.plan(tree, on, mf.zero3())

    sharded = distribute_tensor(w, mesh["tp"], [Shard(0)])
    partial = DTensor.from_local(w, mesh["tp"], [Partial()], run_check=False)
    for tensor, on, text in [
        (partial, mesh["dp"], r"`params` got a DTensor with .* at 'w'; expected Shard and Replicate"),
        (
            sharded,
            mesh["tp"],
            r"`params` got a DTensor at 'w' over ranks \[.*\], of which \[\d\] are on the data-parallel",
        ),
        (distribute_tensor(w, mesh, [Shard(0), Shard(1)]), mesh["dp"], r"`params` got a DTensor at 'w' over ranks"),
        (sharded, mf.AbstractMesh((2,), ("dp",)), r"`params` got a DTensor at 'w' with an AbstractMesh"),
    ]:
        with pytest.raises(mf.PlanError, match=text):
            plan(tensor, on)
    single = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "one", "tp"))
    other = distribute_tensor(w, single["one"], [Shard(0)])
    with pytest.raises(mf.PlanError, match=r"`params` got DTensors over two meshes, at 'w' and 'v'"):
        plan(sharded, v=other)
    spec = plan(sharded)
    with pytest.raises(
        mf.StateError, match=r"`params` got a plain tensor at 'w'; expected a DTensor of shape \(4, 4\)"
    ):
        mf.shard({"w": w.requires_grad_()}, spec)
    moved = distribute_tensor(w, mesh["tp"], [Shard(1)]).requires_grad_()
    with pytest.raises(mf.StateError, match=r"`params` got a DTensor of shape \(4, 4\) with \(Shard\(dim=1\),\)"):
        mf.shard({"w": moved}, spec)
    state = mf.shard({"w": sharded}, spec)
    for given in (None, mesh["dp"]):
        with pytest.raises(
            mf.StateError, match=r"`mesh` got .*; expected a mesh with the axes \['dp', 'tp'\], as 'w' is"
        ):
            mf.to_dtensors(state, mesh=given)
    plain = {"w": w.detach().clone().requires_grad_()}
    with pytest.raises(mf.StateError, match=r"`mesh` got .*; expected None where no parameter is a DTensor"):
        mf.to_dtensors(mf.shard(plain, mf.plan(plain, mesh["dp"], mf.zero3())), mesh=mesh)
    assert spec != mf.plan({"w": moved}, mesh["dp"], mf.zero3())  # (2, 4) and (4, 2) locally
    assert spec == plan(sharded) and hash(spec) == hash(plan(sharded))


def test_what_cannot_be_served_is_refused() -> None:
    run_ranks(4, refusals)


def odd_trees(rank: int, world: int) -> None:
    """Tied and frozen DTensors, mixed dtypes, meta tensors with an init function."""
    mesh = world_mesh(2, 2)
    w = distribute_tensor(integers(4, 4, seed=3), mesh["tp"], [Shard(0)]).requires_grad_()
    tree = {
        "a": w,
        "tied": w,
        "frozen": distribute_tensor(integers(3, 4, seed=4), mesh["tp"], [Shard(1)]),
        "low": distribute_tensor(integers(4, 4, seed=5).float(), mesh["tp"], [Replicate()]).requires_grad_(),
    }
    state = mf.shard(tree, mf.plan(tree, mesh["dp"], mf.zero3(), precision=EXACT))
    assert len(state.spec.groups) == 3
    found = mf.unshard(state)
    assert found["a"] is found["tied"]
    assert_equal(fulls(found), fulls(tree))

    def loss_fn(state: mf.ShardState) -> torch.Tensor:
        p = mf.unshard(state)
        return (p["a"] * p["tied"]).sum().full_tensor() + p["low"].sum().full_tensor() + p["frozen"].sum().full_tensor()

    _, grads = mf.value_and_grad(loss_fn)(state)
    assert torch.equal(fulls(mf.unshard(grads))["a"], 2 * integers(4, 4, seed=3))
    with torch.device("meta"):
        meta = DTensor.from_local(torch.empty(2, 4), mesh["tp"], [Shard(0)], run_check=False).requires_grad_()
    spec = mf.plan({"w": meta}, mesh["dp"], mf.zero3())
    value = torch.arange(16.0).view(4, 4)
    made_late = mf.shard({"w": meta}, spec, init_fn=lambda path, t: distribute_tensor(value, mesh["tp"], [Shard(0)]))
    assert torch.equal(fulls(mf.unshard(made_late))["w"], value)
    with pytest.raises(
        mf.StateError, match=r"`init_fn` got a plain tensor at 'w'; expected a DTensor of shape \(4, 4\)"
    ):
        mf.shard({"w": meta}, spec, init_fn=lambda path, t: value)


def test_odd_trees() -> None:
    run_ranks(4, odd_trees)
