"""Muon against `torch.optim.Muon` on the unsharded model: updates, not weights, over steps with accumulation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf
from mfsdp_fn.optim.newton_schulz import gram_newton_schulz, newton_schulz
from mfsdp_fn.subset import subset
from models import ROUNDS_ALPHA, mesh_of
from pool import WORLD_SIZES, run_ranks

Params = dict[str, torch.Tensor]
STEPS, MICROS, LR = 4, 2, 0.05
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (10, 8),
    "norm": (8,),
    "blocks.0.norm": (8,),
    "blocks.0.wide": (12, 40),
    "blocks.0.tall": (36, 10),
    "blocks.0.square": (16, 16),
    "blocks.1.norm": (8,),
    "blocks.1.row": (1, 9),
    "blocks.1.column": (9, 1),
    "blocks.1.none": (0, 5),
    "blocks.1.wide": (12, 40),
}
# What is compared without rounding differs by at most this; see `test_the_bound_tells_variants_apart`.
BOUND = 2e-2 * LR


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Integers, so that sums and means over up to four ranks are exact."""
    generator = torch.Generator().manual_seed(seed * 1009 + sum(map(ord, name)))
    return torch.randint(-8, 9, shape, generator=generator).float()


def weights(shapes: dict[str, tuple[int, ...]]) -> Params:
    return {name: draw(name, shape, 1) / 8 for name, shape in shapes.items()}


def batch(shapes: dict[str, tuple[int, ...]], step: int, micro: int, rank: int) -> Params:
    return {name: draw(name, shape, 100 + 10 * step + 2 * micro + 50 * rank) for name, shape in shapes.items()}


def loss_fn(state: mf.ShardState, targets: Params) -> torch.Tensor:
    """Its gradient is `targets`, whatever the weights are."""
    total = torch.zeros(())
    for unit in state.spec.units:
        for name, value in mf.unshard(state[unit]).items():
            total = total + (value * targets[f"{unit}.{name}" if unit else name]).sum()
    return total


def mean_gradient(shapes: dict[str, tuple[int, ...]], step: int, ranks: int) -> Params:
    """Sum over microbatches of the mean over ranks, times `grad_scale`."""
    scale = grad_scale(ranks) / ranks
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for micro in range(MICROS):
        for rank in range(ranks):
            for name, value in batch(shapes, step, micro, rank).items():
                found[name] += value
    return {name: value * scale for name, value in found.items()}


def grad_scale(ranks: int) -> float:
    """Such that means are exact: over three ranks they would round."""
    return 3.0 if ranks == 3 else 1.0


def reference(
    shapes: dict[str, tuple[int, ...]], ranks: int, is_muon: Callable[[str], bool], **options: Any
) -> list[Params]:
    """Updates of each step, by torch's own optimizers on whole tensors; 3-D ones matrix by matrix."""
    params = {name: torch.nn.Parameter(value) for name, value in weights(shapes).items()}
    chosen = {name: value for name, value in params.items() if is_muon(name)}
    slices = {
        (name, i): torch.nn.Parameter(part.detach().clone())
        for name, value in chosen.items()
        for i, part in enumerate(value if value.ndim == 3 else [value])
    }
    rest = [value for name, value in params.items() if name not in chosen]
    muon = torch.optim.Muon(list(slices.values()), **{"lr": LR, **options})
    other = torch.optim.SGD(rest, lr=0.25, momentum=0.5) if rest else None
    updates = []
    for step in range(STEPS):
        grads = mean_gradient(shapes, step, ranks)
        for name, value in params.items():
            value.grad = grads[name]
        for (name, i), part in slices.items():
            part.grad = grads[name][i] if params[name].ndim == 3 else grads[name]
        before = {name: value.detach().clone() for name, value in params.items()}
        muon.step()
        if other is not None:
            other.step()
        with torch.no_grad():
            for name, value in chosen.items():
                parts: list[torch.Tensor] = [part for (mine, _), part in slices.items() if mine == name]
                value.copy_(torch.stack(parts) if value.ndim == 3 else parts[0])
        updates.append({name: value.detach() - before[name] for name, value in params.items()})
    return updates


