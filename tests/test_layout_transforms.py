"""All transforms under layouts that are ragged, in blocks, or whole tensors on owners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import checkpoint

import mfsdp_fn as mf
from layouts import planned, rich, rich_sharded
from models import Params, accumulated, assert_equal, batch_of, integers, plain_grads
from optim_cases import Trace
from pool import run_ranks
from test_layout_training import mean_options

LAYOUTS = ("unpadded", "block 2", "tensor")
CASES: dict[int, list[tuple[tuple[int, ...], mf.Placements]]] = {
    1: [((1,), mf.zero3())],
    2: [((2,), mf.zero1()), ((2, 1), mf.hfsdp()), ((1, 2), mf.hsdp())],
    3: [((3,), mf.zero3())],
    4: [((4,), mf.zero3()), ((2, 2), mf.hsdp()), ((2, 2), mf.hfsdp())],
}


def specs(
    world: int, layout: str, params: Params, **options: Any
) -> Iterator[tuple[Any, mf.ShardSpec, mf.Placements, tuple[int, ...]]]:
    """Plans with `layout`, each with what it was made from."""
    for shape, placements in CASES[world]:
        spec = planned(layout, placements, params, *shape, **options)
        yield (layout, shape, placements), spec, placements, shape


def plain(params: Params) -> Params:
    return {name: value.detach() for name, value in params.items()}


def grads_of(params: Params, micro: int, rank: int, factor: float) -> dict[str, Any]:
    """Whole local gradients; None, which is zero, where there is none to give."""
    found: dict[str, Any] = {
        name: factor * integers(*value.shape, seed=100 * micro + 10 * rank + number)
        for number, (name, value) in enumerate(params.items())
    }
    return {name: g if params[name].requires_grad and "tied" not in name else None for name, g in found.items()}


def values(rank: int, world: int, layout: str) -> None:
    factor, options = mean_options(world)
    params = rich()
    meta = {name: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for name, t in params.items()}
    meta["blocks.0.tied"] = meta["blocks.0.w"]
    for what, spec, placements, shape in specs(world, layout, params, **options):
        state = mf.shard(params, spec)
        whole = mf.unshard(state)
        assert_equal(whole, plain(params), what)
        assert whole["blocks.0.tied"] is whole["blocks.0.w"]
        pending = mf.launch(state["blocks.1"])
        assert_equal(mf.wait(pending), {n: whole[f"blocks.1.{n}"] for n in ("hole", "w", "b", "scale")}, what)
        assert list(mf.unshard(state["blocks.3"])) == ["empty"]
        on_meta = planned(layout, placements, meta, *shape, **options)
        made = mf.shard(meta, on_meta, init_fn=lambda path, _: params[path])
        assert_equal(mf.unshard(made), plain(params), what)
        # Weights changed by hand, and synced.
        doubled = mf.sync_model_weights(mf.tree_map(lambda w: 2 * w, state))
        assert_equal(mf.unshard(doubled), {n: t if "frozen" in n else 2 * t for n, t in plain(params).items()}, what)

        first = mf.reduce(grads_of(params, 0, rank, factor), spec, is_last_microbatch=False)
        total = mf.reduce(grads_of(params, 1, rank, factor), spec, into=first)
        done = mf.finish_grad_sync(mf.reduce_outer(total))
        expected = {name: torch.zeros_like(value) for name, value in plain(params).items()}
        for micro in range(2):
            for r in range(world):
                for name, grad in grads_of(params, micro, r, 1.0).items():
                    expected[name] += 0.0 if grad is None else grad
        expected["blocks.0.tied"] = expected["blocks.0.w"]
        got = mf.unshard(done)
        assert {n for n, t in got.items() if t is None} == {"frozen", "blocks.2.frozen"}
        kept = [name for name in got if got[name] is not None]
        assert_equal({n: got[n] for n in kept}, {n: expected[n] for n in kept}, what)
        assert not any(buffer.any() for buffer in mf.zeros_like(done).main)

        dtensors = mf.to_dtensors(state)
        assert list(dtensors) == list(params)
        for name, value in plain(params).items():
            full = dtensors[name].redistribute(placements=[Replicate()] * len(shape)).to_local()
            assert torch.equal(full, value), (what, name)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_survive(layout: str, world: int) -> None:
    run_ranks(world, values, layout)


def stage(units: Any, x: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        x = x + x @ units(f"blocks.{number}")["w"].T
    return x * units("")["scale"]


class Net(nn.Module):
    """Blocks that compute their forward again in backward."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        for number, block in enumerate(self.blocks):
            block.load_state_dict({"weight": params[f"blocks.{number}.w"], "bias": params[f"blocks.{number}.b"]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def backward(rank: int, world: int, layout: str) -> None:
    factor, options = mean_options(world)
    params = rich()
    module = Net(params)
    named: Params = dict(mf.params_of(module))

    def x_of(r: int) -> torch.Tensor:
        return integers(3, 4, seed=500 + r)

    def ct_of(r: int) -> torch.Tensor:
        return factor * integers(3, 4, seed=600 + r)

    def units(p: Params) -> Any:
        return lambda unit: {n.removeprefix(f"{unit}.") if unit else n: t for n, t in p.items() if n.startswith(unit)}

    free = {n: t for n, t in params.items() if t.requires_grad and "tied" not in n}
    pulls = [lambda p, r=r: (stage(units(p), x_of(r)) * ct_of(r)).sum() for r in range(world)]
    calls = [
        lambda p, r=r: (torch.func.functional_call(module, dict(p), (x_of(r),)) * ct_of(r)).sum() for r in range(world)
    ]
    by_hand = plain_grads(free, pulls, 1)
    by_module = plain_grads(named, calls, 1)
    scale = (options.get("grad_scale", 1.0)) / world
    for what, spec, placements, shape in specs(world, layout, params, **options):
        state = mf.shard(params, spec)
        out, pullback = mf.vjp(lambda s, x: stage(lambda unit: mf.unshard(s[unit]), x), state, x_of(rank))
        x = x_of(rank).requires_grad_()
        expected = stage(units(params), x)
        assert torch.equal(out, expected.detach()), what
        grads, (dx,) = pullback(ct_of(rank))
        (wanted,) = torch.autograd.grad((expected * ct_of(rank)).sum(), x)
        assert torch.equal(dx, wanted), what
        got = mf.unshard(grads)
        assert_equal({n: got[n] for n in free}, {n: scale * g for n, g in by_hand.items()}, what)
        modular = mf.shard(named, planned(layout, placements, named, *shape, **options))

        def loss(s: mf.ShardState) -> torch.Tensor:
            return (mf.functional_call(module, s, (x_of(rank),)) * ct_of(rank)).sum()

        _, grads = mf.value_and_grad(loss)(modular)
        assert_equal(mf.unshard(grads), {n: scale * g for n, g in by_module.items()}, what)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_equals_the_unsharded_one(layout: str, world: int) -> None:
    run_ranks(world, backward, layout)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: mf.optim.sgd(0.125, 0.5),
    "adamw": lambda: mf.optim.adamw(lr=1e-2),
    "muon": lambda: mf.optim.muon(lr=0.02, exclude=("embed",), fallback=mf.optim.adamw(lr=1e-2)),
    "transformation": lambda: mf.optim.from_gradient_transformation(Trace(0.125, 0.5)),
}


def optimize(state: mf.ShardState, name: str, rank: int, factor: float, *, donate: bool) -> Params:
    opt = OPTIMIZERS[name]()
    opt_state = opt.init(state)
    for step in range(3):
        grads = accumulated(rich_sharded, state, [batch_of(step, micro, rank) for micro in range(2)], factor)
        grads, norm = mf.optim.clip_by_global_norm(grads, 5.0)
        assert norm > 5.0
        state, opt_state = opt.step(grads, opt_state, state, donate=donate)
    return mf.unshard(state)


def optimizers(rank: int, world: int, layout: str) -> None:
    factor, options = mean_options(world)
    params = rich()
    for what, spec, placements, shape in list(specs(world, layout, params, **options))[-1:]:
        padded = planned("padded", placements, params, *shape, **options)
        for name in OPTIMIZERS:
            expected = optimize(mf.shard(params, padded), name, rank, factor, donate=True)
            got = optimize(mf.shard(params, spec), name, rank, factor, donate=name != "muon")
            # The norm adds up in another order: a few roundings of its dtype. Muon rounds that to bfloat16.
            limit = 2e-3 if name == "muon" else 1e-12
            for path in params:
                torch.testing.assert_close(
                    got[path], expected[path], rtol=limit, atol=limit, msg=f"{what} {name} {path}"
                )


@pytest.mark.parametrize("world", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3)), 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizers_step_as_under_the_padded_layout(layout: str, world: int) -> None:
    run_ranks(world, optimizers, layout)


