"""Junk for every argument of every public function: refused by a ValueError that names the argument."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mfsdp_fn as mf

Kwargs = dict[str, Any]
MESH = mf.AbstractMesh((1,), ("dp",))
LAYOUT = mf.build_for_row_atomic([(2, 2), (2,)], 1)
WHOLE = (mf.TensorAtomic(),)
OWNERS = mf.GroupOwnerLayout(MESH, LAYOUT, {0: 0})


def returns_none(*args: Any, **kwargs: Any) -> None:
    """Takes anything."""


class Thing:
    """Of no use to anyone."""


JUNK: dict[str, Callable[[], Any]] = {
    "integer": lambda: 3,
    "negative": lambda: -1,
    "nan": lambda: math.nan,
    "flag": lambda: True,
    "text": lambda: "x",
    "none": lambda: None,
    "thing": lambda: Thing(),
    "list": lambda: [Thing()],
    "dict": lambda: {Thing(): Thing()},
    "complex": lambda: torch.zeros(2, dtype=torch.complex64),
    "dtype": lambda: torch.int32,
    "function": lambda: returns_none,
    "generator": lambda: (Thing() for _ in range(2)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that works with `good()`, and the junk that is no junk for some arguments (names, or "any")."""

    call: Callable[..., Any]
    good: Callable[[], Kwargs]
    legal: dict[str, str] = dataclasses.field(default_factory=dict)
    shown: dict[str, str] = dataclasses.field(default_factory=dict)  # arguments that errors name otherwise


def params() -> dict[str, torch.Tensor]:
    return {"w": torch.eye(2).requires_grad_(), "b": torch.ones(2, requires_grad=True)}


def spec() -> mf.ShardSpec:
    return mf.plan(params(), MESH, mf.zero3())


def state() -> mf.ShardState:
    return mf.shard(params(), spec())


def grads() -> mf.ShardState:
    return mf.tree_map(torch.ones_like, state())


def loss(state: mf.ShardState) -> torch.Tensor:
    return mf.unshard(state)["w"].sum()


def stepping(opt: mf.optim.Optimizer) -> Any:
    """A whole step: some values, such as what a schedule returns, are only seen there."""
    weights = state()
    return opt.step(grads(), opt.init(weights), weights)


