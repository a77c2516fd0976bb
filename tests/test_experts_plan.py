"""What a plan by unit takes and refuses, and whole steps and modules with experts on a mesh of their own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import experts
import mfsdp_fn as mf
from experts import ON_EXPERTS, UNITS, expert_mesh, made, part, whole
from mfsdp_fn.graph import schedule
from models import EXACT, assert_equal, batch_of, mesh_of, plain_training
from pool import run_ranks
from test_compile import Spy


def step_of(group: str, factor: float) -> Any:
    optimizer = mf.optim.sgd(lr=2.0**-4)

    def step(state: mf.ShardState, opt_state: Any, batch: Any) -> Any:
        loss, grads = mf.value_and_grad(experts.sharded_loss)(state, batch, factor, group)
        grads, norm = mf.optim.clip_by_global_norm(grads, float("inf"))
        state, opt_state = optimizer.step(grads, opt_state, state, donate=True)
        return state, opt_state, loss, norm

    return step, optimizer.init


def compiled(rank: int, world: int) -> Counter[str]:
    expected = plain_training(whole(), world, steps=3, micros=1, loss=experts.plain_loss)
    spy = Spy()
    torch._dynamo.reset()
    state, group = made(mf.hsdp, mf.zero3, (1, 2), 2)
    step, init = step_of(group, float(world))
    step, opt_state = mf.compile(step, backend=spy), init(state)
    for number in range(3):
        state, opt_state, _, _ = step(state, opt_state, batch_of(number, 0, rank))
    assert_equal(mf.unshard(state), part(expected, rank, 2))
    return Counter(spy.kinds())


def test_a_whole_step_compiles() -> None:
    for count in run_ranks(2, compiled, timeout=240):
        # Backward doesn't need the root's weights. Clipping gathers one number over the default mesh. Over axes of one
        # rank, the outer one and the experts' own here, nothing is sent.
        assert (count["gather"], count["scatter"], count["reduce"]) == (5 + 1, 3, 0)


def test_a_gather_of_what_was_gathered_stays_behind_it() -> None:
    """As a norm over two axes is: the second launch depends on the first one's wait through cheap nodes."""
    graph = torch.fx.Graph()
    flat, ops = graph.placeholder("x"), torch.ops._c10d_functional
    for _ in range(2):
        launch = graph.call_function(ops.all_gather_into_tensor.default, (flat, 2, "group"))
        wait = graph.call_function(ops.wait_tensor.default, (launch,))
        flat = graph.call_function(torch.ops.aten.neg.default, (wait,))
    graph.output(flat)
    before = [node.name for node in graph.nodes]
    schedule(graph)
    graph.lint()
    assert [node.name for node in graph.nodes] == before


class Experts(nn.Module):
    def __init__(self, params: dict[str, torch.Tensor], group: str) -> None:
        super().__init__()
        self.w, self.b, self.group = nn.Parameter(params["w"]), nn.Parameter(params["b"]), group

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return experts.dispatched({"w": self.w, "b": self.b}, tokens, x, self.group)


