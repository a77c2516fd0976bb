"""`testing.simulate`: bit for bit what real processes give, and the unsharded model at sizes that they don't reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mfsdp_fn as mf
import test_muon
import test_value_and_grad
import test_vjp
from mfsdp_fn.testing import SimulatedMesh, simulate
from models import (
    EXACT,
    LR,
    PRESETS,
    Params,
    accumulated,
    assert_equal,
    batch_of,
    bilinear,
    integers,
    layouts_of,
    made,
    mesh_of,
    plain_training,
    sgd,
    sharded_loss,
    trainable,
)
from optim_cases import data, loss_fn, make_params
from pool import run_ranks
from simulated import run_simulated

MESHES: dict[int, list[tuple[int, ...]]] = {1: [(1,), (1, 1)], 2: [(2,)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (4, 1)]}
PRECISIONS = {
    "plain": mf.MixedPrecisionPolicy(),
    "mixed": mf.MixedPrecisionPolicy(compute=torch.bfloat16, reduce=torch.float32),
    "half": mf.MixedPrecisionPolicy(grad=torch.float16, reduce=torch.float16),
}
OPTIMIZERS: dict[str, Callable[[], mf.optim.Optimizer]] = {
    "sgd": lambda: mf.optim.sgd(0.1, 0.9),
    "adamw": lambda: mf.optim.adamw(),
    "muon": lambda: mf.optim.muon(lr=0.1, fallback=mf.optim.adamw()),
}


def presets_of(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("ddp", "zero1", "zero2", "zero3") if len(shape) == 1 else ("hsdp", "hfsdp")


def steps(rank: int, world: int, shape: tuple[int, ...], preset: str, precision: str, layout: str, opt: str) -> Any:
    """Two steps of two microbatches with clipping, on tensors of every awkward shape; everything this rank has then."""
    params = make_params()
    spec = mf.plan(
        params,
        mesh_of(*shape),
        PRESETS[preset](),
        units=("blocks.*",),
        precision=PRECISIONS[precision],
        shard_layout=layout,
        grad_scale=float(world),  # sums, which are exact
    )
    state = mf.shard(params, spec)
    optimizer = OPTIMIZERS[opt]()
    opt_state, norms = optimizer.init(state), []
    for step in range(2):
        grads: Any = accumulated(loss_fn, state, [data(step, micro, rank) for micro in range(2)])  # pyright: ignore
        grads, norm = mf.optim.clip_by_global_norm(grads, 100.0)
        state, opt_state = optimizer.step(grads, opt_state, state, donate=step == 1)
        norms.append(norm)
    whole = mf.unshard(state)
    return [buffer.clone() for buffer in state.main], {name: value.clone() for name, value in whole.items()}, norms


def many_steps(rank: int, world: int) -> list[Any]:
    cases = [
        (shape, preset, precision, layout, opt)
        for shape in MESHES[world]
        for preset in presets_of(shape)
        for precision, layout, opt in (
            ("plain", "padded", "muon"),
            ("mixed", layouts_of(preset, "padded", "unpadded")[-1], "adamw"),
            ("half", "padded", "sgd"),
        )
    ]
    return [(case, steps(rank, world, *case)) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_steps_equal_real_ranks(world: int) -> None:
    real, simulated = run_ranks(world, many_steps), run_simulated(world, many_steps)
    for theirs, mine in zip(real, simulated, strict=True):
        for (case, (main, whole, norms)), (_, got) in zip(theirs, mine, strict=True):
            assert all(value.any() for path, value in whole.items() if value.numel()), case
            assert_equal(got[1], whole, case)
            pairs = [*zip(main, got[0], strict=True), *zip(norms, got[2], strict=True)]
            assert all(torch.equal(a, b) for a, b in pairs), case


@pytest.mark.parametrize(("world", "preset"), [(3, "zero3"), (4, "hfsdp"), (4, "hsdp")])
def test_owner_exchanges_equal_real_ranks(world: int, preset: str) -> None:
    args = (test_muon.train, {}, None, preset, "unpadded")
    for (real, _), (simulated, _) in zip(run_ranks(world, *args), run_simulated(world, *args), strict=True):
        for theirs, mine in zip(real, simulated, strict=True):
            assert_equal(mine, theirs)


# Sizes that the pool doesn't reach, against the unsharded model


def trained(rank: int, world: int, preset: str, shape: tuple[int, ...], options: dict[str, Any]) -> Params:
    # Means over a power of two are exact; over others, sums are taken.
    factor, scale = (1.0, float(world)) if world & (world - 1) else (float(world), 1.0)
    state, _ = made(preset, *shape, grad_scale=scale, **options)
    for step in range(2):
        state = sgd(state, accumulated(sharded_loss, state, [batch_of(step, m, rank) for m in range(2)], factor))
    return mf.unshard(state)


@pytest.mark.parametrize(
    ("preset", "shape"),
    [
        ("ddp", (5,)),
        ("zero1", (7,)),
        ("zero2", (8,)),
        ("zero3", (7,)),
        ("hsdp", (2, 5)),
        ("hfsdp", (3, 2)),
        ("hfsdp", (4, 4)),
    ],
)
def test_many_ranks_equal_the_unsharded_model(preset: str, shape: tuple[int, ...]) -> None:
    world = torch.Size(shape).numel()
    expected = plain_training(bilinear(), world, steps=2, micros=2)
    for layout in layouts_of(preset, "padded", "unpadded"):
        for whole in run_simulated(world, trained, preset, shape, {"shard_layout": layout}):
            assert_equal(whole, expected, layout)


def test_muon_on_eight_ranks_equals_torch() -> None:
    want = test_muon.reference(test_muon.SHAPES, 8, test_muon.is_matrix)
    for preset in ("zero3", "zero3", "hfsdp"):  # again: nothing that was kept for the first ranks is used for others
        for updates, facts in run_simulated(8, test_muon.train, {}, None, preset):
            test_muon.assert_updates(updates, want)
            assert len(facts["straddling"]) >= 3


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_a_gate_of_72_rows_on_16_ranks(layout: str) -> None:
    def step(mesh: SimulatedMesh) -> tuple[torch.Tensor, list[int]]:
        params = trainable({"gate": integers(72, 64, seed=1), "up": integers(48, 64, seed=2)})
        state = mf.shard(params, mf.plan(params, mesh, mf.zero3(), precision=EXACT, shard_layout=layout))
        x = integers(64, seed=mesh.get_rank())
        grads = mf.value_and_grad(lambda state: (mf.unshard(state)["gate"] @ x).sum())(state)[1]
        return mf.unshard(sgd(state, grads))["gate"], [buffer.numel() for buffer in state.main]

    total = sum((integers(64, seed=rank) for rank in range(16)), torch.zeros(64, dtype=torch.float64))
    results = simulate(16)(step)
    for gate, _ in results:
        assert torch.equal(gate, integers(72, 64, seed=1) - LR * total / 16)
    held = [sum(sizes) for _, sizes in results]
    assert len(set(held)) == 1 if layout == "padded" else sum(held) == (72 + 48) * 64


def test_sixty_four_ranks() -> None:
    """Most hold nothing of most tensors."""

    def step(mesh: SimulatedMesh) -> Any:
        params = trainable({f"l.{i}.w": integers(i, 3, seed=i) for i in range(4)} | {"scale": integers(seed=9)})
        state = mf.shard(params, mf.plan(params, mesh, mf.zero3(), units=("l.*",), precision=EXACT))

        def loss_fn(state: mf.ShardState) -> torch.Tensor:
            total = mf.unshard(state[""])["scale"] * mesh.get_rank()
            for unit in state.spec.units_matching("l.*"):
                total = total + mf.unshard(state[unit])["w"].sum() * mesh.get_rank()
            return total

        return mf.unshard(mf.value_and_grad(loss_fn)(state)[1])

    for grads in simulate(64)(step):
        assert all(bool((grad == 63 / 2).all()) for grad in grads.values())


# Any tree on any mesh

TREES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),  # shape
        st.sampled_from(["", "l.0.", "l.1.", "l.2."]),  # unit
        st.booleans(),  # trainable
    ),
    min_size=1,
    max_size=6,
).filter(lambda leaves: any(leaf[2] for leaf in leaves))
CASES = st.one_of(
    st.tuples(st.integers(1, 9).map(lambda size: (size,)), st.sampled_from(["ddp", "zero1", "zero2", "zero3"])),
    st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 4)), st.sampled_from(["hsdp", "hfsdp"])),
)


def tree_of(leaves: list[Any]) -> Params:
    named = {f"{unit}p{i}": (shape, trains) for i, (shape, unit, trains) in enumerate(leaves)}
    return {
        name: integers(*shape, seed=i).requires_grad_(trains) for i, (name, (shape, trains)) in enumerate(named.items())
    }


def tree_loss(units: dict[str, Params], seed: int) -> torch.Tensor:
    """Bilinear in the units, so that backward needs their weights."""
    sums = []
    for unit in units.values():
        parts = [(value * integers(*value.shape, seed=seed + i)).sum() for i, value in enumerate(unit.values())]
        sums.append(torch.stack(parts).sum())
    return sum(sums[1:], sums[0]) + sums[0] * sums[-1]


@settings(max_examples=30, deadline=None)
@given(leaves=TREES, case=CASES, layout=st.sampled_from(["padded", "unpadded"]), micros=st.integers(1, 3))
def test_any_tree_on_any_mesh(leaves: list[Any], case: Any, layout: str, micros: int) -> None:
    shape, preset = case
    (layout,) = layouts_of(preset, layout) or ("padded",)
    world = torch.Size(shape).numel()
    seeds = {(rank, micro): 100 * rank + 10 * micro for rank in range(world) for micro in range(micros)}

    def step(mesh: SimulatedMesh) -> tuple[Params, Params, tuple[str, ...]]:
        params = tree_of(leaves)
        spec = mf.plan(
            params,
            mesh,
            PRESETS[preset](),
            units=("l.*",) if any(leaf[1] for leaf in leaves) else (),
            precision=EXACT,
            shard_layout=layout,
            grad_scale=float(world),
        )
        state, grads = mf.shard(params, spec), None
        for micro in range(micros):
            step = mf.value_and_grad(
                lambda s, seed: tree_loss({unit: mf.unshard(s[unit]) for unit in s.spec.units}, seed),
                is_last_microbatch=micro == micros - 1,
                accumulate=grads,
            )
            grads = step(state, seeds[mesh.get_rank(), micro])[1]
        assert grads is not None
        return mf.unshard(state), mf.unshard(grads), spec.units

    results = simulate(shape)(step)
    units = results[0][2]
    whole = tree_of(leaves)
    by_unit = {
        unit: {
            name: value for name, value in whole.items() if name.startswith(unit + ".") or (not unit and name[0] == "p")
        }
        for unit in units
    }
    wanted = [name for name, value in whole.items() if value.requires_grad]
    loss = sum((tree_loss(by_unit, seed) for seed in seeds.values()), torch.zeros((), dtype=torch.float64))
    expected = dict(zip(wanted, torch.autograd.grad(loss, [whole[name] for name in wanted]), strict=True))
    for params, grads, _ in results:
        assert_equal(params, {name: value.detach() for name, value in whole.items()})
        assert_equal({name: grads[name] for name in wanted}, expected)


# What else runs inside


def test_every_way_of_using_units() -> None:
    """Checkpointed blocks, explicit launches, units used twice, saved tensors offloaded: as on real ranks."""
    run_simulated(4, test_value_and_grad.shapes_of_use)


def test_interleaved_microbatches() -> None:
    """`vjp` in the orders of a pipeline, as on real ranks."""
    run_simulated(4, test_vjp.pipelines)


class Normed(torch.nn.Module):
    """Exact up to its running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = (
            torch.nn.Linear(3, 5, dtype=torch.float64),
            torch.nn.BatchNorm1d(5, dtype=torch.float64),
        )
        with torch.no_grad():
            self.linear.weight.copy_(torch.randint(-2, 3, (5, 3)))
            self.linear.bias.copy_(torch.randint(-2, 3, (5,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def test_modules_and_random_numbers_are_each_ranks_own() -> None:
    def step(mesh: SimulatedMesh, seed: int) -> tuple[Params, torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        model = Normed()
        params = mf.params_of(model)
        state = mf.shard(params, mf.plan(params, mesh, mf.zero3(), units=("*",)))
        torch.manual_seed(seed + mesh.get_rank())
        x = torch.randint(-2, 3, (4, 3)).double()
        mf.value_and_grad(lambda state: mf.functional_call(model, state, (x,)).sum())(state)
        return mf.unshard(state), torch.rand(3), model.norm.running_mean  # pyright: ignore[reportReturnType]

    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    together = simulate(3)(step, 7)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    for rank, (params, drawn, mean) in enumerate(together):
        torch.manual_seed(7)
        model = Normed()
        assert_equal(params, dict(model.named_parameters()))
        torch.manual_seed(7 + rank)
        model(torch.randint(-2, 3, (4, 3)).double())
        assert torch.equal(drawn, torch.rand(3))
        assert torch.equal(mean, model.norm.running_mean)  # pyright: ignore[reportArgumentType]


def test_meshes_and_places() -> None:
    def look(mesh: SimulatedMesh) -> Any:
        inner, ep = mesh["inner"], mesh.reshaped((3, 2), ("ep", "edp"))
        assert (mesh.ndim, mesh.size(), mesh.size(1), mesh.shape, mesh.device_type) == (2, 6, 3, (2, 3), "cpu")
        assert mesh["outer", "inner"].mesh_dim_names == mesh.mesh_dim_names == ("outer", "inner")
        assert (
            mesh.get_coordinate()
            == (mesh.get_local_rank("outer"), mesh.get_local_rank(1))
            == divmod(mesh.get_rank(), 3)
        )
        return inner.mesh.tolist(), inner.get_local_rank(), ep["edp"].mesh.tolist(), ep["ep"].mesh.tolist()

    assert simulate((2, 3))(look) == [
        ([0, 1, 2], 0, [0, 1], [0, 2, 4]),
        ([0, 1, 2], 1, [0, 1], [1, 3, 5]),
        ([0, 1, 2], 2, [2, 3], [0, 2, 4]),
        ([3, 4, 5], 0, [2, 3], [1, 3, 5]),
        ([3, 4, 5], 1, [4, 5], [0, 2, 4]),
        ([3, 4, 5], 2, [4, 5], [1, 3, 5]),
    ]


def test_a_part_of_a_mesh_is_a_mesh() -> None:
    def step(mesh: SimulatedMesh) -> Params:
        params = trainable({"w": integers(5, 2, seed=3)})
        state = mf.shard(params, mf.plan(params, mesh["inner"], mf.zero3(), precision=EXACT))
        loss_fn = lambda state: mf.unshard(state)["w"].sum() * mesh.get_rank()  # noqa: E731
        return mf.unshard(mf.value_and_grad(loss_fn)(state)[1])

    assert [grads["w"][0, 0].item() for grads in simulate((2, 2))(step)] == [0.5, 0.5, 2.5, 2.5]


# What is recorded


@pytest.mark.parametrize("preset", ["zero3", "hsdp", "hfsdp"])
def test_collectives_are_recorded(preset: str) -> None:
    """Exact counts of a step of two microbatches, and bytes, on 2 x 4 ranks or 8."""
    shape = (8,) if preset == "zero3" else (2, 4)
    inner = 8 if preset == "zero3" else 4

    def step(rank: int, world: int) -> Any:
        state, _ = made(preset, *shape, params=trainable({f"blocks.{i}.w": integers(8, 8, seed=i) for i in range(2)}))

        def loss_fn(state: mf.ShardState) -> torch.Tensor:
            x = torch.ones(8, dtype=torch.float64)
            for unit in state.spec.units:
                x = mf.unshard(state[unit])["w"] @ (x * x)
            return x.sum()

        mesh = mesh_of(*shape)
        assert isinstance(mesh, SimulatedMesh)
        before, grads = len(mesh.collectives), None
        for micro in range(2):
            grads = mf.value_and_grad(loss_fn, is_last_microbatch=micro == 1, accumulate=grads)(state)[1]
        assert grads is not None
        sgd(state, grads)
        return mesh.collectives[before:]

    whole, part, piece = 8 * 64, 8 * 64 // inner, 8 * 64 // 8
    for launched in run_simulated(8, step):
        for unit in ("blocks.0", "blocks.1"):
            mine = [c for c in launched if c.group == f"{unit} float64"]
            found = [(c.kind, c.axis, c.sent, c.received) for c in mine]
            expected = 4 * [("all_gather", "inner", part, whole)] + 2 * [("reduce_scatter", "inner", whole, part)]
            if preset == "hsdp":
                expected += [("all_reduce", "outer", part, part)]
            if preset == "hfsdp":  # the last microbatch's, and the gather of what the optimizer made
                expected += [("reduce_scatter", "outer", part, piece), ("all_gather", "outer", piece, part)]
            assert sorted(found) == sorted(expected)
            assert {c.dtype for c in mine} == {torch.float64}
        assert sum(bool(c.group) for c in launched) == len(launched)


def test_norms_and_owners_belong_to_no_group() -> None:
    def step(mesh: SimulatedMesh) -> list[tuple[str, str, str]]:
        params = trainable({"w": torch.ones(3, 3)})
        state = mf.shard(params, mf.plan(params, mesh, mf.hfsdp()))
        before = len(mesh.collectives)
        mf.optim.global_norm(state)
        mf.owner_map(lambda full: full * 2)(state, mf.plan_owners(state.spec))
        return [(c.kind, c.axis, c.group) for c in mesh.collectives[before:]]

    norm = [("all_gather", "inner", ""), ("all_gather", "outer", "")]
    assert simulate((2, 2))(step) == 4 * [[*norm, *(2 * [("all_to_all", "outer+inner", "")])]]