def optimizer(**options: Any) -> mf.optim.Optimizer:
    return mf.optim.muon(**{"lr": LR, "fallback": mf.optim.sgd(lr=0.25, momentum=0.5), **options})


PRESETS = {
    "zero3": (mf.zero3, 1),
    "zero2": (mf.zero2, 1),
    "zero1": (mf.zero1, 1),
    "ddp": (mf.ddp, 1),
    "hsdp": (mf.hsdp, 2),
    "hfsdp": (mf.hfsdp, 2),
}


def train(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    shapes: Any = None,
    preset: str = "zero3",
    layout: str = "padded",
) -> tuple[list[Params], dict[str, Any]]:
    """Updates of each step, whole; and facts about the plan."""
    shapes = shapes or SHAPES
    make, axes = PRESETS[preset]
    mesh = mesh_of(world_size) if axes == 1 else mesh_of(2, world_size // 2)
    params = {name: value.requires_grad_() for name, value in weights(shapes).items()}
    units = ("blocks.*",) if any(name.startswith("blocks") for name in shapes) else ()
    spec = mf.plan(params, mesh, make(), units=units, shard_layout=layout, grad_scale=grad_scale(world_size))
    state = mf.shard(params, spec)
    opt = optimizer(**options)
    opt_state = opt.init(state)
    updates = []
    for step in range(STEPS):
        grads: Any = None
        for micro in range(MICROS):
            last = micro == MICROS - 1
            _, grads = mf.value_and_grad(loss_fn, accumulate=grads, is_last_microbatch=last)(
                state, batch(shapes, step, micro, rank)
            )
        before = {name: value.detach().clone() for name, value in mf.unshard(state).items()}
        kept = [buffer.clone() for buffer in state.main]
        state_after, opt_state = opt.step(grads, opt_state, state, donate=step % 2 == 1)
        if step % 2 == 0:
            assert all(torch.equal(a, b) for a, b in zip(kept, state.main, strict=True))  # pure
        state = state_after
        updates.append({name: value.detach() - before[name] for name, value in mf.unshard(state).items()})
    plan = opt_state.plan
    straddling = {
        group.paths[0] if len(owners.layout.tensor_shapes) == 1 else f"{group.unit}#{index}"
        for group, owners in zip(plan.mine.spec.groups, plan.owners, strict=True)
        for index in owners.boundary
    }
    state_elements = sum(buffer.numel() for buffer in opt_state.momentum_buffer.main)
    return updates, {"straddling": straddling, "momentum": state_elements, "paths": plan.mine.spec.leaves}


def assert_updates(got: list[Params], want: list[Params], bound: float | None = None) -> None:
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert list(mine) == list(theirs)
        for name in theirs:
            assert theirs[name].numel() == 0 or theirs[name].abs().max() > 0
            if bound is None:
                assert torch.equal(mine[name], theirs[name]), (step, name, (mine[name] - theirs[name]).abs().max())
            else:
                torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=bound)


def is_matrix(name: str) -> bool:
    return len(SHAPES[name]) == 2


def distance(a: list[Params], b: list[Params], names: Any = None) -> float:
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in (names or x) if x[name].numel()]
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_updates_equal_torch(world_size: int, layout: str) -> None:
    want = reference(SHAPES, world_size, is_matrix)
    for updates, facts in run_ranks(world_size, train, {}, None, "zero3", layout):
        assert_updates(updates, want)
        assert (len(facts["straddling"]) >= 3) == (world_size > 1), facts