class Block(nn.Module):
    def __init__(self, params: dict[str, torch.Tensor], group: str) -> None:
        super().__init__()
        self.w = nn.Parameter(params["w"])
        self.experts = Experts({key: params[f"experts.{key}"] for key in "wb"}, group)

    def forward(self, tokens: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return e @ self.w.T + self.experts(tokens, e)


class Model(nn.Module):
    def __init__(self, params: dict[str, torch.Tensor], group: str) -> None:
        super().__init__()
        self.embed = nn.Parameter(params["embed"])
        names = [f"blocks.{i}." for i in range(experts.DEPTH)]
        parts = [{name[len(n) :]: value for name, value in params.items() if name.startswith(n)} for n in names]
        self.blocks = nn.ModuleList(Block(values, group) for values in parts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        e = self.embed[tokens]
        return sum((block(tokens, e) for block in self.blocks), e)


def as_module(rank: int, world: int) -> None:
    mesh = expert_mesh(2, 2)
    model = Model(part(whole(), mesh.get_local_rank("ep"), 2), mesh["ep"].get_group().group_name)
    params = mf.params_of(model)
    spec = mf.plan(
        params,
        {"": mesh_of(4), ON_EXPERTS: mesh["edp"]},
        mf.zero3(),
        grad_scale={"": 1.0, ON_EXPERTS: 0.5},
        units=UNITS,
        precision=EXACT,
    )

    def loss_fn(state: mf.ShardState, batch: Any) -> torch.Tensor:
        return (mf.functional_call(model, state, (batch[0],)) * batch[1]).sum() * world

    state = mf.shard(params, spec)
    for step in range(3):
        _, grads = mf.value_and_grad(loss_fn)(state, batch_of(step, 0, rank))
        state = mf.sync_model_weights(mf.tree_map(lambda w, g: w - 2.0**-4 * g, state, grads))
    expected = plain_training(whole(), world, steps=3, micros=1, loss=experts.plain_loss)
    assert_equal(mf.unshard(state), part(expected, rank // 2, 2))


def test_an_unmodified_module_with_experts() -> None:
    run_ranks(4, as_module)


def abstract(**options: Any) -> mf.ShardSpec:
    params = {name: torch.zeros(2, 2, requires_grad=True) for name in ("head", "l.0.w", "l.0.e.w", "l.1.w", "l.1.e.w")}
    given: dict[str, Any] = {
        "mesh": mf.AbstractMesh((4,), ("dp",)),
        "placements": mf.zero3(),
        "units": ("l.*", "l.*.e"),
    }
    given |= options
    return mf.plan(params, given.pop("mesh"), given.pop("placements"), **given)


def test_the_longest_pattern_wins() -> None:
    small, tiny = mf.AbstractMesh((2,), ("edp",)), mf.AbstractMesh((1,), ("one",))
    spec = abstract(
        mesh={"": mf.AbstractMesh((4,), ("dp",)), "l.*": small, "l.0.e": tiny},
        placements={"": mf.zero3(), "l.*.e": mf.zero1()},
        grad_scale={"l.*": 0.5, "l.1.e": 0.25},
    )
    found = {g.unit: (g.ranks, g.placements == mf.zero1(), g.grad_scale) for g in spec.groups}
    assert found == {
        "": (4, False, 1.0),
        "l.0": (2, False, 0.5),
        "l.0.e": (1, True, 0.5),
        "l.1": (2, False, 0.5),
        "l.1.e": (2, True, 0.25),
    }
    assert spec.mesh.size() == 4 and len(spec.meshes) == 3
    assert spec.explain().startswith("5 leaves in 5 groups of 5 units over 4 ranks, l.0 over 2, l.0.e over 1\n")


def test_what_differs_by_unit_is_in_the_digest() -> None:
    small = mf.AbstractMesh((2,), ("edp",))
    whole_mesh = mf.AbstractMesh((4,), ("dp",))
    specs = [
        abstract(),
        abstract(grad_scale={"l.*": 0.5}),
        abstract(placements={"": mf.zero3(), "l.*": mf.zero1()}),
        abstract(mesh={"": whole_mesh, "l.*": small}),
        abstract(mesh={"": whole_mesh, "l.*": mf.AbstractMesh((2,), ("other",))}),
    ]
    assert len(set(specs)) == len(specs)
    assert abstract(mesh={"": whole_mesh}, grad_scale={"l.0": 1.0}) == abstract()


DP = mf.AbstractMesh((4,), ("dp",))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": {"l.*": DP}}, r"`mesh` got meshes for \['l\.\*'\]; expected one for \"\" too"),
        ({"mesh": {"": DP, "m.*": DP}}, r"`mesh` got 'm\.\*'; expected a pattern that matches one of the units"),
        ({"mesh": {"": DP, "l.*": "edp"}}, r"`mesh\['l\.\*'\]` got 'edp'; expected a DeviceMesh or an AbstractMesh"),
        (
            {"mesh": {"": DP, "l.*": mf.AbstractMesh((3,), ("x",))}},
            r"`mesh\['l\.\*'\]` got 3 ranks; expected a number that divides the default mesh's 4",
        ),
        (
            {"mesh": {"": DP, "l.*": DP, "l.0": mf.AbstractMesh((2,), ("x",))}},
            r"`mesh` got 'l\.\*' and 'l\.0' for unit 'l\.0'; expected one longest pattern a unit",
        ),
        (
            {"placements": {"l.*": mf.zero3()}},
            r"`placements` got placements for \['l\.\*'\]; expected some for \"\" too",
        ),
        (
            {"placements": {"": mf.zero3(), "l.*.e": mf.hsdp()}},
            r"`placements\['l\.\*\.e'\]\.parameter` got 2 placements; expected one for each of the mesh's 1 axes",
        ),
        (
            {"mesh": {"": DP, "l.*.e": mf.AbstractMesh((2, 2), ("a", "b"))}},
            r"`placements` got 1 placements for unit 'l\.0\.e'; expected one for each of the 2 axes of mesh\['l",
        ),
        ({"placements": {"": mf.zero3(), "l.*": "zero3"}}, r"`placements\['l\.\*'\]` got 'zero3'; expected Placements"),
        ({"grad_scale": {"l.*": "half"}}, r"`grad_scale\['l\.\*'\]` got half; expected a finite number"),
        ({"grad_scale": {"x": 2.0}}, r"`grad_scale` got 'x'; expected a pattern that matches one of the units"),
        ({"grad_scale": {3: 2.0}}, r"`grad_scale` got 3; expected a dotted pattern"),
    ],
)
def test_refusals_by_unit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(mf.PlanError, match=text):
        abstract(**options)


def refusals_on_ranks(rank: int, world: int) -> None:
    params = {"w": torch.zeros(4, 2, requires_grad=True), "experts.w": torch.zeros(4, 2, requires_grad=True)}
    dp, ep = mesh_of(4), expert_mesh(2, 2)

    def plan(default: Any, on_experts: Any) -> mf.ShardSpec:
        return mf.plan(params, {"": default, "experts": on_experts}, mf.zero3(), units=("experts",))

    for default, on_experts, text in [
        (ep["edp"], dp, r"`mesh\['experts'\]` got a mesh with ranks \[.*\] that the default mesh doesn't have"),
        (dp, mf.AbstractMesh((2,), ("x",)), r"`mesh\['experts'\]` got a AbstractMesh; expected a DeviceMesh"),
        # Ranks 0 and 1 take their cells of one axis, the others of another: on no rank alone is that wrong.
        (dp, ep["edp"] if rank < 3 else ep["ep"], r"`mesh` got a plan that differs|`params` got a plan that differs"),
    ]:
        with pytest.raises(mf.PlanError, match=text):
            plan(default, on_experts)
    odd = [[0, 1], [0, 1], [2, 3], [1, 3]][rank]
    cells = {tuple(c): DeviceMesh("cpu", c, mesh_dim_names=("edp",)) for c in ([0, 1], [2, 3], [1, 3])}
    with pytest.raises(mf.PlanError, match=r"`mesh` got cell \[.*\] on rank \d and \[.*\] on rank \d; expected cells"):
        plan(dp, cells[tuple(odd)])
    again = mf.plan(params, {"": dp, "experts": DeviceMesh("cpu", dp.mesh, mesh_dim_names=dp.mesh_dim_names)},
                    mf.zero3(), units=("experts",))  # fmt: skip
    assert again.meshes == (dp,) and again.norm_axes == again.axes
    # The same spec on every rank, whose experts are not the same.
    spec = plan(dp, ep["edp"])
    found: list[Any] = [None] * world
    torch.distributed.all_gather_object(found, spec.digest())
    assert len(set(found)) == 1


def test_refusals_on_real_meshes() -> None:
    run_ranks(4, refusals_on_ranks)


# One mixture-of-experts layer of DeepSeek-V3, experts stacked: as its public configuration has it.
DEEPSEEK = {
    "attn.q_a": (1536, 7168),
    "attn.q_b": (24576, 1536),
    "attn.kv_a": (576, 7168),
    "attn.kv_b": (32768, 512),
    "attn.o": (7168, 16384),
    "gate": (256, 7168),
    "norm": (7168,),
}


@pytest.mark.parametrize(("dp", "ep"), [(256, 64), (128, 8), (64, 64)])
def test_planning_a_large_layer_without_processes(dp: int, ep: int) -> None:
    held = 256 // ep
    shapes = {f"layers.0.{name}": shape for name, shape in DEEPSEEK.items()}
    shapes |= {"layers.0.experts.gate_up": (held, 4096, 7168), "layers.0.experts.down": (held, 7168, 2048)}
    params = {name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
    specs = [
        mf.plan(
            params,
            {
                "": mf.AbstractMesh((dp,), ("dp",), rank),
                "layers.*.experts": mf.AbstractMesh((dp // ep,), ("edp",), rank % (dp // ep)),
            },
            mf.zero3(),
            units=("layers.*", "layers.*.experts"),
            grad_scale={"layers.*.experts": 1 / ep},
        )
        for rank in (0, dp - 1)
    ]
    assert specs[0] == specs[1]
    dense, own = specs[0].groups
    assert dense.ranks == dp and own.ranks == dp // ep
    assert own.scale == 1 / dp == dense.scale  # either way the mean over the whole batch
    assert own.layout.size >= held * (4096 * 7168 + 7168 * 2048)
