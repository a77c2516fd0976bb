"""Owner exchanges on real ranks: values, bytes, purity; and `owner_map` built on them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_fn as mf
from mfsdp_fn.gather_scatter import gather_to_owner, scatter_from_owner
from mfsdp_fn.owner_compute import owner_map, schedule_of
from mfsdp_fn.owner_exchange import route_of
from mfsdp_fn.owner_planning import GroupOwnerLayout, assign_owner_work, plan_owners
from models import mesh_of
from pool import WORLD_SIZES, RankError, run_ranks

Shapes = Sequence[tuple[int, ...]]


class Exchanges(TorchDispatchMode):
    """Bytes sent, peer by peer, of every exchange; other collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[int]] = []
        self.others: list[str] = []
        self.open = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split(".")[0].split("::")
        if namespace == "_c10d_functional":
            if name == "all_to_all_single":
                self.sent.append([n * args[0].element_size() for n in args[2]])
                self.open += 1
            elif name == "wait_tensor":
                self.open -= 1
            else:
                self.others.append(name)
        return func(*args, **(kwargs or {}))


def values(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Every element different, exact in any dtype of four bytes or more."""
    tensors, start = [], 0.0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + numel, dtype=dtype).view(shape))
        start += numel
    return tensors


def shards_of(full: Sequence[torch.Tensor], owners: GroupOwnerLayout) -> dict[int, torch.Tensor]:
    rank = owners.ranks.index(owners.this_rank)
    found = {}
    for index, piece in owners.mine.items():
        flat = full[index].reshape(-1)[piece.start : piece.stop]
        found[index] = flat.clone().view(owners.layout.local_shape(index, rank))
    return found


LAYOUTS: dict[str, tuple[Callable[..., mf.GlobalLayout], Shapes]] = {
    "padded": (mf.build_for_row_atomic, [(6, 4), (4, 4), (3,), (5, 2)]),
    "uneven": (mf.build_for_row_atomic_unpadding, [(7, 3), (2, 5), (0, 4), (11, 1), (1, 9)]),
    "empty shards": (mf.build_for_row_atomic, [(2, 8)]),
    "one row": (mf.build_for_row_atomic_unpadding, [(1, 6)]),
    "deep": (mf.build_for_row_atomic, [(5, 2, 3), (3, 2, 2, 2)]),
}


def round_trip(
    rank: int, world_size: int, name: str, dtype: torch.dtype, wire: torch.dtype | None, use_out: bool
) -> Any:
    build, shapes = LAYOUTS[name]
    layout, mesh = build(shapes, world_size), mesh_of(world_size)
    owned = assign_owner_work(layout, mesh, [i for i, shape in enumerate(shapes) if len(shape) > 1])
    owners = GroupOwnerLayout(mesh, layout, owned, dtype=dtype)
    full = values(shapes, dtype)
    shards = shards_of(full, owners)
    before = {index: shard.clone() for index, shard in shards.items()}
    out = {index: torch.full(shapes[index], -1.0, dtype=dtype) for index in owners.owned} if use_out else None
    with Exchanges() as seen:
        gathered = gather_to_owner(shards, owners, out=out, wire_dtype=wire)
    assert seen.open == 0 and not seen.others
    assert sorted(gathered) == sorted(i for i, owner in owned.items() if owner == rank)
    for index, tensor in gathered.items():
        assert tensor.shape == torch.Size(shapes[index]) and tensor.dtype == dtype
        assert torch.equal(tensor, full[index]), index
        if out is not None:
            assert tensor is out[index]
        elif len(owners.pieces[index]) == 1:
            assert tensor.data_ptr() == shards[index].data_ptr()  # held whole: nothing moves, nothing is copied
    assert all(torch.equal(shards[i], before[i]) for i in shards)  # pure
    results = {index: tensor * 2 for index, tensor in gathered.items()}
    back_out = {i: torch.empty_like(shard) for i, shard in shards.items()} if use_out else None
    with Exchanges() as seen_back:
        back = scatter_from_owner(results, owners, out=back_out, wire_dtype=wire)
    assert sorted(back) == sorted(shards)
    for index, shard in back.items():
        assert shard.shape == layout.local_shape(index, rank) and shard.dtype == dtype
        assert torch.equal(shard, 2 * before[index])
        assert back_out is None or shard is back_out[index]
    traffic, size = owners.traffic(), (wire or dtype).itemsize
    want = [[traffic.get((rank, peer), 0) * size for peer in range(world_size)]] if traffic else []
    assert seen.sent == want, (seen.sent, want)
    want = [[traffic.get((peer, rank), 0) * size for peer in range(world_size)]] if traffic else []
    assert seen_back.sent == want
    return sum(traffic.values())


@pytest.mark.parametrize("use_out", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_there_and_back(world_size: int, name: str, use_out: bool) -> None:
    moved = run_ranks(world_size, round_trip, name, torch.float32, None, use_out)
    assert len(set(moved)) == 1
    # What this is about: matrices that straddle ranks, and layouts in which nothing does.
    if name in ("padded", "uneven", "one row"):
        assert (moved[0] > 0) == (world_size > 1 and name != "one row")


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_a_narrow_wire_halves_the_bytes(wire: torch.dtype) -> None:
    run_ranks(3, round_trip, "uneven", torch.float32, wire, False)  # values up to 255: exact in both


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16])
def test_dtypes(dtype: torch.dtype) -> None:
    run_ranks(3, round_trip, "padded", dtype, None, True)


def several_groups(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    dtypes = {"odd": torch.bfloat16, "single": torch.float32, "double": torch.float64}
    shapes = {"odd": [(3, 1), (4, 3)], "single": [(5, 3), (3, 3)], "double": [(7, 1)]}
    layouts = {}
    for name, dtype in dtypes.items():
        layout = mf.build_for_row_atomic_unpadding(shapes[name], world_size)
        # Everything to the last holder, so that parts of narrow dtypes come before wide ones.
        last = {i: layout.ranks_of(i)[-1] for i in range(len(shapes[name]))}
        layouts[name] = GroupOwnerLayout(mesh, layout, last, dtype=dtype)
    full = {name: values(shapes[name], dtype) for name, dtype in dtypes.items()}
    shards = {name: shards_of(full[name], owners) for name, owners in layouts.items()}
    with Exchanges() as seen:
        gathered = gather_to_owner(shards, layouts)
    assert len(seen.sent) == 1
    for name in dtypes:
        for index, tensor in gathered[name].items():
            assert torch.equal(tensor, full[name][index]), (name, index)
    with Exchanges() as seen:
        back = scatter_from_owner(gathered, layouts)
    assert len(seen.sent) == 1
    for name in dtypes:
        assert back[name].keys() == shards[name].keys()
        for index, shard in shards[name].items():
            assert torch.equal(back[name][index], shard) and back[name][index].dtype == dtypes[name]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_exchange_for_groups_of_several_dtypes(world_size: int) -> None:
    run_ranks(world_size, several_groups)


def submesh_exchange(rank: int, world_size: int) -> None:
    layout = mf.build_for_row_atomic([(6, 4), (4, 4)], 2)
    mesh = mesh_of(2, 2)["inner"]
    owners = GroupOwnerLayout(mesh, layout, {0: mesh.mesh.tolist()[1]})
    full = [tensor + 1000 * (rank // 2) for tensor in values([(6, 4), (4, 4)])]
    gathered = gather_to_owner(shards_of(full, owners), owners)
    assert list(gathered) == ([0] if rank % 2 else [])
    assert all(torch.equal(tensor, full[i]) for i, tensor in gathered.items())
    # Rank 0 of the pair owns nothing: it takes float32 for granted.
    back = scatter_from_owner(gathered, owners)
    assert torch.equal(back[0], shards_of(full, owners)[0])


def test_ranks_of_a_sub_mesh() -> None:
    run_ranks(4, submesh_exchange)


def permuted(rank: int, world_size: int) -> None:
    layout = mf.build_for_row_atomic([(6, 4), (4, 4)], 2)
    owners = GroupOwnerLayout(DeviceMesh("cpu", [1, 0]), layout, {0: 0, 1: 0})
    assert owners.ranks == (1, 0)  # rank 1 holds the buffer's first half
    full = values([(6, 4), (4, 4)])
    gathered = gather_to_owner(shards_of(full, owners), owners)
    assert list(gathered) == ([0, 1] if rank == 0 else [])
    assert all(torch.equal(tensor, full[i]) for i, tensor in gathered.items())
    assert torch.equal(scatter_from_owner(gathered, owners)[0], shards_of(full, owners)[0])


def test_a_mesh_in_another_order_than_its_communicator() -> None:
    run_ranks(2, permuted)


def stranger(rank: int, world_size: int) -> None:
    layout = mf.build_for_row_atomic([(6, 4)], 2)
    owners = GroupOwnerLayout(mesh_of(2), layout, {0: 1})
    if rank == 1:
        scatter_from_owner({0: torch.zeros(6, 4, dtype=torch.float64)}, owners)


def wrong_arguments(rank: int, world_size: int) -> list[str]:
    layout = mf.build_for_row_atomic([(6, 4)], world_size)
    owners = GroupOwnerLayout(mesh_of(world_size), layout, {0: 0})
    calls: list[Callable[[], Any]] = [
        lambda: gather_to_owner({}, owners),
        lambda: gather_to_owner({0: torch.zeros(3)}, owners),
        lambda: gather_to_owner({}, "owners"),
        lambda: gather_to_owner({0: torch.zeros(24)}, owners, out={0: torch.zeros(3)}),
        lambda: scatter_from_owner({}, owners),
        lambda: owner_map(torch.neg, buckets=0),
    ]
    texts = []
    for call in calls:
        with pytest.raises(mf.StateError) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_errors_come_before_anything_is_sent() -> None:
    (texts,) = run_ranks(1, wrong_arguments)
    for text, start in zip(
        texts,
        (
            "`shards` got no entry for tensor 0",
            "`shards` got (3,) for tensor 0; expected a tensor of 24 elements",
            "`owner_layout` got a str",
            "`out` got (3,)",
            "`fulls` got no entry for tensor 0",
            "`buckets` got 0",
        ),
        strict=True,
    ):
        assert text.startswith(start), text
    with pytest.raises(RankError, match="which owns nothing and can't tell"):
        run_ranks(2, stranger)


def elementless(rank: int, world_size: int, use_out: bool, wire: torch.dtype | None) -> None:
    """Rank 0 owns a tensor without elements only, and gets a shard of another in a dtype that nothing else tells."""
    layout = mf.build_for_row_atomic([(0, 4), (8, 4)], world_size)
    owners = GroupOwnerLayout(mesh_of(world_size), layout, {0: 0, 1: 1})
    full = values([(0, 4), (8, 4)], torch.float64)
    shards = shards_of(full, owners)
    assert list(shards) == [1]
    out = {i: torch.empty_like(full[i]) for i in owners.owned if full[i].numel()} if use_out else None
    gathered = gather_to_owner(shards, owners, out=out)
    assert sorted(gathered) == sorted(owners.owned)
    for index, tensor in gathered.items():
        assert torch.equal(tensor, full[index]) and tensor.dtype == torch.float64
    back_out = {1: torch.empty_like(shards[1])} if use_out else None
    back = scatter_from_owner(gathered, owners, out=back_out, wire_dtype=wire)
    assert list(back) == [1] and back[1].dtype == torch.float64 and torch.equal(back[1], shards[1])
    plan = mf.OwnerGatherPlan.pack(owners, shards)
    if rank == 0:
        whole = plan.reconstruct_full(0, {})
        assert whole.shape == (0,) and whole.dtype == torch.float64


@pytest.mark.parametrize("use_out", [False, True])
@pytest.mark.parametrize("wire", [None, torch.float32])
def test_who_owns_a_tensor_without_elements_knows_the_dtype(wire: torch.dtype | None, use_out: bool) -> None:
    run_ranks(2, elementless, use_out, wire)


def test_a_dtype_that_only_a_left_out_tensor_tells_is_asked_for() -> None:
    layout = mf.build_for_row_atomic([(0, 4), (8, 4)], 2)
    owners = GroupOwnerLayout(mf.AbstractMesh((2,), ("dp",)), layout, {0: 0, 1: 1})
    with pytest.raises(mf.StateError, match="`fulls` got no entry for tensor 0, which has no elements but alone tells"):
        scatter_from_owner({}, owners)


def one_rank(shapes: Shapes, dtype: torch.dtype | None = None) -> GroupOwnerLayout:
    layout = mf.build_for_row_atomic(shapes, 1)
    return GroupOwnerLayout(mf.AbstractMesh((1,), ("dp",)), layout, {i: 0 for i in range(len(shapes))}, dtype=dtype)


PAIR = torch.zeros(8)
WRONG: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "`shards` got one that requires grad for tensor 0": (
        "gather",
        {0: torch.ones(2, 2, requires_grad=True), 1: torch.ones(4)},
        {},
    ),
    "`fulls` got one that requires grad for tensor 1": (
        "scatter",
        {0: torch.ones(4), 1: torch.ones(4, requires_grad=True)},
        {},
    ),
    "`shards` got one on meta for tensor 0; expected tensors on cpu": (
        "gather",
        {0: torch.ones(4, device="meta"), 1: torch.ones(4)},
        {},
    ),
    "`fulls` got torch.float32 and torch.float64 in one group": (
        "scatter",
        {0: torch.ones(4), 1: torch.ones(4, dtype=torch.float64)},
        {},
    ),
    "`shards` got (2,) for tensor 0; expected a tensor of 4 elements": (
        "gather",
        {0: torch.ones(2), 1: torch.ones(4)},
        {},
    ),
    "`out` got nothing for tensor 1": ("both", None, {"out": {0: torch.ones(4)}}),
    "`out` got torch.float64 tensors; expected torch.float32": (
        "both",
        None,
        {"out": {0: torch.ones(4).double(), 1: torch.ones(4).double()}},
    ),
    "`out` got (4,), strides (2,) for tensor 0": ("both", None, {"out": {0: PAIR[::2], 1: torch.ones(4)}}),
    "`out` got (8,), strides (1,) for tensor 1": ("both", None, {"out": {0: torch.ones(4), 1: torch.ones(8)}}),
    "`out` got one on meta": ("both", None, {"out": {i: torch.ones(4, device="meta") for i in range(2)}}),
    "`out` got one that requires grad for tensor 0": (
        "both",
        None,
        {"out": {0: torch.ones(4, requires_grad=True), 1: torch.ones(4)}},
    ),
    "`out` got tensors 0 and 1 that share memory": ("both", None, {"out": {0: PAIR[:4], 1: PAIR[3:7]}}),
    "`wire_dtype` got torch.int32; expected a floating-point": ("both", None, {"wire_dtype": torch.int32}),
    "`wire_dtype` got torch.bfloat16; expected None for torch.int16 tensors": (
        "both",
        {i: torch.ones(4, dtype=torch.int16) for i in range(2)},
        {"wire_dtype": torch.bfloat16},
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_tensors_that_an_exchange_cannot_serve_are_refused(text: str) -> None:
    which, given, options = WRONG[text]
    given = given or {0: torch.ones(2, 2), 1: torch.ones(4)}
    for name, call in (("gather", gather_to_owner), ("scatter", scatter_from_owner)):
        if which in (name, "both"):
            with pytest.raises(mf.StateError, match=re.escape(text)):
                call(given, one_rank([(2, 2), (2, 2)]), **options)


def test_without_grad_parameters_may_travel() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        full = gather_to_owner({0: weight}, one_rank([(2, 2)]))[0]
    assert not full.requires_grad and torch.equal(full, weight)


def test_a_layout_keeps_its_own_owners() -> None:
    owned = {0: 0}
    owners = GroupOwnerLayout(mf.AbstractMesh((1,), ("dp",)), mf.build_for_row_atomic([(2, 2), (2, 2)], 1), owned)
    owned[1] = 0
    assert owners.tensor_to_owner == {0: 0} and list(owners.pieces) == [0]


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda full: full[..., :1], "`fn` got a result that is a torch.float32 tensor of shape (5, 1) for tensor"),
        (lambda full: None, "`fn` got a result that is None"),
        (lambda full: full.to(torch.complex64), "`fn` got a result that is a torch.complex64 tensor"),
        (lambda full: full.to("meta"), "tensor of shape (5, 3) on meta"),
    ],
)
def test_results_that_do_not_fit_are_refused(fn: Any, text: str) -> None:
    params = {"w": torch.ones(5, 3, requires_grad=True)}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    for batched in (False, True):
        with pytest.raises(mf.StateError, match="`fn` got a result that is") as error:
            owner_map(fn, batched=batched)(state, plan_owners(state.spec))
        assert batched or text in str(error.value)


# owner_map


def tree() -> dict[str, torch.Tensor]:
    shapes = {
        "e": (5, 3),
        "l.0.a": (4, 4),
        "l.0.b": (4,),
        "l.0.c": (4, 4),
        "l.1.a": (4, 4),
        "l.1.b": (4,),
        "l.1.c": (4, 4),
    }
    return {name: tensor.requires_grad_() for name, tensor in zip(shapes, values(list(shapes.values())), strict=True)}


CALLS: list[tuple[int, ...]] = []


def transposed_sum(full: torch.Tensor) -> torch.Tensor:
    """Needs the whole matrix: every element depends on all."""
    CALLS.append(tuple(full.shape))
    return full + full.sum(dim=(-2, -1), keepdim=True)


PRESETS = {
    "zero3": (mf.zero3, 1),
    "zero1": (mf.zero1, 1),
    "ddp": (mf.ddp, 1),
    "hsdp": (mf.hsdp, 2),
    "hfsdp": (mf.hfsdp, 2),
}


def mapped(rank: int, world_size: int, preset: str, layout: str, batched: bool, buckets: int) -> dict[str, Any]:
    make, axes = PRESETS[preset]
    mesh = mesh_of(world_size) if axes == 1 else mesh_of(2, world_size // 2)
    params = tree()
    spec = mf.plan(params, mesh, make(), units=("l.*",), shard_layout=layout)
    state = mf.shard(params, spec)
    owners = plan_owners(spec)
    before = [buffer.clone() for buffer in state.main]
    CALLS.clear()
    with Exchanges() as seen:
        result = owner_map(transposed_sum, batched=batched, buckets=buckets)(state, owners)
    assert seen.open == 0 and not seen.others
    assert all(torch.equal(a, b) for a, b in zip(before, state.main, strict=True))
    for name, value in mf.unshard(result).items():
        want = params[name] + (params[name].sum() if value.ndim == 2 else 0)
        assert torch.equal(value, want), name
    straddling = sum(len(layout.boundary) for layout in owners.values())
    return {
        "calls": list(CALLS),
        "exchanges": len(seen.sent),
        "sent": sum(map(sum, seen.sent)),
        "straddling": straddling,
        "traffic": 2 * 4 * sum(sum(layout.traffic().values()) for layout in owners.values()),
    }


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("layout", ["padded", "unpadded"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_owner_map(world_size: int, layout: str, batched: bool, buckets: int) -> None:
    got = run_ranks(world_size, mapped, "zero3", layout, batched, buckets)
    matrices = [call[0] if batched else 1 for answer in got for call in answer["calls"]]
    assert sum(matrices) == 5  # each matrix once over all ranks together
    if batched:
        assert all(len(call) == 3 for answer in got for call in answer["calls"])
    assert sum(answer["sent"] for answer in got) == got[0]["traffic"]
    assert len({answer["exchanges"] for answer in got}) == 1
    assert (got[0]["straddling"] > 0) == (world_size > 1)
    assert got[0]["exchanges"] <= 2 * buckets and (got[0]["exchanges"] > 0) == (world_size > 1)


@pytest.mark.parametrize("preset", ["zero1", "ddp", "hsdp", "hfsdp"])
def test_owner_map_under_other_placements(preset: str) -> None:
    got = run_ranks(4, mapped, preset, "padded", False, 2)
    copies = {"zero1": 1, "ddp": 4, "hsdp": 2, "hfsdp": 1}[preset]  # replicas compute for themselves
    assert sum(len(answer["calls"]) for answer in got) == 5 * copies
    assert sum(answer["sent"] for answer in got) == got[0]["traffic"] * (2 if preset == "hsdp" else 1)
    assert (got[0]["straddling"] > 0) == (preset != "ddp")


def local_first(rank: int, world_size: int) -> list[str]:
    """What happens in order: launches of exchanges, evaluations, waits."""
    events: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name()
            if "all_to_all_single" in name or "wait_tensor" in name:
                events.append("launch" if "all_to_all" in name else "wait")
            return func(*args, **(kwargs or {}))

    params = {f"p{i}": torch.ones(6, 4).requires_grad_() for i in range(8)}
    state = mf.shard(params, mf.plan(params, mesh_of(world_size), mf.zero3(), shard_layout="unpadded"))
    owners = plan_owners(state.spec)
    (layout,) = owners.values()

    def fn(full: torch.Tensor) -> torch.Tensor:
        events.append("evaluate")
        return full * 2

    with Watch():
        owner_map(fn, buckets=4)(state, owners)
    return [*events, f"local {sum(len(layout.pieces[i]) == 1 for i in layout.owned)}"]


def test_local_matrices_are_computed_while_others_travel() -> None:
    for events in run_ranks(3, local_first):
        local = int(events.pop().split()[1])
        assert local > 0
        first_wait = events.index("wait")
        assert events[0] == "launch" and events[:first_wait].count("evaluate") >= local


def failing(rank: int, world_size: int) -> None:
    params = tree()
    state = mf.shard(params, mf.plan(params, mesh_of(world_size), mf.zero3()))

    def bad_shape(full: torch.Tensor) -> torch.Tensor:
        return full[:1, :1]

    with Exchanges() as seen, pytest.raises(mf.StateError, match="`fn` got a result"):
        owner_map(bad_shape)(state, plan_owners(state.spec))
    assert seen.open == 0  # what was in flight has been waited for
    with pytest.raises(mf.StateError, match="`owners` got an entry for"):
        owner_map(torch.neg)(state, {"": plan_owners(state.spec)[state.spec.groups[0]]})  # type: ignore[dict-item]
    accumulating = dataclasses.replace(state, stage=mf.Stage.ACCUMULATING)
    with pytest.raises(mf.StateError, match="`state` got accumulating gradients"):
        owner_map(torch.neg)(accumulating, plan_owners(state.spec))


def test_a_failing_function_leaves_nothing_in_flight() -> None:
    run_ranks(2, failing)


EXAMPLE = Path(__file__).parents[1] / "examples" / "shampoo_owner.py"


def test_shampoo_is_another_whole_matrix_optimizer() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
    environment = os.environ | {"PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 3
    assert set(re.findall(r"rank \d owns \[\d\]", done.stdout)) == {"rank 0 owns [0]", "rank 1 owns [2]"}


def two_communicators(rank: int, world_size: int) -> None:
    """Equal layouts over two meshes of the same ranks, as after a process group was destroyed and made again."""
    meshes = [DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))["inner"] for _ in range(2)]
    layout = mf.build_for_row_atomic([(6, 4)], 2)
    owners = [GroupOwnerLayout(mesh, layout, {0: mesh.mesh.tolist()[1]}, dtype=torch.float32) for mesh in meshes]
    names = [each.peers.group for each in owners]
    assert owners[0] == owners[1] and names[0] != names[1]
    assert [route_of((each,)).peers.group for each in owners] == names
    assert [schedule_of((each,), 1).buckets[0].route.peers.group for each in owners] == names


def test_equal_layouts_exchange_over_their_own_communicators() -> None:
    run_ranks(4, two_communicators)