def in_a_folder(call: Callable[[], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return call()


def loaded(**arguments: Any) -> Any:
    """A checkpoint at "x" is there to be loaded."""
    now = state()
    mf.checkpoint.save("x", now, mf.optim.sgd(0.1).init(now))
    return mf.checkpoint.load(**arguments)


def step_of(make: Callable[[], mf.optim.Optimizer]) -> Case:
    return Case(
        lambda **k: make().step(**k),
        lambda: {"grads": grads(), "opt_state": make().init(state()), "state": state(), "donate": False},
        {"donate": "flag"},
    )


def init_of(make: Callable[[], mf.optim.Optimizer]) -> Case:
    return Case(lambda **k: make().init(**k), lambda: {"state": state()})


def pullback() -> mf.Pullback:
    return mf.vjp(lambda s: mf.unshard(s)["w"].sum(0), state())[1]


def second_half(**options: Any) -> Any:
    later = pullback()
    later.inputs(torch.ones(2))
    return later.weights(**options)


def buffer() -> mf.DBuffer:
    return mf.DBuffer.from_local(torch.ones(6), LAYOUT, MESH, (mf.Replicate(),))


def to_dtensors(state: Any, mesh: Any) -> Any:
    with mf.testing.single_rank() as real:
        given = mf.shard(params(), mf.plan(params(), real, mf.zero3())) if state is ... else state
        return mf.to_dtensors(given, mesh=mesh)


def plan_with(**options: Any) -> Any:
    return mf.plan(**{"params": params(), "mesh": MESH, "placements": mf.zero3(), **options})


def policies(argument: str, made: Callable[..., Any], legal: dict[str, str]) -> Case:
    """A plan with a policy, whose fields errors name behind the argument that has them."""
    fields = {field.name: field.default for field in dataclasses.fields(made())}
    return Case(
        lambda **k: plan_with(**{argument: made(**k)}),
        lambda: {**fields},
        legal,
        {f: f"{argument}.{f}" for f in fields},
    )


def in_loss(use: Callable[[mf.ShardState], Any]) -> Any:
    def loss_fn(state: mf.ShardState) -> torch.Tensor:
        use(state)
        return mf.unshard(state)["w"].sum()

    return mf.value_and_grad(loss_fn)(state())


def with_hooks(state: Any, hooks: Any) -> Any:
    def use(inner: mf.ShardState) -> None:
        with mf.saved_tensors_hooks(inner if state is ... else state, hooks):
            pass

    return in_loss(use)


class Scale:
    def init(self, params: Any) -> Any:
        return ()

    def update(self, updates: Any, state: Any, params: Any) -> Any:
        return updates, state


def adamw(**options: Any) -> mf.optim.Optimizer:
    return mf.optim.adamw(**options)


def muon(**options: Any) -> mf.optim.Optimizer:
    return mf.optim.muon(**{"fallback": mf.optim.sgd(lr=0.1), **options})


NUMBER = "integer"  # junk that is fine for a number
MATRIX = {0: torch.ones(2, 2)}
LINEAR = torch.nn.Linear(2, 1)


def linear_state() -> mf.ShardState:
    params = mf.params_of(LINEAR)
    return mf.shard(params, mf.plan(params, MESH, mf.zero3()))


CASES: dict[str, Case] = {
    "plan": Case(
        mf.plan,
        lambda: {
            "params": params(),
            "mesh": MESH,
            "placements": mf.zero3(),
            "units": (),
            "precision": None,
            "shard_layout": "padded",
            "block_size": 1,
            "owners": None,
            "grad_scale": 1.0,
            "runtime": None,
            "namespace": "",
            "leading_dims": 1,
            "split_by_row_size": False,
        },
        {
            "precision": "none",
            "block_size": "integer",
            "owners": "none",
            "grad_scale": "integer negative",
            "runtime": "none",
            "namespace": "text",
            "leading_dims": "integer",
            "split_by_row_size": "flag",
        },
    ),
    "plan by unit": Case(
        lambda **k: plan_with(**{name: {"": value} for name, value in k.items()}),
        lambda: {"mesh": MESH, "placements": mf.zero3(), "grad_scale": 1.0},
        {"grad_scale": "integer negative"},
    ),
    "plan by pattern": Case(
        lambda leading_dims: plan_with(leading_dims={"w": leading_dims}),
        lambda: {"leading_dims": 1},
        {"leading_dims": "integer"},
    ),
    "plan's owners": Case(
        lambda **k: plan_with(**{"placements": mf.Placements(WHOLE, WHOLE, WHOLE), **k}),
        lambda: {"owners": {"w": 0, "b": 0}},
    ),
    "ddp": Case(mf.ddp, lambda: {"axes": 1}, {"axes": "integer"}),
    "RuntimePolicy": policies(
        "runtime",
        mf.RuntimePolicy,
        {
            "forward_prefetch": "none integer",
            "backward_prefetch": "none integer",
            "max_inflight_reductions": "integer",
            "overlap_allgather_reduction": "flag",
            "store_compute_weights": "flag",
            "overlap_outer_communication": "flag",
            "caller_managed_grad_sync": "flag",
        },
    ),
    "MixedPrecisionPolicy": policies(
        "precision", mf.MixedPrecisionPolicy, dict.fromkeys(("compute", "main", "grad", "reduce"), "none")
    ),
    "testing.simulate": Case(
        mf.testing.simulate, lambda: {"world_size": 2, "names": None}, {"world_size": "integer", "names": "none"}
    ),
    "testing.simulate()": Case(lambda fn: mf.testing.simulate(2)(fn), lambda: {"fn": returns_none}, {"fn": "function"}),
    "assign_owner_work": Case(
        mf.assign_owner_work,
        lambda: {"layout": LAYOUT, "mesh": MESH, "tensor_indices": [0], "cost_fn": None, "initial_loads": None},
        {"cost_fn": "none", "initial_loads": "none"},
    ),
    "owner_loads": Case(
        mf.owner_loads,
        lambda: {"layout": LAYOUT, "tensor_to_owner": {0: 0}, "cost_fn": None, "initial_loads": None},
        {"cost_fn": "none", "initial_loads": "none"},
    ),
    "ns_cost_fn": Case(mf.ns_cost_fn, lambda: {"num_ns_steps": 5}, {"num_ns_steps": "integer"}),
    "ns_cost_fn()": Case(mf.ns_cost_fn(5), lambda: {"shape": torch.Size((2, 2))}),
    "select_ge_2d_params": Case(mf.select_ge_2d_params, lambda: {"param": torch.ones(2)}, {"param": "complex"}),
    "plan_owners": Case(
        mf.plan_owners,
        lambda: {"spec": spec(), "cost_fn": None, "eligible_fn": None},
        {"cost_fn": "none", "eligible_fn": "none"},
    ),
    "GroupOwnerLayout": Case(
        mf.GroupOwnerLayout,
        lambda: {"mesh": MESH, "layout": LAYOUT, "tensor_to_owner": {0: 0}, "axes": None, "dtype": None},
        {"axes": "none", "dtype": "none dtype"},
    ),
    "GroupOwnerLayout.from_group": Case(
        mf.GroupOwnerLayout.from_group,
        lambda: {"group": spec().groups[0], "cost_fn": None, "eligible_fn": None, "initial_loads": None},
        {"cost_fn": "none", "eligible_fn": "none", "initial_loads": "none"},
    ),
    "GroupOwnerLayout.only": Case(OWNERS.only, lambda: {"indices": [0]}),
    "OwnerGatherPlan.pack": Case(mf.OwnerGatherPlan.pack, lambda: {"owner_layout": OWNERS, "local_shards": MATRIX}),
    "OwnerGatherPlan.reconstruct_full": Case(
        mf.OwnerGatherPlan.pack(
            mf.GroupOwnerLayout(mf.AbstractMesh((2,), ("dp",), 1), mf.build_for_row_atomic([(2, 2)], 2), {0: 1}),
            {0: torch.ones(1, 2)},
        ).reconstruct_full,
        lambda: {"param_index": 0, "recv_buffers": {0: torch.ones(2)}},
    ),
    "OwnerScatterPlan.pack": Case(mf.OwnerScatterPlan.pack, lambda: {"owner_layout": OWNERS, "full_results": MATRIX}),
    "OwnerScatterPlan.unpack": Case(
        mf.OwnerScatterPlan.pack(
            mf.GroupOwnerLayout(mf.AbstractMesh((2,), ("dp",)), mf.build_for_row_atomic([(2, 2)], 2), {0: 1}), {}
        ).unpack,
        lambda: {"recv_buffers": {1: torch.ones(2)}},
    ),
    "gather_to_owner": Case(
        mf.gather_to_owner,
        lambda: {"shards": MATRIX, "owner_layout": OWNERS, "out": None, "wire_dtype": None},
        {"out": "none", "wire_dtype": "none"},
    ),
    "gather_to_owner of groups": Case(
        mf.gather_to_owner,
        lambda: {"shards": {"g": MATRIX}, "owner_layout": {"g": OWNERS}, "out": None, "wire_dtype": None},
        {"out": "none", "wire_dtype": "none"},
    ),
    "scatter_from_owner": Case(
        mf.scatter_from_owner,
        lambda: {"fulls": MATRIX, "owner_layout": OWNERS, "out": None, "wire_dtype": None},
        {"out": "none", "wire_dtype": "none"},
    ),
    "scatter_from_owner of groups": Case(
        mf.scatter_from_owner,
        lambda: {"fulls": {"g": MATRIX}, "owner_layout": {"g": OWNERS}, "out": None, "wire_dtype": None},
        {"out": "none", "wire_dtype": "none"},
    ),
    "owner_map": Case(
        lambda **k: mf.owner_map(**k)(state(), mf.plan_owners(spec())),
        lambda: {"fn": torch.neg, "batched": False, "wire_dtype": None, "buckets": 1},
        {"batched": "flag", "wire_dtype": "none", "buckets": "integer"},
    ),
    "owner_map batched": Case(
        lambda fn: mf.owner_map(fn, batched=True)(state(), mf.plan_owners(spec())), lambda: {"fn": torch.neg}
    ),
    "owner_map()": Case(mf.owner_map(torch.neg), lambda: {"state": state(), "owners": mf.plan_owners(spec())}),
    # States
    "shard": Case(mf.shard, lambda: {"params": params(), "spec": spec(), "init_fn": None}, {"init_fn": "none"}),
    "unshard": Case(mf.unshard, lambda: {"state": state()}),
    "launch": Case(mf.launch, lambda: {"unit": state()[""]}),
    "wait": Case(mf.wait, lambda: {"pending": mf.launch(state()[""])}),
    "reduce": Case(
        mf.reduce,
        lambda: {"grads": {"w": None, "b": None}, "spec": spec(), "into": None, "is_last_microbatch": True},
        {"into": "none", "is_last_microbatch": "flag"},
    ),
    "reduce_outer": Case(mf.reduce_outer, lambda: {"grads": grads()}),
    "finish_grad_sync": Case(mf.finish_grad_sync, lambda: {"grads": grads()}),
    "sync_model_weights": Case(mf.sync_model_weights, lambda: {"state": state(), "donate": False}, {"donate": "flag"}),
    "zeros_like": Case(mf.zeros_like, lambda: {"state": state()}),
    "tree_map": Case(lambda fn, states: mf.tree_map(fn, states), lambda: {"fn": torch.neg, "states": state()}),
    "to_dtensors": Case(to_dtensors, lambda: {"state": ..., "mesh": None}, {"mesh": "none"}),
    "DBuffer.from_tensors": Case(
        mf.DBuffer.from_tensors,
        lambda: {
            "tensors": [torch.ones(2, 2), torch.ones(2)],
            "layout": LAYOUT,
            "mesh": MESH,
            "placements": (mf.Replicate(),),
            "dtype": None,
        },
        {"dtype": "none dtype"},
    ),
    "DBuffer.from_local": Case(
        mf.DBuffer.from_local,
        lambda: {"local": torch.ones(6), "layout": LAYOUT, "mesh": MESH, "placements": (mf.Replicate(),)},
    ),
    "DBuffer.from_state": Case(
        mf.DBuffer.from_state,
        lambda: {"state": state(), "group": spec().groups[0], "compute": False},
        {"compute": "flag"},
    ),
    "DBuffer.get_tensor_view": Case(lambda index: buffer().get_tensor_view(index), lambda: {"index": 0}),
    "DBuffer.redistribute": Case(
        lambda **k: buffer().redistribute(**k),
        lambda: {"placements": (mf.Replicate(),), "dtype": None, "layout": None},
        {"dtype": "none dtype", "layout": "none"},
    ),
    "state[unit]": Case(lambda unit: state()[unit], lambda: {"unit": ""}),
    "spec.units_matching": Case(lambda pattern: spec().units_matching(pattern), lambda: {"pattern": ""}),
    "spec.group_of": Case(lambda path: spec().group_of(path), lambda: {"path": "w"}),
    "spec.leaf": Case(lambda path: spec().leaf(path), lambda: {"path": "w"}),
    "spec.unit_groups": Case(lambda unit: spec().unit_groups(unit), lambda: {"unit": ""}),
    "spec.select": Case(lambda patterns: spec().select(patterns), lambda: {"patterns": ("w",)}),
    # Differentiation
    "value_and_grad": Case(
        lambda **k: mf.value_and_grad(**k)(state()),
        lambda: {
            "loss_fn": loss,
            "has_aux": False,
            "is_last_microbatch": True,
            "accumulate": None,
            "donate": False,
        },
        {"has_aux": "flag", "is_last_microbatch": "flag", "accumulate": "none", "donate": "flag"},
        {"has_aux": "loss_fn"},
    ),
    "value_and_grad()": Case(mf.value_and_grad(loss), lambda: {"state": state()}),
    "with_options": Case(
        lambda **k: mf.value_and_grad(loss).with_options(**k)(state()),
        lambda: {"is_last_microbatch": True, "accumulate": None, "donate": False},
        {"is_last_microbatch": "flag", "accumulate": "none", "donate": "flag"},
    ),
    "vjp": Case(mf.vjp, lambda: {"fn": loss, "state": state()}, {"fn": "function"}),
    "pullback": Case(
        lambda **k: pullback()(**k),
        lambda: {"cotangent": torch.ones(2), "is_last_microbatch": True, "accumulate": None, "donate": False},
        {"cotangent": "none", "is_last_microbatch": "flag", "accumulate": "none", "donate": "flag"},
    ),
    "pullback.inputs": Case(
        lambda **k: pullback().inputs(**k), lambda: {"cotangent": torch.ones(2)}, {"cotangent": "none"}
    ),
    "pullback.weights": Case(
        lambda **k: second_half(**k),
        lambda: {"is_last_microbatch": True, "accumulate": None, "donate": False},
        {"is_last_microbatch": "flag", "accumulate": "none", "donate": "flag"},
    ),
    "saved_tensors_hooks": Case(with_hooks, lambda: {"state": ..., "hooks": torch.autograd.graph.save_on_cpu()}),
    "compile": Case(
        mf.compile,
        lambda: {"step": loss, "backend": "eager", "mode": None, "fullgraph": True, "options": None, "dynamic": None},
        {
            "step": "none function",
            "backend": "none function",
            "mode": "none",
            "fullgraph": "flag",
            "options": "none",
            "dynamic": "none flag",
        },
    ),
    # Modules
    "params_of": Case(mf.params_of, lambda: {"module": torch.nn.Linear(1, 1)}),
    "functional_call": Case(
        mf.functional_call,
        lambda: {"module": LINEAR, "state": linear_state(), "args": (torch.ones(2),), "kwargs": None},
        {"kwargs": "none", "args": "list"},
    ),
    # Layouts
    "build_row_atomic_layout": Case(
        mf.build_row_atomic_layout,
        lambda: {"shapes": [(2, 2)], "dp_size": 1, "block_size": 1, "shard_layout": mf.ShardLayout.PADDED},
        {"dp_size": "integer", "block_size": "integer"},
    ),
    "build_for_row_atomic": Case(
        mf.build_for_row_atomic,
        lambda: {"shapes": [(2, 2)], "dp_size": 1, "block_size": 1},
        {"dp_size": "integer", "block_size": "integer"},
    ),
    "build_for_row_atomic_unpadding": Case(
        mf.build_for_row_atomic_unpadding,
        lambda: {"shapes": [(2, 2)], "dp_size": 1, "block_size": 1},
        {"dp_size": "integer", "block_size": "integer"},
    ),
    "build_for_tensor_atomic": Case(
        mf.build_for_tensor_atomic,
        lambda: {"shapes": [(2, 2)], "dp_size": 1, "tensor_owners": [0]},
        {"dp_size": "integer"},
    ),
    "layout.rank_range": Case(LAYOUT.rank_range, lambda: {"rank": 0}),
    "layout.tensor_range": Case(LAYOUT.tensor_range, lambda: {"index": 0}),
    "layout.local_range": Case(LAYOUT.local_range, lambda: {"index": 0, "rank": 0}),
    "layout.local_shape": Case(LAYOUT.local_shape, lambda: {"index": 0, "rank": 0}),
    "layout.ranks_of": Case(LAYOUT.ranks_of, lambda: {"index": 0}),
    "layout.local_tensors": Case(LAYOUT.local_tensors, lambda: {"rank": 0}),
    "layout.padding": Case(LAYOUT.padding, lambda: {"rank": 0}),
    "layout.coarsen": Case(LAYOUT.coarsen, lambda: {"k": 1}),
    # Optimizers
    "optim.sgd": Case(
        lambda **k: stepping(mf.optim.sgd(**k)),
        lambda: {
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 0.0,
            "fused": None,
            "overrides": None,
        },
        {
            "lr": NUMBER,
            "momentum": NUMBER,
            "nesterov": "flag",
            "weight_decay": NUMBER,
            "fused": "none flag",
            "overrides": "none",
        },
    ),
    "optim.adamw": Case(
        lambda **k: stepping(adamw(**k)),
        lambda: {
            "lr": 0.1,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "fused": None,
            "overrides": None,
        },
        {"lr": NUMBER, "eps": NUMBER, "weight_decay": NUMBER, "fused": "none flag", "overrides": "none"},
    ),
    "optim.muon": Case(
        lambda **k: stepping(muon(**k)),
        lambda: {
            "lr": 0.1,
            "weight_decay": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "ns_coefficients": (3.4, -4.7, 2.0),
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
            "fallback": mf.optim.sgd(lr=0.1),
            "exclude": (),
            "split": None,
            "batched": False,
            "buckets": 2,
            "compile_ns": False,
            "gram": False,
        },
        {
            "lr": NUMBER,
            "weight_decay": NUMBER,
            "momentum": NUMBER,
            "nesterov": "flag",
            "eps": NUMBER,
            "ns_steps": "integer",
            "adjust_lr_fn": "none",
            "split": "none",
            "batched": "flag",
            "buckets": "integer",
            "compile_ns": "flag",
            "gram": "flag",
        },
    ),
    "optim.from_gradient_transformation": Case(
        lambda tx: stepping(mf.optim.from_gradient_transformation(tx)), lambda: {"tx": Scale()}
    ),
    "optim.global_norm": Case(
        mf.optim.global_norm, lambda: {"grads": grads(), "norm_type": 2.0}, {"norm_type": "integer"}
    ),
    "optim.clip_by_global_norm": Case(
        mf.optim.clip_by_global_norm,
        lambda: {"grads": grads(), "max_norm": 1.0, "norm_type": 2.0, "donate": False},
        {"max_norm": "integer", "norm_type": "integer", "donate": "flag"},
    ),
    "checkpoint.save": Case(
        lambda **k: in_a_folder(lambda: mf.checkpoint.save(**k)),
        lambda: {"path": "x", "state": (now := state()), "opt_state": mf.optim.sgd(0.1).init(now), "extra": None},
        {
            "path": "text",
            "opt_state": "none",
            "extra": "integer negative nan flag text none complex dtype",
        },
    ),
    "checkpoint.load": Case(
        lambda **k: in_a_folder(lambda: loaded(**k)),
        lambda: {"path": "x", "spec": spec(), "opt": mf.optim.sgd(0.1)},
        {"path": "text", "opt": "none"},
    ),
    "optim.sgd().init": init_of(lambda: mf.optim.sgd(0.1)),
    "optim.sgd().step": step_of(lambda: mf.optim.sgd(0.1)),
    "optim.adamw().init": init_of(adamw),
    "optim.adamw().step": step_of(adamw),
    "optim.muon().init": init_of(muon),
    "optim.muon().step": step_of(muon),
    "optim.from_gradient_transformation().init": init_of(lambda: mf.optim.from_gradient_transformation(Scale())),
    "optim.from_gradient_transformation().step": step_of(lambda: mf.optim.from_gradient_transformation(Scale())),
}


def arguments() -> Iterator[tuple[str, str]]:
    for name, case in CASES.items():
        for argument in case.good():
            yield name, argument


def named(argument: str, text: str) -> bool:
    """Whether the text names the argument, or a part of it: `lr`, `betas[0]`, `grads.w`."""
    return re.search(rf"`{re.escape(argument)}[`.\[]", text) is not None


@pytest.mark.parametrize(("name", "argument"), list(arguments()))
def test_junk_is_refused_by_name(name: str, argument: str) -> None:
    case, wrong = CASES[name], []
    for kind, junk in JUNK.items():
        if kind in case.legal.get(argument, "").split():
            continue
        try:
            case.call(**{**case.good(), argument: junk()})
        except mf.MfsdpError as error:
            if not any(named(each, str(error)) for each in (argument, case.shown.get(argument, argument))):
                wrong.append(f"{kind}: {error}")
        except Exception as error:  # what this test is about
            wrong.append(f"{kind}: {type(error).__name__}: {str(error)[:150]}")
        else:
            wrong.append(f"{kind}: taken")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", list(CASES))
def test_without_junk_nothing_is_refused(name: str) -> None:
    CASES[name].call(**CASES[name].good())


# Made by the functions above, or checked where they are used (`plan` refuses bad policies and placements).
MADE_ELSEWHERE = {
    "AbstractMesh",
    "BlockAtomic",
    "ExecutionOrder",
    "GlobalLayout",
    "GradientTransformation",
    "GroupSpec",
    "LeafSpec",
    "Optimizer",
    "LayoutChoice",
    "Partial",
    "Pending",
    "Phase",
    "Placement",
    "Placements",
    "PrefetchOrder",
    "Pullback",
    "Range",
    "Replicate",
    "RowAtomic",
    "ShardLayout",
    "ShardSpec",
    "ShardState",
    "Stage",
    "TensorAtomic",
    "UnitState",
    "ValueAndGrad",
    "Collective",
    "SimulatedMesh",
    "Simulation",
    *(name for name in mf.optim.__all__ if name.endswith("State")),
    *(name for name in mf.__all__ if name.endswith("Error")),
}
TAKE_NOTHING = {"hfsdp", "hsdp", "testing.single_rank", "zero1", "zero2", "zero3"}


def test_every_public_function_and_argument_is_in_the_table() -> None:
    public = {name: getattr(mf, name) for name in mf.__all__ if not inspect.ismodule(getattr(mf, name))}
    public |= {f"optim.{name}": getattr(mf.optim, name) for name in mf.optim.__all__}
    public |= {f"testing.{name}": getattr(mf.testing, name) for name in mf.testing.__all__}
    public |= {f"checkpoint.{name}": getattr(mf.checkpoint, name) for name in mf.checkpoint.__all__}
    tested = {name for case in CASES for name in (case, case.split(".")[0], case.split(" ")[0])}
    short = {name: name.removeprefix("optim.").removeprefix("testing.") for name in public}
    missing = {name for name in public if name not in tested and short[name] not in MADE_ELSEWHERE}
    assert missing == TAKE_NOTHING
    assert not any(inspect.signature(public[name]).parameters for name in missing)
    for name, case in CASES.items():
        if name not in public:
            continue
        named = [p.name for p in inspect.signature(public[name]).parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert set(named) - {"args"} <= set(case.good()), name