@pytest.mark.parametrize("preset", ["zero2", "zero1", "ddp", "hsdp", "hfsdp"])
def test_other_placements(preset: str) -> None:
    want = reference(SHAPES, 4, is_matrix)
    for updates, facts in run_ranks(4, train, {}, None, preset):
        assert_updates(updates, want)
        assert bool(facts["straddling"]) == (preset != "ddp")


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"ns_steps": 3, "weight_decay": 0.0, "momentum": 0.5},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "eps": 1e-3, "ns_coefficients": (3.0, -4.0, 2.0)},
        {"lr": torch.tensor(0.03)},
        {"lr": torch.tensor(0.03, dtype=torch.float64), "weight_decay": 0.5},
    ],
    ids=lambda options: ",".join(options),
)
def test_options_mean_what_they_mean_in_torch(options: dict[str, Any]) -> None:
    want = reference(SHAPES, 3, is_matrix, **options)
    for updates, _ in run_ranks(3, train, options):
        assert_updates(updates, want)


def same_gradients(rank: int, world_size: int) -> list[torch.Tensor]:
    """Updates from gradients that don't depend on the number of ranks."""
    params = {name: value.requires_grad_() for name, value in weights(SHAPES).items()}
    spec = mf.plan(params, mesh_of(world_size), mf.zero3(), units=("blocks.*",))
    state = mf.shard(params, spec)
    opt = optimizer()
    opt_state = opt.init(state)
    for step in range(3):
        whole = {name: torch.sin(draw(name, shape, step)) for name, shape in SHAPES.items()}
        grads = mf.reduce(whole, spec)  # equal on all ranks
        state, opt_state = opt.step(grads, opt_state, state)
    return [value.detach() for value in mf.unshard(state).values()]


def test_the_update_does_not_depend_on_the_number_of_ranks() -> None:
    want = run_ranks(1, same_gradients)[0]
    for world_size in (2, 4):  # means over 3 equal gradients round
        for got in run_ranks(world_size, same_gradients):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def per_shard(ranks: int, **options: Any) -> list[Params]:
    """The mistake: each rank's rows orthogonalised by themselves."""
    shapes = {
        f"{name}|{i}": (len(rows), *shape[1:])
        for name, shape in SHAPES.items()
        if len(shape) == 2 and shape[0]
        for i, rows in enumerate(torch.arange(shape[0]).chunk(ranks))
    }
    whole = weights(SHAPES)
    params = {}
    for key in shapes:
        name, i = key.split("|")
        params[key] = torch.nn.Parameter(whole[name].chunk(ranks)[int(i)].clone())
    opt = torch.optim.Muon(list(params.values()), **{"lr": LR, **options})
    updates = []
    for step in range(STEPS):
        grads = mean_gradient(SHAPES, step, ranks)
        before = {key: value.detach().clone() for key, value in params.items()}
        for key, value in params.items():
            name, i = key.split("|")
            value.grad = grads[name].chunk(ranks)[int(i)]
        opt.step()
        joined: Params = {}
        for key, value in params.items():
            part = value.detach() - before[key]
            name = key.split("|")[0]
            joined[name] = torch.cat([joined[name], part]) if name in joined else part
        updates.append(joined)
    return updates


@pytest.mark.parametrize("options", [{"batched": True}, {"buckets": 5, "batched": True}, {"buckets": 1}])
def test_batches_and_buckets(options: dict[str, Any]) -> None:
    want = reference(SHAPES, 4, is_matrix)
    for updates, _ in run_ranks(4, train, options):
        # Batched products may round otherwise: bfloat16 steps of the orthogonalised matrix, times the rate.
        assert_updates(updates, want, BOUND if "batched" in options else None)


def test_the_bound_tells_variants_apart() -> None:
    want = reference(SHAPES, 4, is_matrix)
    names = ["blocks.0.wide", "blocks.0.tall", "blocks.0.square", "blocks.1.wide"]
    for options in ({"nesterov": False}, {"ns_steps": 4}, {"weight_decay": 0.0}):
        wrong = reference(SHAPES, 4, is_matrix, **options)
        for name in names:
            assert distance(want, wrong, [name]) > 2 * BOUND, (options, name)
    for name in names:
        assert distance(want, per_shard(4), [name]) > 2 * BOUND, name


