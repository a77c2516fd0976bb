"""Checkpoints: saved under one plan, loaded under any other, bit for bit; training goes on as if uninterrupted."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import experts
import mfsdp_fn as mf
from layouts import planned, rich
from mfsdp_fn.checkpoint_entries import boxes
from models import (
    EXACT,
    LR,
    PRESETS,
    accumulated,
    assert_equal,
    batch_of,
    bilinear,
    integers,
    mesh_of,
    plain_training,
    sharded_loss,
    trainable,
)
from optim_cases import Trace
from pool import run_ranks
from simulated import run_simulated

PARTS = 12  # of a batch, as microbatches of however many ranks
BEFORE, AFTER = range(2), range(2, 3)
# Ranks, preset and layout of plans to save and to load with.
PLANS = [
    (1, "ddp", "padded"),
    (2, "zero3", "padded"),
    (2, "zero1", "block 2"),
    (3, "zero2", "unpadded"),
    (3, "zero3", "tensor"),
    (4, "zero3", "padded"),
    (4, "hsdp", "auto"),
    (4, "hfsdp", "unpadded"),
]
OPTIMIZERS: dict[str, Callable[[], mf.optim.Optimizer]] = {
    "momentum": lambda: mf.optim.sgd(LR, momentum=0.5),
    "adamw": lambda: mf.optim.adamw(LR, overrides={"b": {"weight_decay": 0.0}}),
    "muon": lambda: mf.optim.muon(LR, fallback=mf.optim.adamw(LR), exclude=("empty", "hole")),
    "transformation": lambda: mf.optim.from_gradient_transformation(Trace(LR, 0.5)),
}


def plan_of(world: int, preset: str, layout: str) -> mf.ShardSpec:
    shape = (2, world // 2) if preset in ("hsdp", "hfsdp") else (world,)
    return planned(layout, PRESETS[preset](), rich(), *shape, grad_scale=float(world))


def trained(rank: int, world: int, opt: Any, state: Any, opt_state: Any, steps: range) -> tuple[Any, Any]:
    """Steps on gradients that are data, small integers: their sum over all parts is exact at every world size."""
    for step in steps:
        data = {
            leaf.path: sum(integers(*leaf.shape, seed=100 * step + part) for part in range(rank, PARTS, world))
            for leaf in state.spec.leaves
        }
        loss = mf.value_and_grad(lambda s, d=data: sum((p * d[path]).sum() for path, p in mf.unshard(s).items()))
        _, grads = loss(state)
        state, opt_state = opt.step(grads, opt_state, state)
    return state, opt_state


def whole_of(state: mf.ShardState) -> dict[str, torch.Tensor]:
    """Whole main buffers; of moments without frozen tensors, which they don't hold."""
    held = {leaf.path for leaf in state.spec.leaves if state.main[leaf.group].dim() == 1}
    found = mf.unshard(mf.tree_map(lambda buffer: buffer, state))
    return {path: found[path].clone() for path in found if path in held}


def seen(state: mf.ShardState, opt_state: Any) -> list[dict[str, torch.Tensor]]:
    """Compute weights, main weights, and all that an optimizer keeps but a transformation's rows."""
    found = [{name: value.clone() for name, value in mf.unshard(state).items()}, whole_of(state)]
    leaves = optree.tree_leaves(opt_state, is_leaf=lambda node: isinstance(node, mf.ShardState))
    found += [whole_of(leaf) for leaf in leaves if isinstance(leaf, mf.ShardState)]
    step = opt_state.inner[1] if isinstance(opt_state, mf.optim.TransformationState) else opt_state.step
    return [*found, {"step": step}]


