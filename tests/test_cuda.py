"""The same on GPUs over NCCL: one process a GPU, started for each test."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes

import mfsdp_fn as mf
from layouts import with_kind
from mfsdp_fn import collectives, communicators
from models import (
    EXACT,
    LR,
    PRESETS,
    accumulated,
    assert_equal,
    batch_of,
    bilinear,
    layouts_of,
    plain_training,
    sgd,
    sharded_loss,
)

pytestmark = pytest.mark.cuda


def entry(rank: int, world: int, store: str, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    fn(rank, world, *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def on_gpus(tmp_path: Any, world: int, fn: Callable[..., None], *args: Any) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    start_processes(entry, (world, str(tmp_path / "store"), fn, args), nprocs=world, start_method="spawn")


GPUS = [pytest.param(1), pytest.param(2, marks=pytest.mark.cuda(gpus=2))]


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cuda", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def on_device(batch: Any) -> Any:
    return tuple(tensor.cuda() for tensor in batch)


def planned(preset: str, *shape: int, **options: Any) -> tuple[mf.ShardState, dict[str, torch.Tensor]]:
    params = bilinear()
    options = {"units": ("blocks.*",), "precision": EXACT} | options
    return mf.shard(params, mf.plan(params, mesh(*shape), PRESETS[preset](), **options)), params


def train(rank: int, world: int, delays: bool) -> None:
    shapes = [((world,), p) for p in ("ddp", "zero1", "zero2", "zero3")]
    shapes += [(shape, p) for shape in {(world, 1), (1, world)} for p in ("hsdp", "hfsdp")]
    for shape, preset in shapes:
        for layout in layouts_of(preset, "padded", "unpadded"):
            state, params = planned(preset, *shape, shard_layout=layout)
            context = delayed(rank) if delays else contextlib.nullcontext()
            with context:
                for step in range(3):
                    batches = [on_device(batch_of(step, micro, rank)) for micro in range(2)]
                    state = sgd(state, accumulated(sharded_loss, state, batches, float(world)))
                got = {name: value.cpu() for name, value in mf.unshard(state).items()}
            assert_equal(got, plain_training(params, world, steps=3, micros=2), (shape, preset, layout))


@contextlib.contextmanager
def delayed(rank: int) -> Any:
    """Busy work of random length enqueued before every collective, a different one on each rank."""
    from torch.utils._python_dispatch import TorchDispatchMode

    generator = torch.Generator().manual_seed(rank)
    busy = torch.ones(256, 256, device="cuda")

    class Delay(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in str(func):
                for _ in range(int(torch.randint(0, 30, (), generator=generator))):
                    torch.mm(busy, busy)
            return func(*args, **(kwargs or {}))

    with Delay():
        yield


@pytest.mark.parametrize("world", GPUS)
@pytest.mark.parametrize("delays", [False, True])
def test_training_equals_the_unsharded_model(tmp_path: Any, world: int, delays: bool) -> None:
    on_gpus(tmp_path, world, train, delays)


def train_compiled(rank: int, world: int) -> None:
    for preset in ("zero3", "zero2", "ddp"):
        torch._dynamo.reset()
        state, params = planned(preset, world)
        opt = mf.optim.sgd(lr=2.0**-4)

        def step(state: Any, opt_state: Any, batch: Any, opt: Any = opt) -> Any:
            _, grads = mf.value_and_grad(sharded_loss)(state, batch, float(world))
            return opt.step(grads, opt_state, state, donate=True)

        compiled, opt_state = mf.compile(step), opt.init(state)
        for number in range(3):
            state, opt_state = compiled(state, opt_state, on_device(batch_of(number, 0, rank)))
        got = {name: value.cpu() for name, value in mf.unshard(state).items()}
        assert_equal(got, plain_training(params, world, steps=3, micros=1), preset)


@pytest.mark.parametrize("world", GPUS)
def test_a_compiled_step_equals_the_unsharded_model(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, train_compiled)


def capture(rank: int, world: int) -> None:
    for preset in ("zero3", "zero1", "ddp"):
        state, _ = planned(preset, world)
        opt = mf.optim.sgd(lr=2.0**-4)
        opt_state = opt.init(state)
        batch = on_device(batch_of(0, 0, rank))

        def step(state: Any, opt_state: Any, batch: Any, opt: Any = opt) -> Any:
            _, grads = mf.value_and_grad(sharded_loss)(state, batch, float(world))
            return opt.step(grads, opt_state, state, donate=True)

        eager, eager_opt = planned(preset, world)[0], opt.init(state)
        for number in range(21):
            eager, eager_opt = step(eager, eager_opt, on_device(batch_of(number, 0, rank)))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # step 0 warms up
            state, opt_state = step(state, opt_state, batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            state, opt_state = step(state, opt_state, batch)
        for number in range(1, 21):
            for static, fresh in zip(batch, on_device(batch_of(number, 0, rank)), strict=True):
                static.copy_(fresh)
            graph.replay()
        assert_equal(mf.unshard(state), mf.unshard(eager), preset)


def capture_cold(rank: int, world: int) -> None:
    state, _ = planned("zero3", world)
    batch = on_device(batch_of(0, 0, rank))
    for transformed in (mf.value_and_grad(sharded_loss), mf.compile(mf.value_and_grad(sharded_loss))):
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(mf.StateError, match="got a first call inside a CUDA graph capture; expected a call outside"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            transformed(state, batch, float(world))


@pytest.mark.parametrize("world", GPUS)
def test_a_capture_without_warm_up_is_refused(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, capture_cold)


@pytest.mark.parametrize("world", GPUS)
def test_a_captured_step_replays_to_the_same(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, capture)


def exchange(rank: int, world: int) -> None:
    state, _ = planned("zero3", world)
    owners = mf.plan_owners(state.spec)
    doubled = mf.owner_map(lambda full: full * 2)(state, owners)
    got = mf.unshard(mf.sync_model_weights(doubled))
    for path, value in mf.unshard(state).items():
        assert torch.equal(got[path], value * 2 if value.dim() >= 2 else value), path


@pytest.mark.parametrize("world", GPUS)
def test_owner_exchange(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, exchange)


def symmetric(rank: int, world: int) -> None:
    """Through NCCL's symmetric memory: the same gradients, from the same rings on every rank."""
    runtime = mf.RuntimePolicy(use_symmetric_memory=True, forward_prefetch=10**6, max_inflight_reductions=2)
    exact = mf.MixedPrecisionPolicy(main=None, compute=torch.bfloat16)  # integers: bf16 holds them
    for preset, shape in (("zero3", (world,)), ("zero1", (world,)), ("ddp", (world,)), ("hsdp", (world, 1))):
        for separate in (True, False):
            params = {name: value.detach().float().requires_grad_() for name, value in bilinear().items()}
            common = {"units": ("blocks.*",), "precision": exact}
            policy = dataclasses.replace(runtime, overlap_allgather_reduction=separate)
            plain = mf.shard(params, mf.plan(params, mesh(*shape), PRESETS[preset](), **common))
            spec = mf.plan(params, mesh(*shape), PRESETS[preset](), runtime=policy, **common)
            state = mf.shard(params, spec)
            axis = spec.groups[0].axes[0]
            assert (axis.gather_staging is axis.reduce_staging) is not separate or preset in ("ddp", "hsdp")
            for step in range(3):
                batch = tuple(t if t.dtype == torch.long else t.bfloat16() for t in on_device(batch_of(step, 0, rank)))
                (_, expected), (_, grads) = (
                    mf.value_and_grad(sharded_loss)(one, batch, float(world)) for one in (plain, state)
                )
                for got, wanted in zip(grads.main, expected.main, strict=True):
                    assert torch.equal(got, wanted), (preset, step)
                plain, state = sgd(plain, expected), sgd(state, grads)
            held = mf.unshard(state)
            mf.unshard(state)
            assert_equal(held, mf.unshard(plain), preset)
            assert axis.reduce_staging is not None and axis.reduce_staging.launched >= 3 * len(spec.groups)
    ragged = {"w": torch.ones(3, 2, requires_grad=True)}
    with pytest.raises(mf.PlanError, match="ragged segments"):
        mf.plan(ragged, mesh(world), mf.zero3(), shard_layout="unpadded", runtime=runtime)