FUSED = {"blocks.0.qkv": (24, 8), "blocks.0.heads": (12, 6), "blocks.0.experts": (5, 6, 4), "blocks.1.qkv": (24, 8)}
APART = {
    **{f"blocks.0.q{i}": (rows, 8) for i, rows in enumerate((12, 6, 6))},
    **{f"blocks.0.h{i}": (4, 6) for i in range(3)},
}


def split_reference(ranks: int) -> list[Params]:
    """Each part a matrix of its own in torch's Muon."""
    whole = weights(FUSED)
    cuts = {"blocks.0.qkv": (12, 6, 6), "blocks.1.qkv": (12, 6, 6), "blocks.0.heads": (4, 4, 4)}
    parts = {
        name: [torch.nn.Parameter(p.clone()) for p in (value.split(cuts[name]) if name in cuts else value.unbind())]
        for name, value in whole.items()
    }
    opt = torch.optim.Muon([p for mine in parts.values() for p in mine], lr=LR)
    updates = []
    for step in range(STEPS):
        grads = mean_gradient(FUSED, step, ranks)
        before = {name: [p.detach().clone() for p in mine] for name, mine in parts.items()}
        for name, mine in parts.items():
            pieces = grads[name].split(cuts[name]) if name in cuts else grads[name].unbind()
            for p, grad in zip(mine, pieces, strict=True):
                p.grad = grad
        opt.step()
        deltas = {n: [p.detach() - b for p, b in zip(parts[n], before[n], strict=True)] for n in parts}
        updates.append({n: torch.cat(d) if n in cuts else torch.stack(d) for n, d in deltas.items()})
    return updates


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_experts_fused_qkv_and_heads(world_size: int) -> None:
    options = {"split": {"qkv": (12, 6, 6), "heads": 3}}
    want = split_reference(world_size)
    for updates, _ in run_ranks(world_size, train, options, FUSED):
        assert_updates(updates, want)
    whole = reference({"blocks.0.qkv": (24, 8)}, 1, lambda name: True)
    assert distance(want, whole, ["blocks.0.qkv"]) > BOUND  # splitting matters


def test_exclude_sends_matrices_to_the_fallback() -> None:
    want = reference(SHAPES, 2, lambda name: is_matrix(name) and name not in ("embed", "blocks.1.wide"))
    for updates, facts in run_ranks(2, train, {"exclude": ("emb*", "blocks.1.wide")}):
        assert_updates(updates, want)
        assert {leaf.path for leaf in facts["paths"]}.isdisjoint({"embed", "norm", "blocks.1.wide"})
        kept = sum(torch.Size(SHAPES[leaf.path]).numel() for leaf in facts["paths"])
        assert facts["momentum"] <= kept  # no momentum for what is the fallback's


