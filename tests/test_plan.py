"""Plans: groups, digests, what ranks must agree on, and what is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import mfsdp_fn as mf
from mfsdp_fn.explain import misaligned
from models import EXACT, mesh_of
from pool import run_ranks


def leaf(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_(grad)


def abstract(size: int, rank: int = 0) -> mf.AbstractMesh:
    return mf.AbstractMesh((size,), ("dp",), rank)


def planned(params: Any, size: int = 2, rank: int = 0, **options: Any) -> mf.ShardSpec:
    return mf.plan(params, abstract(size, rank), mf.zero3(), **options)


def mixed() -> dict[str, torch.Tensor]:
    """An int8 base, fp32 adapters, bf16 weights and an fp32 router."""
    return {
        "l.0.base": leaf(8, 4, dtype=torch.int8, grad=False),
        "l.0.adapter": leaf(2, 4),
        "l.0.w": leaf(4, 4, dtype=torch.bfloat16),
        "l.0.router": leaf(3, 4),
        "l.0.frozen": leaf(3, grad=False),
        "emb": leaf(5, 2),
    }


def test_groups_are_unit_dtype_and_requires_grad() -> None:
    spec = planned(mixed(), units=("l.*",))
    assert [(g.unit, g.dtype, g.requires_grad, g.paths) for g in spec.groups] == [
        ("l.0", torch.int8, False, ("l.0.base",)),
        ("l.0", torch.float32, True, ("l.0.adapter", "l.0.router")),
        ("l.0", torch.bfloat16, True, ("l.0.w",)),
        ("l.0", torch.float32, False, ("l.0.frozen",)),
        ("", torch.float32, True, ("emb",)),
    ]
    assert spec.group_of("l.0.router").number == 1
    assert spec.units == ("", "l.0")
    base, adapter, w, frozen, _ = (group.dtypes for group in spec.groups)
    assert {base.compute, base.main, base.grad} == {torch.int8}
    assert (adapter.compute, adapter.main) == (torch.float32, torch.float32)
    assert (w.compute, w.main, w.grad, w.reduce) == (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    assert frozen.main == torch.float32
    assert "5 groups of 2 units over 2 ranks" in spec.explain()
    assert re.search(r"^l.0 bfloat16 +float32 > bfloat16 ", spec.explain(), re.MULTILINE)


def test_digest_equality_and_hash() -> None:
    one, other_rank = planned(mixed(), rank=0), planned(mixed(), rank=1)
    assert one == other_rank and hash(one) == hash(other_rank) and one.digest() == other_rank.digest()
    assert one != "a spec" and len({one, other_rank}) == 1
    flipped = mixed() | {"emb": leaf(5, 2, grad=False)}
    reordered = dict(reversed(mixed().items()))
    different = [
        planned(flipped),
        planned(reordered),
        planned(mixed(), size=3),
        planned(mixed(), units=("l.*",)),
        planned(mixed(), grad_scale=2.0),
        planned(mixed(), block_size=2),
        planned(mixed(), shard_layout="unpadded"),
        planned(mixed(), precision=EXACT),
        planned(mixed(), runtime=mf.RuntimePolicy(max_inflight_reductions=2)),
        mf.plan(mixed(), abstract(2), mf.zero2()),
        mf.plan(mixed(), mf.AbstractMesh((2,), ("x",)), mf.zero3()),
    ]
    assert len({one.digest(), *(spec.digest() for spec in different)}) == 1 + len(different)


def test_meta_tensors_plan_the_same() -> None:
    meta = {n: torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for n, t in mixed().items()}
    assert planned(meta) == planned(mixed())
    tied = torch.empty(4, 4, device="meta", requires_grad=True)
    spec = planned({"a": tied, "b": torch.empty(4, 4, device="meta", requires_grad=True), "c": tied})
    assert spec.groups[0].paths == ("a", "b")
    assert spec.leaf("c").index == spec.leaf("a").index


def test_tied_tensors_count_once_and_stay_in_one_unit() -> None:
    tied = leaf(4, 2)
    spec = planned({"emb": tied, "l.0.w": leaf(2), "head": tied}, units=("l.*",))
    assert spec.group_of("emb") is spec.group_of("head") and spec.group_of("emb").layout.size == 8
    with pytest.raises(
        mf.PlanError, match=r"one tensor at 'emb' \(unit ''\) and 'l.0.head' \(unit 'l.0'\); .*one unit"
    ):
        planned({"emb": tied, "l.0.head": tied}, units=("l.*",))
    with pytest.raises(mf.PlanError, match=r"one memory at 'a' and 'b', of which one requires grad"):
        planned({"a": tied, "b": tied.detach()})


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["padded", "unpadded", "auto"])
def test_matrices_start_on_16_byte_boundaries(size: int, layout: str) -> None:
    odd = {"norm": leaf(257), "emb": leaf(50_257, 3), "scale": leaf(), "bias": leaf(7)}
    big = {f"w{i}": leaf(64, 48) for i in range(4)}
    for params in (odd | big, big | odd, {"emb": leaf(50_257, 64)} | big):
        for precision in (None, mf.MixedPrecisionPolicy(compute=torch.bfloat16)):
            spec = planned(params, size, shard_layout=layout, precision=precision)
            group = spec.groups[0]
            starts = {path: group.views[i][0] for i, path in enumerate(group.paths)}
            assert all(starts[name] * group.dtypes.compute.itemsize % 16 == 0 for name in big)
            assert misaligned(group) <= (1 if "norm" in params else 0)  # at most the odd matrix itself


def test_plans_of_many_tensors_are_quick() -> None:
    params = {
        f"l.{i}.{j}": torch.empty(64, 32, device="meta", requires_grad=True) for i in range(100) for j in range(100)
    }
    start = time.perf_counter()
    spec = planned(params, 1024, units=("l.*",))
    seconds = time.perf_counter() - start
    assert len(spec.groups) == 100
    assert seconds < 20  # a guard against quadratic work, far from what it takes


GOOD: dict[str, Any] = {"params": {"w": leaf(2)}, "mesh": abstract(2), "placements": mf.zero3()}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"params": {"w": leaf(2, grad=False)}}, "`params` got 1 tensors of which none requires grad"),
    ({"params": {}}, "`params` got 0 tensors of which none requires grad"),
    ({"params": {"w": 3}}, "`params` got a int at 'w'; expected tensors only"),
    ({"params": {"w": torch.eye(2).to_sparse().requires_grad_()}}, "`params` got a torch.sparse_coo tensor at 'w'"),
    ({"placements": "zero3"}, r"`placements` got 'zero3'; expected Placements; call a preset, such as zero3\(\)"),
    ({"placements": mf.hsdp()}, "`placements.parameter` got 2 placements; expected one for each of the mesh's 1 axes"),
    ({"mesh": mf.AbstractMesh((2, 2), ("a", "b"))}, "`placements.parameter` got 1 placements"),
    ({"mesh": mf.AbstractMesh((0,), ("dp",))}, "`mesh.shape` got"),
    ({"mesh": mf.AbstractMesh((2,), ("a", "b"))}, "`mesh.names` got"),
    ({"mesh": mf.AbstractMesh((2,), ("dp",), 2)}, r"`mesh.rank` got 2; expected a rank in \[0, 2\)"),
    ({"block_size": 0}, "`block_size` got 0; expected a positive integer"),
    ({"block_size": True}, "`block_size` got True"),
    ({"grad_scale": float("nan")}, "`grad_scale` got nan; expected a finite number"),
    ({"grad_scale": "1"}, "`grad_scale` got 1; expected a finite number"),
    ({"shard_layout": "ragged"}, "`shard_layout` got 'ragged'; expected 'padded', 'unpadded', 'auto'"),
    ({"precision": mf.MixedPrecisionPolicy(main=torch.int32)}, "`precision.main` got torch.int32"),
    ({"owners": {"w": 0}}, "`owners` got owners; expected None without a TensorAtomic placement"),
    ({"runtime": mf.RuntimePolicy(keep_gathered=cast(Any, ""))}, "`runtime.keep_gathered` got ''; expected a tuple"),
    ({"runtime": mf.RuntimePolicy(keep_gathered=("l.*",))}, r"`runtime.keep_gathered` got 'l.\*'; expected a pattern"),
    *(
        (
            {"runtime": mf.RuntimePolicy(keep_gathered=("",)), "placements": placements},
            r"`runtime.keep_gathered` got '', whose units \(''?,\) keep whole weights; expected a pattern of units "
            r"that are gathered, as under zero3\(\), hsdp\(\) or hfsdp\(\); leave it out",
        )
        for placements in (mf.ddp(), mf.zero1(), mf.zero2())
    ),
    ({"block_size": 2, "placements": mf.ddp()}, r"`block_size` got 2; expected 1 with the optimizer placements \(Repl"),
    ({"runtime": mf.RuntimePolicy(forward_prefetch=-1)}, "`runtime.forward_prefetch` got -1"),
    ({"runtime": mf.RuntimePolicy(max_inflight_reductions=0)}, "`runtime.max_inflight_reductions` got 0"),
    ({"runtime": mf.RuntimePolicy(prefetch_order=cast(Any, "recorded"))}, "`runtime.prefetch_order` got 'recorded'"),
    ({"placements": mf.Placements((mf.Replicate(),), (mf.Replicate(),), (mf.Replicate(),))}, "`placements.gradient`"),
    ({"placements": mf.Placements((mf.Partial(),), (mf.Partial(),), (mf.Replicate(),))}, "`placements.parameter`"),
    ({"placements": mf.Placements((mf.RowAtomic(),), (mf.Partial(),), (mf.Replicate(),))}, "`placements.parameter`"),
    (
        {"placements": mf.Placements((mf.TensorAtomic(),), (mf.TensorAtomic(),), (mf.TensorAtomic(),))},
        "`owners` got no owner for 'w'",
    ),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_arguments_are_refused_by_name(change: dict[str, Any], text: str) -> None:
    arguments = GOOD | change
    with pytest.raises(mf.PlanError, match=text):
        mf.plan(arguments.pop("params"), arguments.pop("mesh"), arguments.pop("placements"), **arguments)


def other_order(rank: int) -> dict[str, Any]:
    names = ["a", "b", "c"] if rank == 0 else ["a", "c", "b"]
    return {"params": {name: leaf(4, 2) for name in names}}


def other_shape(rank: int) -> dict[str, Any]:
    return {"params": {"a": leaf(4, 2), "b": leaf(4 + (rank == 1), 2)}}


def one_more(rank: int) -> dict[str, Any]:
    return {"params": {"a": leaf(4, 2), **({"z": leaf(1)} if rank == 1 else {})}}


def one_fails(rank: int) -> dict[str, Any]:
    return {"params": {"a": leaf(4, 2), "b": leaf(1) if rank != 1 else "oops"}}


def one_breaks(rank: int) -> dict[str, Any]:
    return {"params": {"a": leaf(4, 2)}, "precision": None if rank != 1 else 7}


def other_scale(rank: int) -> dict[str, Any]:
    return {"params": {"a": leaf(4, 2)}, "grad_scale": 1.0 + rank}


def other_runtime(rank: int) -> dict[str, Any]:
    return {"params": {"a": leaf(4, 2)}, "runtime": mf.RuntimePolicy(max_inflight_reductions=1 + rank)}


DISAGREE: list[tuple[Callable[[int], dict[str, Any]], str]] = [
    (other_order, "rank 0 of the mesh has «leaf 'b': .*», rank 1 has «leaf 'c'"),
    (other_shape, r"«leaf 'b': \(4, 2\) .*», rank 1 has «leaf 'b': \(5, 2\)"),
    (one_more, "rank 1 has «leaf 'z'"),
    (one_fails, "`params` got a str at 'b'|could not be planned on rank 1 of the mesh: `params` got a str at 'b'"),
    (one_breaks, "could not be planned on rank 1|`precision` got 7; expected a MixedPrecisionPolicy"),
    (other_scale, "grad_scale=1.0.*grad_scale=2.0"),
    (other_runtime, "max_inflight_reductions=1.*max_inflight_reductions=2"),
]


def disagree(rank: int, world: int) -> None:
    """Every rank raises, and the mesh works afterwards."""
    shapes = [(world,)] + ([(2, 2), (1, 4)] if world == 4 else [])
    for shape in shapes:
        placements = mf.zero3() if len(shape) == 1 else mf.hsdp()
        for case, text in DISAGREE:
            arguments = case(rank)
            with pytest.raises((mf.PlanError, TypeError), match=text):
                mf.plan(arguments.pop("params"), mesh_of(*shape), placements, **arguments)
        mf.plan({"a": leaf(3)}, mesh_of(*shape), placements)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_that_disagree_all_hear_about_it(world: int) -> None:
    run_ranks(world, disagree)


def same_on_every_rank(rank: int, world: int) -> tuple[str, int]:
    groups = [mf.plan(mixed(), mesh_of(world), mf.zero3()).groups[0].axes[0].reduce_group for _ in range(3)]
    return mf.plan(mixed(), mesh_of(world), mf.zero3()).digest(), len(set(groups))


def test_one_digest_and_one_communicator() -> None:
    answers = run_ranks(3, same_on_every_rank)
    assert set(answers) == {answers[0]} and answers[0][1] == 1
    assert answers[0][0] == mf.plan(mixed(), mf.AbstractMesh((3,), ("inner",)), mf.zero3()).digest()


def test_requires_grad_flipped_after_planning_is_refused() -> None:
    params = {"a": leaf(2), "b": leaf(2)}
    spec = planned(params)
    params["b"].requires_grad_(False)
    with pytest.raises(mf.StateError, match=r"`params` got requires_grad=False at 'b'; expected True.*plan again"):
        mf.shard(params, spec)