def owners(rank: int, world: int, layout: str) -> None:
    params = rich()
    for what, spec, *_ in specs(world, layout, params):
        state = mf.shard(params, spec)
        chosen = mf.plan_owners(spec)
        shards = {g: g.local_views(state.main[g.number], g.main_range) for g in chosen}
        fulls = mf.gather_to_owner(shards, chosen)
        for group, by_index in fulls.items():
            for index, full in by_index.items():
                assert torch.equal(full, params[group.paths[index]]), what
        halves = mf.scatter_from_owner({g: {i: t * 2 for i, t in m.items()} for g, m in fulls.items()}, chosen)
        for group, by_index in halves.items():
            assert by_index.keys() == {i for i in shards[group] if i in chosen[group].tensor_to_owner}
            for index, half in by_index.items():
                assert torch.equal(half, shards[group][index] * 2), what
        if layout == "tensor":
            assert not any(owner.traffic() for owner in chosen.values())  # whole tensors are where they are used
        mapped = mf.unshard(mf.sync_model_weights(mf.owner_map(lambda full: full.flip(0))(state, chosen)))
        for name, value in plain(params).items():
            turned = value.dim() >= 2 and params[name].requires_grad
            assert torch.equal(mapped[name], value.flip(0) if turned else value), (what, name)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_owner_exchange(layout: str, world: int) -> None:
    run_ranks(world, owners, layout)


def low_precision(rank: int, world: int) -> None:
    params = {name: value.detach().float().requires_grad_(value.requires_grad) for name, value in rich().items()}
    params["blocks.0.tied"] = params["blocks.0.w"]
    policy = mf.MixedPrecisionPolicy(compute=torch.bfloat16, grad=torch.float32, reduce=torch.float32)
    found: dict[str, Params] = {}
    for layout in ("padded", *LAYOUTS):
        for runtime in (mf.RuntimePolicy(), mf.RuntimePolicy(store_compute_weights=False)):
            state = mf.shard(params, planned(layout, mf.zero3(), params, world, precision=policy, runtime=runtime))
            for step in range(3):
                batches = [(t, x.bfloat16()) for t, x in (batch_of(step, micro, rank) for micro in range(2))]
                grads = accumulated(rich_sharded, state, batches, float(world))
                state = mf.sync_model_weights(mf.tree_map(lambda w, g: w - g / 64, state, grads))
            got = mf.unshard(state)
            assert {value.dtype for value in got.values()} == {torch.bfloat16}
            assert_equal(got, found.setdefault("first", got), layout)


def test_low_precision_compute_weights() -> None:
    run_ranks(2, low_precision)