def used(number: int) -> list[str]:
    """The optimizers of which plan `number` saves states: two of the four."""
    names = list(OPTIMIZERS)
    return [names[number % 4], names[(number + 1 + number // 4) % 4]]


def save_all(rank: int, world: int, number: int, folder: str) -> dict[str, Any]:
    found = {}
    for name in used(number):
        opt = OPTIMIZERS[name]()
        state = mf.shard(rich(), plan_of(*PLANS[number]))
        state, opt_state = trained(rank, world, opt, state, opt.init(state), BEFORE)
        mf.checkpoint.save(f"{folder}/{name}", state, opt_state, extra={"step": 2, "where": [torch.arange(3)]})
        found[name] = seen(state, opt_state), seen(*trained(rank, world, opt, state, opt_state, AFTER))
    return found


def assert_all_equal(got: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]], what: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.keys() == other.keys(), what
        assert_equal({key: one[key] for key in other}, other, what)  # in whatever order


def load_all(rank: int, world: int, number: int, folders: list[str], expected: list[Any]) -> None:
    spec = plan_of(*PLANS[number])
    for folder, told in zip(folders, expected, strict=True):
        for name, (before, after) in told.items():
            opt, what = OPTIMIZERS[name](), (folder, name)
            state, opt_state, extra = mf.checkpoint.load(f"{folder}/{name}", spec, opt)
            assert extra["step"] == 2 and torch.equal(extra["where"][0], torch.arange(3))
            assert_all_equal(seen(state, opt_state), before, what)
            assert_all_equal(seen(*trained(rank, world, opt, state, opt_state, AFTER)), after, what)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By folder, what was saved there and what training went on to."""
    found = {}
    for number, plan in enumerate(PLANS):
        folder = str(tmp_path_factory.mktemp("-".join(map(str, plan)), numbered=False))
        found[folder] = run_ranks(plan[0], save_all, number, folder)[0]
    return found


@pytest.mark.parametrize("number", range(len(PLANS)), ids=["-".join(map(str, plan)) for plan in PLANS])
def test_loaded_under_another_plan(saved: dict[str, Any], number: int) -> None:
    """Each plan loads what itself and two others saved; every optimizer is among them."""
    some = [(number + step) % len(PLANS) for step in (0, 3, 4)]
    assert {name for other in some for name in used(other)} == {*OPTIMIZERS}
    folders = [list(saved)[other] for other in some]
    run_ranks(PLANS[number][0], load_all, number, folders, [saved[folder] for folder in folders])


def continued(rank: int, world: int, folder: str) -> None:
    """Against the unsharded computation, and with momentum against itself, through a checkpoint after each step."""
    expected = plain_training(bilinear(), world, steps=3, micros=2)
    spec = mf.plan(bilinear(), mesh_of(world), mf.zero3(), units=("blocks.*",), precision=EXACT)
    for opt in (mf.optim.sgd(LR), mf.optim.sgd(LR, momentum=0.5), mf.optim.adamw(LR)):
        state = other = mf.shard(bilinear(), spec)
        opt_state = kept = opt.init(state)
        for step in range(3):
            batches = [batch_of(step, micro, rank) for micro in range(2)]
            state, opt_state = opt.step(accumulated(sharded_loss, state, batches, float(world)), opt_state, state)
            other, kept = opt.step(accumulated(sharded_loss, other, batches, float(world)), kept, other)
            mf.checkpoint.save(f"{folder}/last", state, opt_state, extra=step)  # over the one before
            state, opt_state, extra = mf.checkpoint.load(f"{folder}/last", spec, opt)
            assert extra == step and opt_state.step == step + 1
        assert_equal(mf.unshard(state), mf.unshard(other))
        if expected:
            assert_equal(mf.unshard(state), expected)
        expected = None


def test_a_run_that_stops_after_every_step(tmp_path: Path) -> None:
    run_ranks(2, continued, str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def big() -> dict[str, torch.Tensor]:
    return {
        f"l{i}": torch.randn(256, 256, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(8)
    }


def save_big(rank: int, world: int, preset: str, path: str) -> None:
    opt = mf.optim.adamw(0.1)
    state = mf.shard(big(), mf.plan(big(), mesh_of(world), PRESETS[preset](), units=("l*",)))
    mf.checkpoint.save(path, state, opt.init(state))


@pytest.mark.parametrize("preset", ["zero3", "zero1", "ddp"])
def test_every_rank_writes_its_share(tmp_path: Path, preset: str) -> None:
    run_ranks(4, save_big, preset, str(tmp_path / "big"))
    sizes = [(tmp_path / "big" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    share = 3 * 8 * 256 * 256 * 4 / 4  # three fp32 tensors for each parameter, by four ranks
    assert all(share <= size < 1.05 * share for size in sizes), sizes


def mixed(rank: int, world: int, folder: str) -> None:
    """bfloat16 compute weights, float8 and half parameters, meta parameters to plan, units placed differently."""
    params = {
        "a.w": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)),
        "b.w": torch.arange(7).half(),
        "b.eight": torch.arange(6.0).to(torch.float8_e4m3fn),
    }
    params = {name: value.requires_grad_(value.dtype != torch.float8_e4m3fn) for name, value in params.items()}
    policy = mf.MixedPrecisionPolicy(compute=torch.bfloat16, main=None)
    opt = mf.optim.sgd(0.5, momentum=0.5)
    by_unit = {"": mf.zero3(), "b": mf.zero2()}
    meta = {name: value.detach().to("meta").requires_grad_(value.requires_grad) for name, value in params.items()}
    specs = [mf.plan(meta, mesh_of(world), one, units=("a", "b"), precision=policy) for one in (by_unit, mf.ddp())]
    state = mf.shard(params, mf.plan(params, mesh_of(world), by_unit, units=("a", "b"), precision=policy))
    state, opt_state = opt.step(mf.tree_map(torch.ones_like, state), opt.init(state), state)
    mf.checkpoint.save(f"{folder}/x", state, opt_state)
    expected = mf.unshard(state), whole_of(state), whole_of(opt_state.momentum)
    for spec in specs:
        loaded, opt_state, _ = mf.checkpoint.load(f"{folder}/x", spec, opt)
        for got, wanted in zip(
            (mf.unshard(loaded), whole_of(loaded), whole_of(opt_state.momentum)), expected, strict=True
        ):
            assert {name: value.dtype for name, value in got.items()} == {n: v.dtype for n, v in wanted.items()}
            assert all(torch.equal(got[name].float(), wanted[name].float()) for name in wanted)


@pytest.mark.parametrize("world", [1, 3])
def test_dtypes_and_placements_by_unit(tmp_path: Path, world: int) -> None:
    run_ranks(world, mixed, str(tmp_path))


def on_experts(rank: int, world: int, folder: str, save: bool) -> None:
    opt = mf.optim.adamw(0.5)
    state, _ = experts.made(mf.zero3, mf.zero1 if save else mf.zero3, (world,), 2)
    mesh = experts.expert_mesh(2, world // 2)
    if save:
        opt_state = opt.init(state)
        mf.checkpoint.save(f"{folder}/moe", state, opt_state)
    loaded, opt_state, _ = mf.checkpoint.load(f"{folder}/moe", state.spec, opt)
    held = experts.part(experts.whole(), mesh.get_local_rank("ep"), 2)
    assert_equal(mf.unshard(loaded), held)
    with pytest.raises(mf.StateError, match=r"`path` got a checkpoint without 'params.blocks.0.experts.[bw]'"):
        mf.checkpoint.load(f"{folder}/moe", experts.made(mf.zero3, mf.zero3, (world,), 1)[0].spec, opt)


def test_experts_are_saved_apart(tmp_path: Path) -> None:
    run_ranks(4, on_experts, str(tmp_path), True)
    run_ranks(2, on_experts, str(tmp_path), False)


@functools.cache
def dp_tp(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def over_two_axes(rank: int, world: int, folder: str, tp: int, save: bool) -> None:
    whole = {"up": torch.arange(15.0).view(5, 3), "down": torch.arange(21.0).view(3, 7), "b": torch.arange(4.0)}
    named: dict[str, torch.Tensor] = dict(whole)
    mesh: Any = mesh_of(world)
    if tp:
        both = dp_tp(world // tp, tp)
        mesh = both["dp"]
        for name, dim in (("up", 0), ("down", 1)):
            named[name] = distribute_tensor(whole[name], both["tp"], [Shard(dim)])
    opt = mf.optim.sgd(0.5, momentum=0.5)
    named = trainable(named) if not tp else {name: value.detach().requires_grad_() for name, value in named.items()}
    state = mf.shard(named, mf.plan(named, mesh, mf.zero3()))
    if save:
        state, opt_state = opt.step(mf.tree_map(lambda x: x + 2, state), opt.init(state), state)
        mf.checkpoint.save(f"{folder}/tp", state, opt_state)
    state, opt_state, _ = mf.checkpoint.load(f"{folder}/tp", state.spec, opt)
    for found, expected in (
        (mf.unshard(state), {name: value - 0.5 * (value + 2) for name, value in whole.items()}),
        (mf.unshard(opt_state.momentum), {name: value + 2 for name, value in whole.items()}),
    ):
        assert_equal({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}, expected)


@pytest.mark.parametrize(("first", "second"), [((4, 2), (3, 0)), ((2, 0), (4, 2)), ((4, 2), (2, 2))])
def test_tensor_parallel(tmp_path: Path, first: tuple[int, int], second: tuple[int, int]) -> None:
    run_ranks(first[0], over_two_axes, str(tmp_path), first[1], True)
    run_ranks(second[0], over_two_axes, str(tmp_path), second[1], False)


def stage_of_a_pipeline(rank: int, world: int, folder: str) -> None:
    """Meshes of some of the ranks: each stage has its own parameters, and saves without the others."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    params = trainable({f"w{stage}": torch.arange(5.0) + stage})
    state = mf.shard(params, mf.plan(params, mesh["dp"], mf.zero3()))
    for _ in range(1 + stage):
        mf.checkpoint.save(f"{folder}/{stage}", state, None)
        assert_equal(mf.unshard(mf.checkpoint.load(f"{folder}/{stage}", state.spec, None)[0]), params)


def test_stages_save_each_for_itself(tmp_path: Path) -> None:
    run_ranks(4, stage_of_a_pipeline, str(tmp_path))


def simulated(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    spec = planned("unpadded", mf.zero3(), rich(), world)
    opt = mf.optim.adamw(0.5)
    state = mf.shard(rich(), spec)
    mf.checkpoint.save(path, state, opt.init(state))
    return mf.unshard(mf.checkpoint.load(path, spec, opt)[0])


def test_simulated_ranks(tmp_path: Path) -> None:
    for found in run_simulated(7, simulated, str(tmp_path / "x")):
        assert_equal(found, rich())


def inside_experts(rank: int, world: int, path: str) -> None:
    """Rows of two leading dimensions: a rank's run begins and ends inside of dim 0."""
    params = trainable({"w": torch.arange(60.0).view(5, 4, 3), "b": torch.arange(5.0)})
    opt = mf.optim.from_gradient_transformation(Trace(1.0, 0.5))
    cut = mf.plan(params, mesh_of(world), mf.zero3(), leading_dims={"w": 2}, shard_layout="unpadded")
    state = mf.shard(params, cut)
    state, opt_state = opt.step(mf.tree_map(torch.clone, state), opt.init(state), state)
    state = mf.sync_model_weights(mf.tree_map(lambda x: x + 1, state))
    mf.checkpoint.save(path, state, opt_state)
    for spec in (mf.plan(params, mesh_of(world), mf.zero3()), cut):
        loaded, trace, _ = mf.checkpoint.load(path, spec, opt)
        assert_equal(mf.unshard(loaded), {name: torch.ones_like(value) for name, value in params.items()})
        back, _ = opt.step(mf.zeros_like(loaded), trace, loaded)  # half of what the trace holds, the first weights
        assert_equal(mf.unshard(back), {name: 1 - value / 2 for name, value in params.items()})


def test_rows_inside_of_dim_0(tmp_path: Path) -> None:
    run_simulated(6, inside_experts, str(tmp_path / "x"))


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1, 2)])
def test_boxes_are_a_run(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel()):
        for stop in range(start, numbers.numel() + 1):
            found = []
            for offsets, sizes in boxes(shape, start, stop):
                box = numbers
                for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
                    box = box.narrow(dim, first, size)
                found += box.reshape(-1).tolist()
            assert found == list(range(start, stop))


