"""`shard`, `unshard`, `reduce`, `sync_model_weights` and the tree functions, on real ranks."""

from __future__ import annotations

from typing import Any, cast

import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import mfsdp_fn as mf
from models import BLOCKS, EXACT, PRESETS, assert_equal, bilinear, integers, layouts_of, mesh_of, trainable
from pool import run_ranks

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")


def made(params: Any, preset: str, *shape: int, **options: Any) -> mf.ShardState:
    return mf.shard(params, mf.plan(params, mesh_of(*shape), PRESETS[preset](), **options))


def awkward() -> dict[str, torch.Tensor]:
    """Every shape and memory format that could go wrong; the zero-size ones inside and at the end of groups."""
    params = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
        "one": torch.ones(1),
        "one_one": torch.full((1, 1), 3.0),
        "row": integers(1, 5, seed=1),
        "hole": torch.empty(4, 0),
        "three": integers(3, seed=2),
        "short": integers(1, 7, seed=3),
        "transposed": integers(5, 3, seed=4).t(),
        "channels_last": integers(4, 3, 2, 2, seed=5).contiguous(memory_format=torch.channels_last),
        "strided": integers(6, 8, seed=6)[::2, ::2],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "end": torch.empty(2, 0, 3),
    }
    params = {name: value.double().requires_grad_() for name, value in params.items()}
    params["tied"] = params["transposed"]
    frozen = integers(6, 3, seed=7)
    params["f8"] = frozen.to(torch.float8_e4m3fn)
    params["i16"] = frozen.to(torch.int16)
    params["bool"] = frozen > 0
    params["i8"] = frozen[:1].to(torch.int8)
    params["bf16"] = frozen.bfloat16()
    return params