@pytest.mark.cuda(gpus=2)
def test_symmetric_memory(tmp_path: Any) -> None:
    on_gpus(tmp_path, 2, symmetric)


def symmetric_alone(rank: int, world: int) -> None:
    params = {"w": torch.ones(4, requires_grad=True)}
    with pytest.raises(mf.PlanError, match="True, but a single rank sends nothing"):
        mf.plan(params, mesh(1), mf.zero3(), runtime=mf.RuntimePolicy(use_symmetric_memory=True))


@pytest.mark.cuda(gpus=1)
def test_symmetric_memory_on_one_rank_is_refused(tmp_path: Any) -> None:
    on_gpus(tmp_path, 1, symmetric_alone)


def memory(rank: int, world: int) -> None:
    params = {f"blocks.{i}.w": torch.randn(512, 512, requires_grad=True) for i in range(8)}
    spec = mf.plan(params, mesh(world), mf.zero3(), units=("blocks.*",))
    state, x = mf.shard(params, spec), torch.randn(64, 512, device="cuda")

    def loss(state: mf.ShardState) -> torch.Tensor:
        h = x
        for name in spec.units_matching("blocks.*"):
            h = torch.tanh(h @ mf.unshard(state[name])["w"])
        return h.square().mean()

    value_and_grad = mf.value_and_grad(loss)
    for _ in range(3):
        value_and_grad(state)
    torch.cuda.synchronize()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(100):
        value_and_grad(state)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.memory_allocated() == allocated
    unit = 512 * 512 * 4
    activations = 3 * 8 * x.numel() * 4
    # Gradients, two gathered units, one packed input, one result on its way, one unit's gradients as autograd has them.
    assert torch.cuda.max_memory_allocated() - allocated <= 8 * unit // world + 5 * unit + activations
    before = torch.cuda.memory_allocated()
    held = sum(main.numel() * 4 for main in state.main)
    del state
    assert torch.cuda.memory_allocated() <= before - held