# In this process, without a process group.

ALONE = mf.AbstractMesh((1,), ("dp",))


def alone(params: dict[str, torch.Tensor] | None = None, **options: Any) -> mf.ShardState:
    params = bilinear() if params is None else params
    options = {"precision": EXACT} | options
    return mf.shard(params, mf.plan(params, ALONE, mf.zero3(), **options))


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(mf.MfsdpError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it(tmp_path: Path) -> None:
    mf.checkpoint.save(tmp_path / "x", alone(), None)
    found = {f"params.{name}": torch.zeros_like(value.detach()) for name, value in bilinear().items()}
    assert FileSystemReader(tmp_path / "x").read_metadata().state_dict_metadata.keys() == found.keys()
    torch_load(found, checkpoint_id=tmp_path / "x", no_dist=True)
    assert_equal({name.removeprefix("params."): value for name, value in found.items()}, bilinear())


class Odd:
    """An optimizer whose two moments are one tensor, and that keeps the weights, a number and a rank's own list."""

    def init(self, state: mf.ShardState) -> Any:
        zeros = mf.zeros_like(state)
        return {"one": zeros, "other": zeros, "kept": state, "count": 0, "scale": torch.ones(2).expand(3, 2)}

    def step(self, grads: Any, opt_state: Any, state: Any, *, donate: bool = False) -> Any:
        raise NotImplementedError


def test_what_an_optimizer_shares_is_loaded_apart(tmp_path: Path) -> None:
    state = alone()
    ones, twos = (mf.tree_map(lambda x, n=n: torch.full_like(x, n), state) for n in (1, 2))
    kept = {"one": ones, "other": twos, "kept": mf.tree_map(lambda x: x + 1, state), "count": 3}
    mf.checkpoint.save(tmp_path / "x", state, kept | {"scale": torch.arange(6.0).view(3, 2)})
    loaded, opt_state, _ = mf.checkpoint.load(tmp_path / "x", state.spec, Odd())
    for got, expected in zip((loaded, *(opt_state[k] for k in ("one", "other", "kept"))), (state, *kept.values())):  # noqa: B905
        assert torch.equal(got.main[0], expected.main[0])
    assert opt_state["count"] == 3 and torch.equal(opt_state["scale"], torch.arange(6.0).view(3, 2))


def test_order_and_ties_are_no_part_of_a_name(tmp_path: Path) -> None:
    shared = torch.arange(4.0).requires_grad_()
    opt = mf.optim.sgd(0.1, momentum=0.9)
    state = alone({"b": shared, "z": torch.ones(2, requires_grad=True), "a": shared})
    mf.checkpoint.save(tmp_path / "x", state, opt.init(state))
    other = alone({"a": shared, "z": torch.zeros(2, requires_grad=True), "b": shared})
    found = mf.unshard(mf.checkpoint.load(tmp_path / "x", other.spec, opt)[0])
    assert found["a"] is found["b"] and torch.equal(found["a"], shared.detach()) and found["z"].sum() == 2
    untied = alone({"a": shared, "b": torch.zeros(4, requires_grad=True), "z": torch.zeros(2, requires_grad=True)})
    assert "a checkpoint without 'params.b'" in refused(mf.checkpoint.load, tmp_path / "x", untied.spec, opt)


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    save, state, path = mf.checkpoint.save, alone(), tmp_path / "x"
    opt = mf.optim.adamw(0.1)
    opt_state = opt.init(state)
    assert "`path` got 3; expected a directory's path" in refused(save, 3, state, opt_state)
    assert "`path` got 's3://a'; expected a directory's path" in refused(save, "s3://a", state, opt_state)
    assert "`state` got a dict; expected a ShardState" in refused(save, path, {}, opt_state)
    ddp = mf.shard(bilinear(), mf.plan(bilinear(), ALONE, mf.ddp()))
    assert "`opt_state` got a state made for ShardSpec" in refused(save, path, ddp, opt_state)
    assert "`opt_state.m` got a state of ShardSpec" in refused(
        save, path, ddp, {"m": mf.zeros_like(alone(bilinear(depth=4)))}
    )
    assert "`opt_state.m` got a device; expected ShardStates" in refused(save, path, state, {"m": torch.device("cpu")})
    assert "`opt_state` got 3; expected an optimizer's state, or None" in refused(save, path, state, 3)
    assert "`opt_state` got two leaves named 'optimizer.a.b'" in refused(
        save, path, state, {"a.b": torch.ones(()), "a": {"b": torch.ones(())}}
    )
    text = refused(save, path, state, opt_state, extra={"a": object()})
    assert re.match(
        r"`extra` got what torch.load\(weights_only=True\) doesn't read .* in dicts, lists and tuples", text
    )
    assert "`extra` got what torch.load" in refused(save, path, state, opt_state, extra=lambda: 0)
    grads = mf.zeros_like(state)
    opt.step(grads, opt_state, state, donate=True)
    assert "`state` got a state whose buffers were donated" in refused(save, path, state, opt_state)
    assert "donated" in refused(save, path, alone(), opt_state)
    several = mf.AbstractMesh((2,), ("dp",))
    many = mf.shard(bilinear(), mf.plan(bilinear(), several, mf.zero3()))
    assert "`state` got a plan on an AbstractMesh of several ranks" in refused(save, path, many, None)
    assert not any(tmp_path.iterdir())


def test_refused_while_gradients_accumulate(tmp_path: Path) -> None:
    params = bilinear()
    state = mf.shard(params, mf.plan(params, ALONE, mf.ddp(), units=("blocks.*",), precision=EXACT))

    def loss(state: mf.ShardState) -> torch.Tensor:
        assert "`state` got the state inside of a loss function" in refused(
            mf.checkpoint.save, tmp_path / "x", state, None
        )
        return mf.unshard(state)["embed"].sum()

    _, grads = mf.value_and_grad(loss, is_last_microbatch=False)(state)
    assert "`state` got accumulating gradients; expected weights" in refused(
        mf.checkpoint.save, tmp_path / "x", grads, None
    )
    assert "`opt_state.m` got accumulating gradients" in refused(
        mf.checkpoint.save, tmp_path / "x", state, {"m": grads}
    )
    assert not any(tmp_path.iterdir())


def test_refused_when_loaded(tmp_path: Path) -> None:
    load, path, opt = mf.checkpoint.load, tmp_path / "x", mf.optim.sgd(0.1)
    state = alone()
    assert "where there is nothing; expected a directory that checkpoint.save wrote" in refused(
        load, path, state.spec, opt
    )
    assert "where there is no checkpoint; expected a directory" in refused(load, tmp_path, state.spec, opt)
    mf.checkpoint.save(path, state, opt.init(state))
    assert "`spec` got a dict" in refused(load, path, {}, opt)
    several = mf.plan(bilinear(), mf.AbstractMesh((2,), ("dp",)), mf.zero3())
    assert "`spec` got a plan on an AbstractMesh of several ranks" in refused(load, path, several, opt)
    assert "`opt` got 3; expected an optimizer, or None" in refused(load, path, state.spec, 3)
    assert "`path` got a checkpoint without 'optimizer.momentum.embed'" in refused(
        load, path, state.spec, mf.optim.sgd(0.1, momentum=0.9)
    )
    more, fewer = bilinear(depth=4), bilinear(depth=2)
    assert "`path` got a checkpoint without 'params.blocks.3." in refused(load, path, alone(more).spec, opt)
    assert "`path` got a checkpoint with 'params.blocks.2.b' (1 more like it)" in refused(
        load, path, alone(fewer).spec, opt
    )
    wide = bilinear() | {"embed": torch.ones(7, 4, dtype=torch.float64, requires_grad=True)}
    assert "`path` got ((5, 4), torch.float64) for 'params.embed'; expected ((7, 4), torch.float64)" in refused(
        load, path, alone(wide).spec, opt
    )
    single = alone(precision=mf.MixedPrecisionPolicy(main=torch.float32))
    text = refused(load, path, single.spec, opt)
    assert "expected ((5, 4), torch.float32), as planned; plan with the main dtype that was saved: nothing is" in text
    assert "`path` got a checkpoint with 'optimizer" in refused(load, path, state.spec, Nothing())
    assert_equal(mf.unshard(load(path, state.spec, None)[0]), bilinear())  # weights alone


class Nothing(Odd):
    """An optimizer that keeps nothing."""

    def init(self, state: mf.ShardState) -> Any:
        return ()


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    state = alone()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    assert "`path` got a file, " in refused(mf.checkpoint.save, tmp_path / "file", state, None)
    text = refused(mf.checkpoint.save, tmp_path / "folder", state, None)
    assert "a directory with other things than a checkpoint in it" in text and "step-1" in text
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    mf.checkpoint.save(tmp_path / "empty", state, None)
    mf.checkpoint.save(os.fspath(tmp_path / "new" / "deep"), state, None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file", "folder", "new"]


def failing(rank: int, world: int, path: str) -> None:
    spec = mf.plan(bilinear(), mesh_of(world), mf.zero3(), precision=EXACT)
    state, opt = mf.shard(bilinear(), spec), mf.optim.sgd(0.1)
    mf.checkpoint.save(path, state, opt.init(state), extra="good")
    worse = mf.tree_map(lambda x: x + 1, state)
    for method, guilty in (("prepare_local_plan", 0), ("write_data", world - 1), ("finish", 0)):
        broken = mock.patch.object(FileSystemWriter, method, side_effect=OSError("disk full"))
        expected = "disk full" if rank == guilty else f"rank {guilty} failed, and so no rank went on: OSError"
        raises = pytest.raises((OSError, mf.StateError), match=expected)
        with broken if rank == guilty else contextlib.nullcontext(), raises:
            mf.checkpoint.save(path, worse, opt.init(worse), extra="bad")
        found, _, extra = mf.checkpoint.load(path, spec, opt)
        assert extra == "good"
        assert_equal(mf.unshard(found), bilinear())
    for argument, call in {
        "extra": lambda: mf.checkpoint.save(path, state, None, extra=rank),
        "path": lambda: mf.checkpoint.save(f"{path}{rank}", state, None),
        "opt_state": lambda: mf.checkpoint.save(path, state, {f"rank{rank}": torch.ones(())}),
        "opt_state.x": lambda: mf.checkpoint.save(path, state, {"x": torch.tensor(float(rank))}),
    }.items():
        with pytest.raises(mf.StateError, match=rf"`{argument}` got .*(the same on every rank|another value)"):
            call()
    one_sided = 3 if rank == world - 1 else path
    with pytest.raises(mf.StateError, match=r"`path` got 3; expected a directory's path"):
        mf.checkpoint.save(one_sided, state, None)  # type: ignore[arg-type]


def test_a_failed_save_leaves_the_older_one(tmp_path: Path) -> None:
    run_ranks(3, failing, str(tmp_path / "x"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_process_that_dies_between_two_renames(tmp_path: Path) -> None:
    state, path = alone(), tmp_path / "x"
    mf.checkpoint.save(path, state, None, extra=1)
    old = tmp_path / ".x.mfsdp_fn-old"
    path.rename(old)
    (tmp_path / ".x.mfsdp_fn-new").mkdir()
    assert f"the one that it was to replace is whole: move {old} there" in refused(
        mf.checkpoint.load, path, state.spec, None
    )
    broken = mock.patch.object(FileSystemWriter, "write_data", side_effect=OSError("disk full"))
    with broken, pytest.raises(OSError, match="disk full"):
        mf.checkpoint.save(path, state, None, extra=2)
    assert old.is_dir() and not path.exists()
    mf.checkpoint.save(path, state, None, extra=2)
    assert mf.checkpoint.load(path, state.spec, None)[2] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