def round_trips(rank: int, world: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    for shape in shapes:
        for preset in ONE_AXIS if len(shape) == 1 else ("hsdp", "hfsdp"):
            for layout in layouts_of(preset, "padded", "unpadded", "auto"):
                params = awkward()
                state = made(params, preset, *shape, shard_layout=layout, precision=EXACT)
                back = mf.unshard(state)
                assert back["tied"] is back["transposed"]
                assert all(back[n].dtype == t.dtype and back[n].shape == t.shape for n, t in params.items())
                as_bytes = {n: t.detach().contiguous().flatten().view(torch.uint8) for n, t in params.items()}
                assert_equal({n: t.flatten().view(torch.uint8) for n, t in back.items()}, as_bytes, (preset, layout))
                assert not any(buffer.requires_grad for buffer in state.main)
                ones = {n: torch.full_like(t, rank + 1.0) for n, t in params.items() if t.requires_grad}
                ones |= {"tied": None, **dict.fromkeys(("f8", "i16", "bool", "i8", "bf16"))}
                grads = mf.finish_grad_sync(mf.reduce(ones, state.spec))
                got = mf.unshard(grads)
                mean = (world + 1) / 2
                for name in params:
                    if params[name].requires_grad:
                        torch.testing.assert_close(got[name], torch.full_like(got[name], mean), rtol=1e-15, atol=0)
                    else:
                        assert got[name] is None, name


@pytest.mark.parametrize(
    "shapes", [((1,), (1, 1)), ((2,), (2, 1), (1, 2)), ((3,),), ((4,), (2, 2))], ids=["1", "2", "3", "4"]
)
def test_awkward_parameters_round_trip(shapes: tuple[tuple[int, ...], ...]) -> None:
    run_ranks(shapes[0][0], round_trips, shapes)


def poison(state: mf.ShardState) -> mf.ShardState:
    """NaN in all padding."""

    def filled(buffers: tuple[Any, ...], ranges: str) -> tuple[Any, ...]:
        result = []
        for group, buffer in zip(state.spec.groups, buffers, strict=True):
            if buffer is None or not group.requires_grad:
                result.append(buffer)
                continue
            fresh = torch.full_like(buffer, float("nan"))
            held = getattr(group, ranges)
            for view, old in zip(
                group.local_views(fresh, held).values(), group.local_views(buffer, held).values(), strict=True
            ):
                view.copy_(old)
            result.append(fresh)
        return tuple(result)

    return mf.ShardState(
        filled(state.main, "main_range"), filled(state.compute, "compute_range"), state.spec, state.stage
    )


def nan_padding(rank: int, world: int) -> None:
    params = trainable({"a": integers(3, 5, seed=1), "b": integers(7, seed=2), "c": integers(1, 4, seed=3)})

    def loss_fn(state: mf.ShardState) -> torch.Tensor:
        return sum((value.square() * (rank + 1)).sum() for value in mf.unshard(state).values())  # type: ignore[return-value]

    for preset in ONE_AXIS:
        state = made(params, preset, world, precision=EXACT)
        padded = sum(group.layout.size for group in state.spec.groups) > sum(t.numel() for t in params.values())
        assert padded or world == 1 or preset == "ddp"
        results = []
        for start in (state, poison(state)):
            now, grads, loss = start, None, torch.zeros(())
            for _ in range(2):
                loss, new = mf.value_and_grad(loss_fn)(now)
                assert not any(buffer.isnan().any() for buffer in new.main), "gradients' padding is defined"
                grads = new
                now = mf.sync_model_weights(mf.tree_map(lambda w, g: w - g / 4, now, grads))
            assert grads is not None
            results.append(mf.unshard(now) | {f"grad {n}": g for n, g in mf.unshard(grads).items()} | {"loss": loss})
        assert_equal(results[1], results[0], preset)


def test_nan_in_padding_changes_nothing() -> None:
    for world in (2, 4):
        run_ranks(world, nan_padding)


def dtypes(rank: int, world: int) -> None:
    params = {
        "w": torch.linspace(-1, 1, 12).reshape(4, 3).bfloat16().requires_grad_(),
        "router": torch.ones(2, 3, requires_grad=True),
        "base": torch.ones(4, 3, dtype=torch.int8),
    }
    bf16 = torch.bfloat16
    for preset in ONE_AXIS:
        policy = mf.MixedPrecisionPolicy(compute=bf16, grad=torch.float32, reduce=torch.float32)
        state = made(params, preset, world, precision=policy)
        assert [m.dtype for m in state.main] == [torch.float32, torch.float32, torch.int8]
        assert {n: t.dtype for n, t in mf.unshard(state).items()} == {"w": bf16, "router": bf16, "base": torch.int8}

        def loss_fn(state: mf.ShardState) -> torch.Tensor:
            p = mf.unshard(state)
            return (p["w"] * p["base"]).float().sum() + p["router"].float().sum()

        _, grads = mf.value_and_grad(loss_fn)(state)
        assert [m.dtype for m in grads.main[:2]] == [torch.float32] * 2
        # Small updates are not lost: main weights have more bits than compute weights.
        for _ in range(64):
            state = mf.sync_model_weights(mf.tree_map(lambda w, g: w + g / 2**14, state, grads))
        assert torch.equal(mf.unshard(state)["router"], torch.full((2, 3), 1 + 2.0**-8, dtype=bf16))
        own = made(params, preset, world)
        assert {n: t.dtype for n, t in mf.unshard(own).items()} == {n: t.dtype for n, t in params.items()}
        wire = made(params, preset, world, precision=mf.MixedPrecisionPolicy(reduce=torch.float16), grad_scale=2.0)
        _, grads = mf.value_and_grad(lambda s: mf.unshard(s)["router"].sum() * 40_000.0)(wire)
        # 40,000 a rank would overflow a sum in fp16; the mean, scaled before the wire, overflows only with grad_scale.
        assert grads.main[1].dtype == torch.float32
        assert mf.unshard(grads)["router"].isinf().all()
        wire = made(params, preset, world, precision=mf.MixedPrecisionPolicy(reduce=torch.float16))
        _, grads = mf.value_and_grad(lambda s: mf.unshard(s)["router"].sum() * 40_000.0)(wire)
        torch.testing.assert_close(mf.unshard(grads)["router"], torch.full((2, 3), 40_000.0), rtol=1e-3, atol=0)


def test_mixed_precision() -> None:
    run_ranks(2, dtypes)


def aliasing(rank: int, world: int) -> None:
    params = bilinear(1)
    for preset, alias in (("ddp", True), ("zero3", True), ("zero1", False), ("zero2", False)):
        state = made(params, preset, world, precision=EXACT)
        assert all((buffer is None) is alias for buffer in state.compute), preset
        mapped = mf.tree_map(lambda w: w * 2, state)
        if alias:
            assert_equal(mf.unshard(mapped), {n: t * 2 for n, t in params.items()}, preset)
        assert_equal(mf.unshard(mf.sync_model_weights(mapped)), {n: t * 2 for n, t in params.items()}, preset)
    # Replicas start equal: every rank gets the first rank's values where placements replicate.
    mine = {n: (t.detach() + rank).requires_grad_() for n, t in params.items()}
    assert_equal(mf.unshard(made(mine, "ddp", world, precision=EXACT)), params, "replicas")


def test_aliasing_and_replicas() -> None:
    run_ranks(2, aliasing)


def trees(rank: int, world: int) -> None:
    state, other = made(bilinear(2), "zero1", world, units=BLOCKS), made(bilinear(3), "zero1", world, units=BLOCKS)
    nodes: list[Any] = [state, state["blocks.0"]]
    for unit in nodes:
        leaves, treedef = optree.tree_flatten(unit)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        again = optree.tree_unflatten(treedef, leaves)
        assert type(again) is type(unit) and again.spec == state.spec
        leaves, spec = torch_pytree.tree_flatten(unit)
        again = torch_pytree.tree_unflatten(leaves, spec)
        assert all(a is b for a, b in zip(again.main, unit.main, strict=True))
        assert optree.tree_structure(unit) == optree.tree_structure(again)
    with pytest.raises(ValueError):
        optree.tree_map(torch.add, nodes[0], cast(Any, other))
    with pytest.raises(mf.StateError, match=r"`states\[1\]` got a state of .*use states of one plan together"):
        mf.tree_map(torch.add, state, other)
    with pytest.raises(mf.StateError, match=r"`states\[1\]` got a list; expected a ShardState"):
        mf.tree_map(torch.add, state, cast(Any, []))
    with pytest.raises(mf.StateError, match=r"`states` got no state"):
        mf.tree_map(torch.add)
    with pytest.raises(mf.StateError, match=r"expected a state of weights, synced.*call sync_model_weights"):
        mf.value_and_grad(lambda s: mf.unshard(s)["embed"].sum())(mf.tree_map(torch.clone, state))
    zeros = mf.zeros_like(state)
    assert all(not z.any() and z.shape == m.shape for z, m in zip(zeros.main, state.main, strict=True))
    pending = mf.launch(state["blocks.1"])
    assert set(mf.wait(pending)) == {"w", "b"}
    for call, text in (
        (lambda: mf.launch(state), "`unit` got a ShardState; expected a UnitState"),  # type: ignore[arg-type]
        (lambda: mf.wait(state), r"`pending` got a ShardState; expected what launch\(unit\) returned"),  # type: ignore[arg-type]
        (lambda: mf.unshard(3), "`state` got a int; expected a ShardState"),  # type: ignore[arg-type]
        (lambda: mf.shard({}, None), "`spec` got a NoneType; expected a ShardSpec"),  # type: ignore[arg-type]
    ):
        with pytest.raises(mf.StateError, match=text):
            call()
    mf.sync_model_weights(state, donate=True)
    for call in (lambda: mf.unshard(state), lambda: mf.launch(state[""]), lambda: optree.tree_leaves(nodes[0])):
        with pytest.raises(mf.DonatedError, match=r"donated to sync_model_weights; expected a state that is alive"):
            call()


def test_states_are_trees_and_plans_do_not_mix() -> None:
    run_ranks(2, trees)


def from_meta(rank: int, world: int) -> None:
    real = bilinear(2)
    spec = mf.plan(real, mesh_of(world), mf.zero3())
    meta = {n: torch.empty_like(t, device="meta").requires_grad_() for n, t in real.items()}
    seen: list[str] = []

    def init(path: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_meta
        seen.append(path)
        return real[path]

    for preset in ONE_AXIS:
        spec = mf.plan(meta, mesh_of(world), PRESETS[preset](), units=BLOCKS, precision=EXACT)
        seen.clear()
        assert_equal(mf.unshard(mf.shard(meta, spec, init_fn=init)), real, preset)
        assert seen == list(real)
        assert_equal(mf.unshard(mf.shard(real, spec)), real, preset)  # planned on meta, sharded from values
    with pytest.raises(mf.StateError, match=r"`params` got a meta tensor at 'embed'.*pass init_fn"):
        mf.shard(meta, spec)
    with pytest.raises(mf.StateError, match=r"`init_fn` got a function; expected None when no parameter is a meta"):
        mf.shard(real, spec, init_fn=init)
    with pytest.raises(mf.StateError, match=r"`init_fn` got \(2,\) on cpu for 'embed'; expected a tensor of shape"):
        mf.shard(meta, spec, init_fn=lambda path, tensor: torch.ones(2))
    with pytest.raises(mf.StateError, match=r"`params` got .*float32\) at 'embed'; expected .*float64"):
        mf.shard({n: t.detach().float().requires_grad_() for n, t in real.items()}, spec)
    with pytest.raises(mf.StateError, match=r"tied otherwise than planned"):
        mf.shard(real | {"blocks.1.w": real["blocks.0.w"]}, spec)


def test_meta_tensors_are_made_by_init_fn() -> None:
    run_ranks(2, from_meta)