@pytest.mark.parametrize("world", GPUS)
def test_memory_is_flat_and_given_back(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, memory)


SIZES = ((5, 0), (0, 7), (3, 9), (4096, 12345), (8, 8))


def uneven_collectives(rank: int, world: int, delays: bool) -> None:
    """Values, and that what a transfer reads and writes isn't used again before it is waited for."""
    (axis,) = communicators.axes_of(mesh(world))
    with delayed(rank) if delays else contextlib.nullcontext():
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.bool):
            for sizes in SIZES:
                whole = torch.arange(sum(sizes), device="cuda").remainder(5).to(dtype)
                mine = whole.split(list(sizes))[rank]
                gather = collectives.all_gather(mine.clone(), sizes, axis)  # nothing else refers to the input
                junk = [torch.full_like(mine, 1) for _ in range(4)]
                assert (gather.work is not None) == (sizes[0] != sizes[1])
                assert torch.equal(gather.wait().view(torch.uint8), whole.view(torch.uint8)), (dtype, sizes)
                del junk
                if dtype.itemsize == 1:
                    continue
                scatter = collectives.reduce_scatter(whole * (rank + 1), sizes, axis)
                junk = [torch.full_like(whole, 1) for _ in range(4)]
                assert (scatter.work is not None) == (sizes[0] != sizes[1])
                total = mine * (world * (world + 1) // 2)
                assert torch.equal(scatter.wait(), total), (dtype, sizes)
                del junk


@pytest.mark.cuda(gpus=2)
@pytest.mark.parametrize("delays", [False, True])
def test_uneven_segments_go_straight_into_flat_buffers(tmp_path: Any, delays: bool) -> None:
    on_gpus(tmp_path, 2, uneven_collectives, delays)


def train_ragged(rank: int, world: int, delays: bool) -> None:
    """Ragged rows; and owners of which one owns nothing, so that its segments are empty."""
    with delayed(rank) if delays else contextlib.nullcontext():
        for shape, placements in (((world,), mf.zero3()), ((world,), mf.zero1()), ((1, world), mf.hsdp())):
            for layout in ("unpadded", "tensor"):
                params = bilinear()
                options: dict[str, Any] = {"shard_layout": "unpadded"}
                if layout == "tensor":
                    placements = with_kind(placements, mf.TensorAtomic())
                    options = {"owners": dict.fromkeys(params, world - 1)}
                spec = mf.plan(params, mesh(*shape), placements, units=("blocks.*",), precision=EXACT, **options)
                state = mf.shard(params, spec)
                for step in range(3):
                    batches = [on_device(batch_of(step, micro, rank)) for micro in range(2)]
                    state = sgd(state, accumulated(sharded_loss, state, batches, float(world)))
                got = {name: value.cpu() for name, value in mf.unshard(state).items()}
                assert_equal(got, plain_training(params, world, steps=3, micros=2), (shape, layout))


@pytest.mark.parametrize("world", GPUS)
@pytest.mark.parametrize("delays", [False, True])
def test_ragged_training_equals_the_unsharded_model(tmp_path: Any, world: int, delays: bool) -> None:
    on_gpus(tmp_path, world, train_ragged, delays)


def auto_layout(rank: int, world: int) -> None:
    """NCCL sends uneven segments as they are: padding that lengthens no segment is still sent, and so left out."""
    params = {"w": torch.arange((world + 1) * 2.0**15).view(world + 1, -1).requires_grad_()}
    state = mf.shard(params, mf.plan(params, mesh(world), mf.zero3(), shard_layout="auto"))
    whole = mf.unshard(state)["w"]
    assert state.spec.groups[0].choice.picked == ("unpadded" if world > 1 else "padded")
    assert whole.untyped_storage().nbytes() == params["w"].nbytes and torch.equal(whole.cpu(), params["w"])


@pytest.mark.parametrize("world", GPUS)
def test_auto_layouts_over_nccl(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, auto_layout)


def ragged_dtypes(rank: int, world: int) -> None:
    """Weights in fp32 or bf16, gathered and reduced in their own dtype: equal to the padded layout's, bit for bit."""
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for layout in ("padded", "unpadded"):
            # Two tensors whose rows no even split cuts well; the third group leaves the first rank empty.
            params = {"a": torch.arange(15.0).view(3, 5), "b": torch.arange(7.0), "blocks.0.row": torch.ones(1, 4)}
            params = {name: value.to(dtype).requires_grad_() for name, value in params.items()}
            policy = mf.MixedPrecisionPolicy(main=torch.float32, grad=dtype, reduce=dtype)
            options: dict[str, Any] = {"units": ("blocks.*",), "precision": policy, "shard_layout": layout}
            state = mf.shard(params, mf.plan(params, mesh(world), mf.zero3(), **options))
            back = mf.unshard(state)
            for name, value in params.items():
                assert torch.equal(back[name].cpu(), value.detach()), (dtype, layout, name)

            def loss(state: mf.ShardState) -> torch.Tensor:
                return sum((value * (rank + 1)).sum() for value in mf.unshard(state).values())  # type: ignore[return-value]

            _, grads = mf.value_and_grad(loss)(state)
            found.append({name: grad.cpu() for name, grad in mf.unshard(grads).items()})
        assert_equal(found[1], found[0], dtype)


@pytest.mark.parametrize("world", GPUS)
def test_ragged_layouts_in_two_dtypes(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, ragged_dtypes)


def checkpointed(rank: int, world: int, folder: str) -> None:
    """Saved under one plan and loaded under others: weights and moments, and a step that goes on, bit for bit."""
    opt = mf.optim.adamw(LR, fused=False)
    state, _ = planned("zero3", world, shard_layout="unpadded" if world > 1 else "padded")
    opt_state = opt.init(state)

    def stepped(state: mf.ShardState, opt_state: Any, step: int) -> tuple[mf.ShardState, Any]:
        batches = [on_device(batch_of(step, micro, rank)) for micro in range(2)]
        return opt.step(accumulated(sharded_loss, state, batches, float(world)), opt_state, state)

    state, opt_state = stepped(state, opt_state, 0)
    mf.checkpoint.save(f"{folder}/x", state, opt_state, extra={"step": torch.tensor(1, device="cuda")})
    for preset in ("zero3", "zero1", "ddp"):
        loaded, loaded_opt, extra = mf.checkpoint.load(f"{folder}/x", planned(preset, world)[0].spec, opt)
        assert extra["step"] == 1 and loaded.main[0].is_cuda and loaded_opt.step.is_cuda and loaded_opt.step == 1
        assert_equal(mf.unshard(loaded), mf.unshard(state), preset)
        for name in ("exp_avg", "exp_avg_sq"):
            got, expected = (mf.sync_model_weights(getattr(each, name)) for each in (loaded_opt, opt_state))
            assert_equal(mf.unshard(got), mf.unshard(expected), (preset, name))
    same, same_opt, _ = mf.checkpoint.load(f"{folder}/x", state.spec, opt)
    assert_equal(mf.unshard(stepped(same, same_opt, 1)[0]), mf.unshard(stepped(state, opt_state, 1)[0]))


@pytest.mark.parametrize("world", GPUS)
def test_checkpoints(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, checkpointed, str(tmp_path))


def redistributed(rank: int, world: int) -> None:
    shapes = [(5, 3), (4,), (1, 6)]
    rows = mf.build_for_row_atomic_unpadding(shapes, world)
    whole = mf.build_for_tensor_atomic(shapes, world, tensor_owners=[world - 1] * 3)
    tensors = [torch.arange(float(torch.Size(shape).numel()), device="cuda").view(shape) for shape in shapes]
    start = mf.DBuffer.from_tensors(tensors, rows, mesh(world), [mf.RowAtomic()])
    owned = start.redistribute([mf.TensorAtomic()], layout=whole)
    back = owned.redistribute([mf.RowAtomic()], layout=rows)
    assert torch.equal(back.local, start.local)
    for got, value in zip(owned.full_tensors(), tensors, strict=True):
        assert torch.equal(got, value)
    summands = mf.DBuffer.from_tensors(tensors, whole, mesh(world), [mf.Partial()])
    assert torch.equal(summands.redistribute([mf.TensorAtomic()]).local, owned.local * world)


@pytest.mark.parametrize("world", GPUS)
def test_buffers_are_redistributed(tmp_path: Any, world: int) -> None:
    on_gpus(tmp_path, world, redistributed)