class Products(TorchDispatchMode):
    """Counts Newton-Schulz starts by their norms, and exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.names, self.wire = 0, [], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        self.norms += name in ("linalg_vector_norm", "norm")
        if func.name().startswith("_c10d_functional") and name != "wait_tensor":
            self.names.append(name)
            if name == "all_to_all_single":
                self.wire += args[0].nbytes
        return func(*args, **(kwargs or {}))


def count(rank: int, world_size: int, preset: str) -> tuple[int, list[str], int, int]:
    make, axes = PRESETS[preset]
    params = {name: value.requires_grad_() for name, value in weights(SHAPES).items()}
    mesh = mesh_of(world_size) if axes == 1 else mesh_of(2, world_size // 2)
    spec = mf.plan(params, mesh, make(), units=("blocks.*",))
    state = mf.shard(params, spec)
    opt = optimizer(buckets=1)
    opt_state = opt.init(state)
    grads = mf.tree_map(torch.ones_like, state)
    with Products() as seen:
        opt.step(grads, opt_state, state)
    owners = opt_state.plan.owners
    return seen.norms, seen.names, seen.wire, sum(sum(layout.traffic().values()) for layout in owners)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_matrix_is_orthogonalised_once_and_travels_in_bfloat16(world_size: int) -> None:
    got = run_ranks(world_size, count, "zero3")
    matrices = sum(len(shape) == 2 and 0 not in shape for shape in SHAPES.values())
    assert sum(norms for norms, *_ in got) == matrices
    for _, names, _, _ in got:
        assert names == (["all_to_all_single"] * 2 if world_size > 1 else [])
    assert sum(wire for _, _, wire, _ in got) == 2 * 2 * got[0][3]  # there and back, two bytes


class Timeline(TorchDispatchMode):
    """Launches and waits of exchanges, by number of launch, and products of Newton-Schulz, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.splits: list[tuple[list[int], list[int]]] = []  # (receive, send)
        self.results: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.name(), func(*args, **(kwargs or {}))
        if "all_to_all_single" in name:
            self.events.append(f"launch {len(self.results)}")
            self.splits.append((list(args[1]), list(args[2])))
            self.results.append(result)
        elif "wait_tensor" in name:
            self.events += [f"wait {n}" for n, launched in enumerate(self.results) if launched is args[0]]
        elif "addmm" in name or "baddbmm" in name:
            self.events.append("product")
        return result


def overlap(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Nine matrices that all straddle all ranks; each rank owns three, one a bucket."""
    params = {f"l.{i}.w": draw("w", (6, 4), i).requires_grad_() for i in range(9)}
    spec = mf.plan(params, mesh_of(world_size), mf.zero3(), units=("l.*",))
    state, opt = mf.shard(params, spec), mf.optim.muon(lr=LR, buckets=3, **options)
    opt_state, grads = opt.init(state), mf.tree_map(torch.cos, state)
    assert all(len(layout.boundary) == 1 for layout in opt_state.plan.owners)
    with Timeline() as seen:
        opt.step(grads, opt_state, state)
    gather, scatter = (0, 1, 3), (2, 4, 5)  # the order of the launches
    assert len(seen.results) == 6 and sorted(e for e in seen.events if e[0] == "w") == [f"wait {n}" for n in range(6)]
    for there, back in zip(gather, scatter, strict=True):
        assert seen.splits[there] == seen.splits[back][::-1] and sum(seen.splits[there][0])
    place = {event: position for position, event in enumerate(seen.events)}
    work = []
    for there, back in zip(gather, scatter, strict=True):
        start, stop = place[f"wait {there}"], place[f"launch {back}"]
        products = [position for position in range(start, stop) if seen.events[position] == "product"]
        assert products
        work.append((products[0], products[-1]))
    for k in range(2):
        first, last = work[k]
        assert place[f"launch {gather[k + 1]}"] < first and last < place[f"wait {gather[k + 1]}"]
        first, last = work[k + 1]
        assert place[f"launch {scatter[k]}"] < first and last < place[f"wait {scatter[k]}"]


@pytest.mark.parametrize("options", [{}, {"batched": True}], ids=["one by one", "batched"])
def test_a_buckets_exchange_runs_beside_anothers_newton_schulz(options: dict[str, Any]) -> None:
    run_ranks(3, overlap, options)


def test_bfloat16_momentum_is_no_ones_scratch() -> None:
    """With Nesterov off, torch.optim.Muon normalises a bfloat16 momentum in place (seen in 2.13); this does not."""
    params = {"w": draw("w", (4, 3), 1).bfloat16().requires_grad_()}
    precision = mf.MixedPrecisionPolicy(main=torch.bfloat16)
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp(), precision=precision))
    opt = mf.optim.muon(lr=LR, nesterov=False)
    opt_state, want = opt.init(state), torch.zeros(12, dtype=torch.bfloat16)
    for _ in range(3):
        grads = mf.tree_map(torch.cos, state)
        want.lerp_(grads.main[0], 1 - 0.95)
        state, opt_state = opt.step(grads, opt_state, state)
        assert torch.equal(opt_state.momentum_buffer.main[0], want)


def test_an_ineligible_parameter_without_fallback_is_refused_by_path() -> None:
    params = {name: value.requires_grad_() for name, value in weights(SHAPES).items()}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    with pytest.raises(mf.StateError, match=r"`fallback` got None, with 'norm' of shape \(8,\) \(and 2 more\)"):
        mf.optim.muon(lr=LR).init(state)
    with pytest.raises(mf.StateError, match=r"`exclude` got \('\*',\), which leaves no matrix"):
        mf.optim.muon(lr=LR, fallback=mf.optim.sgd(0.1), exclude=("*",)).init(state)
    with pytest.raises(mf.StateError, match=r"`split\['wide'\]` got 5 for 'blocks.0.wide' of shape \(12, 40\)"):
        mf.optim.muon(lr=LR, fallback=mf.optim.sgd(0.1), split={"wide": 5}).init(state)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"split": {"norm": 2}}, r"`split\['norm'\]` got a pattern of parameters that are not Muon's, such as"),
        ({"split": {"embed": 2}, "exclude": ("embed",)}, r"not Muon's, such as 'embed' of shape \(10, 8\)"),
    ]
    for options, text in cases:
        with pytest.raises(mf.StateError, match=text):
            mf.optim.muon(lr=LR, fallback=mf.optim.sgd(0.1), **options).init(state)
    with pytest.raises(mf.PlanError, match="`pattern` got 'lm_head'"):
        mf.optim.muon(lr=LR, fallback=mf.optim.sgd(0.1), exclude=("lm_head",)).init(state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "`lr` got -1.0"),
        ({"momentum": -1}, "`momentum` got -1"),
        ({"ns_steps": 100}, "`ns_steps` got 100; expected an integer from 1 to 99"),
        ({"buckets": 0}, "`buckets` got 0"),
        ({"adjust_lr_fn": "x"}, "`adjust_lr_fn` got 'x'"),
        ({"exclude": "emb*"}, "`exclude` got 'emb\\*'"),
        ({"nesterov": 1}, "`nesterov` got 1"),
        ({"split": {"qkv": 0}}, r"`split\['qkv'\]` got 0"),
        ({"ns_coefficients": (1.0,)}, "`ns_coefficients` got"),
        ({"fallback": 3}, "`fallback` got a int"),
        ({"fallback": mf.optim.adamw}, "`fallback` got a function"),
        ({"exclude": 5}, "`exclude` got 5"),
        ({"exclude": None}, "`exclude` got None"),
        ({"exclude": (name for name in ("w",))}, "`exclude` got a generator"),
        ({"exclude": ("",)}, r"`exclude` got \(''"),
        ({"split": 5}, "`split` got 5"),
        ({"split": ["qkv"]}, r"`split` got \['qkv'\]"),
        ({"split": {3: 2}}, r"`split\[3\]` got 2"),
        ({"split": {"qkv": "12"}}, r"`split\['qkv'\]` got '12'"),
        ({"ns_coefficients": (1.0, math.nan, 2.0)}, r"`ns_coefficients` got \(1.0, nan, 2.0\)"),
        ({"eps": math.nan}, "`eps` got nan"),
        ({"ns_steps": 2.0}, "`ns_steps` got 2.0"),
        ({"buckets": True}, "`buckets` got True"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(mf.MfsdpError, match=text):
        mf.optim.muon(**options)


def local(shapes: dict[str, tuple[int, ...]]) -> mf.ShardState:
    params = {name: value.requires_grad_() for name, value in weights(shapes).items()}
    return mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp()))


def test_arguments_that_do_not_belong_together() -> None:
    state, other = local({"w": (4, 4)}), local({"w": (4, 5)})
    opt = mf.optim.muon(lr=LR)
    opt_state = opt.init(state)
    grads = mf.tree_map(torch.ones_like, state)
    with pytest.raises(mf.StateError, match="`grads` got"):
        opt.step(mf.tree_map(torch.ones_like, other), opt_state, state)
    with pytest.raises(mf.StateError, match="`opt_state` got a state made for"):
        opt.step(grads, opt.init(other), state)
    with pytest.raises(mf.StateError, match="`opt_state` got a int; expected a MuonState"):
        opt.step(grads, 3, state)
    opt.step(grads, opt_state, state, donate=True)
    with pytest.raises(mf.DonatedError, match="donated to muon"):
        opt.step(mf.zeros_like(local({"w": (4, 4)})), opt_state, local({"w": (4, 4)}))


def compiled_step(rank: int, world_size: int, lr: Any) -> None:
    params = {name: value.requires_grad_() for name, value in weights(SHAPES).items()}
    spec = mf.plan(params, mesh_of(world_size), mf.zero3(), units=("blocks.*",))
    state = mf.shard(params, spec)
    opt = optimizer(lr=lr)
    opt_state = opt.init(state)
    step = torch.compile(lambda g, o, s: opt.step(g, o, s), fullgraph=True, backend="aot_eager")
    eager, eager_state = state, opt_state
    for _ in range(2):
        grads = mf.tree_map(torch.cos, state)
        eager, eager_state = opt.step(mf.tree_map(torch.cos, eager), eager_state, eager)
        state, opt_state = step(grads, opt_state, state)
        for got, want in zip(state.main, eager.main, strict=True):
            # A last bit more or less of the momentum is one of bf16 in Newton-Schulz, times the learning rate.
            torch.testing.assert_close(got, want, rtol=0, atol=1e-3 if ROUNDS_ALPHA else 1e-6)


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_a_step_compiles_to_one_graph(lr: Any) -> None:
    run_ranks(2, compiled_step, lr)


def test_a_schedule_counts_steps() -> None:
    state = local({"w": (4, 4)})
    seen: list[float] = []

    def schedule(step: torch.Tensor) -> float:
        seen.append(step.item())
        return 0.1

    opt = mf.optim.muon(lr=schedule)
    opt_state = opt.init(state)
    for _ in range(3):
        state, opt_state = opt.step(mf.tree_map(torch.ones_like, state), opt_state, state)
    assert seen == [0.0, 1.0, 2.0] and opt_state.step == 3


@functools.cache
def exact(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the polynomial of it in double precision."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = x.double() / x.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return x, y


@pytest.mark.parametrize("shape", [(8, 8), (8, 64), (64, 8), (3, 6, 20)])
def test_gram_newton_schulz_is_nearer_to_the_polynomial(shape: tuple[int, ...]) -> None:
    x, want = exact(shape)
    arguments = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
    plain, gram = newton_schulz(x, *arguments), gram_newton_schulz(x, *arguments)
    assert (gram - want).abs().max() <= 2**-8 * want.abs().max()  # one rounding to bfloat16
    assert (plain - want).abs().max() <= 0.05 * want.abs().max()
    assert (gram - want).norm() < (plain - want).norm()


def test_gram_is_an_option() -> None:
    state = local({"w": (6, 30)})
    opt = mf.optim.muon(lr=LR, gram=True, batched=True)
    after, _ = opt.step(mf.tree_map(torch.cos, state), opt.init(state), state)
    plain = mf.optim.muon(lr=LR)
    want, _ = plain.step(mf.tree_map(torch.cos, state), plain.init(state), state)
    torch.testing.assert_close(after.main[0], want.main[0], rtol=0, atol=0.05 * LR)


def subset_everywhere(rank: int, world_size: int) -> None:
    params = {name: value.requires_grad_() for name, value in weights(SHAPES).items()}
    for layout in ("padded", "unpadded"):
        spec = mf.plan(params, mesh_of(world_size), mf.zero3(), units=("blocks.*",), shard_layout=layout)
        state = mf.shard(params, spec)
        part = subset(spec, frozenset({"embed", "norm", "blocks.0.tall", "blocks.0.norm"}))
        assert part.entire == (True, False) and part.spec.units == ("", "blocks.0")
        taken = part.state(state, part.take(state.main))
        assert taken.main[0] is state.main[0]
        for name, value in mf.unshard(taken).items():
            assert torch.equal(value, params[name]), name
        main = [torch.zeros_like(buffer) for buffer in state.main]
        part.put(taken.main, main)
        back = mf.unshard(mf.sync_model_weights(mf.ShardState(tuple(main), state.compute, spec)))
        for name, value in back.items():
            assert torch.equal(value, params[name] if name in mf.unshard(taken) else 0 * params[name]), name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_subset_is_a_plan_of_its_own(world_size: int) -> None:
    run_ranks(world_size, subset_everywhere)


def two_meshes(rank: int, world_size: int) -> list[float]:
    """Two meshes with equal plans in one process: each exchanges with its own ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    w, g, found = torch.arange(15.0).reshape(5, 3).cos(), torch.arange(15.0).reshape(5, 3).sin(), []
    for names in (("dp", "tp"), ("tp", "dp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)["dp"]
        sign = 1 if mesh.mesh.tolist()[0] == 0 else -1  # the two replicas have other gradients
        params = {"w": w.clone().requires_grad_()}
        spec = mf.plan(params, mesh, mf.zero3())
        state, opt = mf.shard(params, spec), mf.optim.muon(lr=0.1)
        grads = mf.shard({"w": (sign * g).requires_grad_()}, spec)
        new, _ = opt.step(grads, opt.init(state), state)
        reference = torch.nn.Parameter(w.clone())
        reference.grad = sign * g
        torch.optim.Muon([reference], lr=0.1).step()
        found.append((mf.unshard(new)["w"] - reference.detach()).abs().max().item())
    return found


def test_meshes_with_equal_plans_are_not_mixed_up() -> None:
    assert run_ranks(4, two_meshes) == [[0.0, 0.0]] * 4


def test_a_fallback_that_is_not_there_or_refuses_changes_nothing() -> None:
    params = {"w": torch.eye(3).requires_grad_(), "b": torch.ones(3, requires_grad=True)}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    opt_state = mf.optim.muon(lr=0.1, fallback=mf.optim.sgd(lr=0.1)).init(state)
    before, grads = state.main[0].clone(), mf.tree_map(torch.ones_like, state)
    for opt in (mf.optim.muon(lr=0.1, fallback=mf.optim.adamw(lr=0.1)), mf.optim.muon(lr=0.1)):
        with pytest.raises(mf.StateError, match="`opt_state`"):
            opt.step(grads, opt_state, state, donate=True)
        assert torch.equal(state.main[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rate_that_is_a_tensor_is_multiplied_as_a_tensor(dtype: torch.dtype) -> None:
    """In its own precision, as torch.optim.Muon does: otherwise some rates differ in their last bit."""
    shape = (7, 4)
    for number in range(1, 20):
        lr = torch.tensor(0.0017 * number, dtype=dtype)
        state, opt = local({"w": shape}), mf.optim.muon(lr=lr, weight_decay=0.3)
        whole = torch.nn.Parameter(mf.unshard(state)["w"].clone())
        whole.grad = whole.detach().cos()
        rate: Any = lr  # torch's annotation knows no tensors
        reference = torch.optim.Muon([whole], lr=rate, weight_decay=0.3)
        state, _ = opt.step(mf.tree_map(torch.cos, state), opt.init(state), state)
        reference.step()
        assert torch.equal(mf.unshard(state)["w"], whole), number
