"""`DBuffer`: every transition gives what sharding the values anew gives, with just the collectives it must have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import optree
import pytest
import torch
from torch.utils import _pytree as torch_pytree

import mfsdp_fn as mf
from counting import Counting
from mfsdp_fn.buffer import segment
from models import EXACT, bilinear, integers, mesh_of
from pool import run_ranks

R, P, S = mf.Replicate(), mf.Partial(), mf.RowAtomic()
SHAPES = [(5, 3), (), (4,), (0, 2), (7, 2), (1, 6)]
KINDS: dict[str, mf.RowAtomic | mf.TensorAtomic] = {
    "padded": S,
    "unpadded": S,
    "blocks": mf.BlockAtomic(2),
    "tensors": mf.TensorAtomic(),
}


def layouts(shards: int) -> dict[str, mf.GlobalLayout]:
    """Four layouts of `SHAPES`; in the last one the last shard owns nothing."""
    owners = [(number + 1) % max(1, shards - 1) for number in range(len(SHAPES))]
    return {
        "padded": mf.build_for_row_atomic(SHAPES, shards),
        "unpadded": mf.build_for_row_atomic_unpadding(SHAPES, shards),
        "blocks": mf.build_for_row_atomic_unpadding(SHAPES, shards, block_size=2),
        "tensors": mf.build_for_tensor_atomic(SHAPES, shards, tensor_owners=owners),
    }


def values(rank: int = 0) -> list[torch.Tensor]:
    return [integers(*shape, seed=10 * rank + number, high=9) for number, shape in enumerate(SHAPES)]


def flat(tensors: Sequence[torch.Tensor], layout: mf.GlobalLayout) -> torch.Tensor:
    """The whole buffer; padding is zero."""
    whole = torch.zeros(layout.size, dtype=tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        span = layout.tensor_range(index)
        whole[span.start : span.stop] = tensor.reshape(-1)
    return whole


def owner_of(layout: mf.GlobalLayout) -> list[list[int]]:
    """For each tensor, the shard of every element."""
    shard = [rank for rank in range(layout.dp_size) for _ in range(layout.rank_range(rank).size)]
    spans = [layout.tensor_range(index) for index in range(len(SHAPES))]
    return [shard[span.start : span.stop] for span in spans]


def summands(placements: Sequence[mf.Placement], mesh: Any) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """This rank's values, and those of all ranks that differ from it along Partial axes only."""
    here = mesh.get_coordinate()
    partial = [isinstance(p, mf.Partial) for p in placements]

    def number(place: Sequence[int]) -> int:
        return sum(7**axis * rank for axis, rank in enumerate(place) if partial[axis])

    places = itertools.product(*(range(n) if p else [0] for n, p in zip(mesh.shape, partial, strict=True)))
    return values(number(here)), [values(number(place)) for place in places]


def total(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(list(same)).sum(0) for same in zip(*parts, strict=True)]


def one_axis(rank: int, world: int) -> None:
    mesh, made = mesh_of(world), layouts(world)
    for number, old, new in itertools.product(range(len(made)), "RPS", "RPS"):
        (name, layout), *others = [*made.items(), *made.items()][number : number + 2]
        for target_name, target in ((name, layout), *others):
            if new == "P" != old:
                continue
            kind = {"R": R, "P": P}
            before, after = kind.get(old, KINDS[name]), kind.get(new, KINDS[target_name])
            mine, everyone = summands([before], mesh)
            buffer = mf.DBuffer.from_tensors(mine, layout, mesh, [before])
            with Counting() as counting:
                got = buffer.redistribute([after], layout=target)
            what = (name, old, target_name, new)
            wanted = flat(mine if new == "P" else total(everyone), target)
            held = segment(target, (after,), buffer.axes)
            assert torch.equal(got.local, wanted[held.start : held.stop]), what
            assert (got.layout, got.placements, got.held) == (target, (after,), held)
            expected = {("S", "R"): "gather", ("P", "S"): "scatter", ("P", "R"): "all_reduce"}.get((old, new))
            if old == new == "S" and owner_of(layout) != owner_of(target):
                expected = "all_to_all"
            assert counting.counts() == ({expected: 1} if expected and world > 1 else {}), what
            if expected == "all_to_all":  # only what changes its rank, from tensors without padding
                pairs = [list(zip(*both, strict=True)) for both in zip(owner_of(layout), owner_of(target), strict=True)]
                leaving = sum(was == rank != now for tensor in pairs for was, now in tensor)
                assert counting.events[0].sent == leaving * 8, what
            assert counting.unwaited() == 0
            for index, full in enumerate(got.full_tensors()):
                assert torch.equal(full, total(everyone)[index]), what
                if new == "S":
                    assert got.get_tensor_view(index).shape[1:] == full.shape[1:]
                    assert got.get_tensor_view(index).numel() == owner_of(target)[index].count(rank)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_transition_on_one_axis(world: int) -> None:
    run_ranks(world, one_axis)


def two_axes(rank: int, world: int, shapes: Sequence[tuple[int, int]]) -> None:
    steps = [(R, R), (R, S), (S, R), (S, S), (P, R), (P, S), (P, P)]
    for shape, outer, inner in itertools.product(shapes, steps, steps):
        mesh, made = mesh_of(*shape), layouts(world)
        old, new = (outer[0], inner[0]), (outer[1], inner[1])
        mine, everyone = summands(old, mesh)
        stay = [i for i in range(2) if isinstance(new[i], mf.Partial)]
        here = mesh.get_coordinate() or ()
        # What is still Partial afterwards was summed over the other axis only.
        left = [P if i not in stay and isinstance(old[i], mf.Partial) else R for i in range(2)]
        if stay and any(isinstance(p, mf.Partial) for p in left):
            places = [[*here] for _ in range(shape[1 - stay[0]])]
            for number, place in enumerate(places):
                place[1 - stay[0]] = number
            everyone = [values(sum(7**axis * r for axis, r in enumerate(place))) for place in places]
        elif stay:
            everyone = [mine]
        for name, target in (("unpadded", made["unpadded"]), ("tensors", made["tensors"])):
            buffer = mf.DBuffer.from_tensors(mine, made["unpadded"], mesh, old)
            after = tuple(KINDS[name] if p is S else p for p in new)
            got = buffer.redistribute(after, layout=target)
            held = segment(target, after, buffer.axes)
            wanted = flat(total(everyone), target)[held.start : held.stop]
            assert torch.equal(got.local, wanted), (shape, old, new, name)


@pytest.mark.parametrize("shapes", [((2, 1), (1, 2)), ((2, 2), (4, 1), (1, 4))], ids=["2", "4"])
def test_every_transition_on_two_axes(shapes: Any) -> None:
    run_ranks(shapes[0][0] * shapes[0][1], two_axes, shapes)


STEPS: list[tuple[str, str, list[str]]] = [
    ("RS", "RR", ["gather inner"]),
    ("SS", "RR", ["gather outer", "gather inner"]),
    ("SS", "RS", ["gather outer"]),
    ("RS", "SS", []),
    ("RR", "SS", []),
    ("PP", "SS", ["scatter inner", "scatter outer"]),
    ("PP", "RS", ["scatter inner", "all_reduce outer"]),
    ("PS", "SS", ["scatter outer"]),
    ("PS", "RS", ["all_reduce outer"]),
    ("PP", "RR", ["all_reduce inner", "all_reduce outer"]),
    ("PP", "PS", ["scatter inner"]),
    # The outer axis is sharded inside the inner one, so it can't stay when the inner one begins or ends.
    ("SR", "SS", ["gather outer"]),
    ("SS", "SR", ["gather outer", "gather inner"]),
    ("SP", "SS", ["gather outer", "scatter inner"]),
]


def in_order(rank: int, world: int) -> None:
    mesh, layout = mesh_of(2, 2), mf.build_for_row_atomic([(8, 2)], 4)
    kinds = {"R": R, "P": P, "S": S}
    for old, new, steps in STEPS:
        before, after = [kinds[c] for c in old], [kinds[c] for c in new]
        buffer = mf.DBuffer.from_tensors([torch.ones(8, 2)], layout, mesh, before)
        names = {}
        for axis, place in zip(buffer.axes, ("outer", "inner"), strict=True):
            names |= {axis.gather_group: place, axis.reduce_group: place}
        with Counting() as counting:
            buffer.redistribute(after)
        assert [f"{event.kind} {names[event.group]}" for event in counting.events] == steps, (old, new)
        assert counting.unwaited() == 0


def test_steps_come_in_the_documented_order() -> None:
    run_ranks(4, in_order)


def casts(rank: int, world: int) -> None:
    mesh, layout = mesh_of(world), mf.build_for_row_atomic([(8, 2)], 2)
    tensor = torch.arange(16.0).view(8, 2)

    def sent(old: mf.Placement, new: mf.Placement, dtype: torch.dtype, to: torch.dtype) -> int:
        buffer = mf.DBuffer.from_tensors([tensor], layout, mesh, [old], dtype=dtype)
        with Counting() as counting:
            got = buffer.redistribute([new], dtype=to)
        assert got.local.dtype == to
        assert torch.equal(got.full_tensors()[0], (tensor * (2 if old == P else 1)).to(to))
        return sum(event.sent for event in counting.events)

    f32, bf16 = torch.float32, torch.bfloat16
    assert (sent(S, R, f32, bf16), sent(S, R, bf16, f32), sent(S, R, f32, f32)) == (16, 16, 32)
    assert (sent(P, S, f32, bf16), sent(P, S, bf16, f32)) == (64, 32)  # summed as it is
    assert (sent(R, R, f32, bf16), sent(R, S, f32, bf16)) == (0, 0)
    whole = mf.DBuffer.from_tensors([tensor], layout, mesh, [R])
    assert whole.redistribute([R]).local is whole.local
    assert whole.redistribute([S]).local.untyped_storage().nbytes() == 32  # not a view of the whole
    # Any dtype is exchanged, those that no backend sums too.
    owned = mf.build_for_tensor_atomic([(8, 2)], 2, tensor_owners=[1])
    for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn, torch.bfloat16):
        rows = mf.DBuffer.from_tensors([tensor], layout, mesh, [S], dtype=dtype)
        moved = rows.redistribute([mf.TensorAtomic()], layout=owned)
        assert moved.local.dtype == dtype and moved.local.numel() == 16 * rank
        back = moved.redistribute([S], layout=layout)
        assert torch.equal(back.local.view(torch.uint8), rows.local.view(torch.uint8))


def test_casts_come_where_fewer_bytes_travel_but_not_before_sums() -> None:
    run_ranks(2, casts)


def of_states(rank: int, world: int) -> None:
    params = bilinear(2)
    policy = mf.MixedPrecisionPolicy(compute=torch.bfloat16, main=None)
    spec = mf.plan(params, mesh_of(2, 2), mf.hfsdp(), units=("blocks.*",), precision=policy)
    state = mf.shard(params, spec)
    group = spec.group_of("blocks.1.w")
    main = mf.DBuffer.from_state(state, group)
    assert main.local is state.main[group.number] and main.placements == spec.placements.optimizer
    for path, value in zip(group.paths, main.full_tensors(), strict=True):
        assert torch.equal(value, params[path])
    compute = mf.DBuffer.from_state(state, group, compute=True)
    assert compute.local.dtype == torch.bfloat16 and compute.placements == spec.placements.parameter
    # What sync_model_weights does is this redistribution.
    again = main.redistribute(compute.placements, dtype=torch.bfloat16)
    assert torch.equal(again.local, compute.local)
    ones = {path: torch.ones_like(value) for path, value in params.items()}
    grads = mf.reduce(ones, spec, is_last_microbatch=False)
    waiting = mf.DBuffer.from_state(grads, group)
    assert waiting.placements == spec.placements.gradient
    finished = waiting.redistribute(spec.placements.optimizer)
    assert torch.equal(finished.local, mf.finish_grad_sync(grads).main[group.number])


def test_buffers_of_states() -> None:
    run_ranks(4, of_states)


def abstract(ranks: int = 2, placement: mf.Placement = R) -> mf.DBuffer:
    mesh = mf.AbstractMesh((ranks,), ("dp",), rank=ranks - 1)
    layout = mf.build_for_row_atomic([(3, 2), (2,)], ranks)
    return mf.DBuffer.from_tensors([torch.ones(3, 2), torch.ones(2)], layout, mesh, [placement])


def test_a_buffer_is_a_tree() -> None:
    buffer, other = abstract(), abstract(placement=S)
    doubled: Any = optree.tree_map(lambda leaf: leaf * 2, cast(Any, buffer))
    assert isinstance(doubled, mf.DBuffer) and torch.equal(doubled.local, buffer.local * 2)
    assert (doubled.layout, doubled.placements) == (buffer.layout, buffer.placements)
    leaves, spec = torch_pytree.tree_flatten(buffer)
    assert len(leaves) == 1 and leaves[0] is buffer.local
    assert torch_pytree.tree_unflatten(leaves, spec).local is buffer.local
    with pytest.raises(ValueError):
        optree.tree_map(torch.add, cast(Any, buffer), cast(Any, other))


def test_views_write_through_and_tensors_without_elements_have_their_shape() -> None:
    mesh = mf.AbstractMesh((1,), ("dp",))
    layout = mf.build_for_row_atomic([(2, 2), (0, 3), (3, 0), ()], 1)
    tensors = [torch.ones(2, 2), torch.ones(0, 3), torch.ones(3, 0), torch.tensor(5.0)]
    whole = mf.DBuffer.from_tensors(tensors, layout, mesh, [R])
    assert [tuple(view.shape) for view in whole.full_tensors()] == [(2, 2), (0, 3), (3, 0), ()]
    whole.get_tensor_view(0).zero_()
    assert whole.local.tolist()[:4] == [0.0] * 4
    part = whole.redistribute([S])
    assert [tuple(part.get_tensor_view(i).shape) for i in range(4)] == [(2, 2), (0, 3), (0, 0), ()]


def refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_refusals() -> None:
    buffer, part = abstract(), abstract(placement=S)
    layout, mesh = buffer.layout, buffer.mesh
    for old in (buffer, part):
        text = r"`placements` got Partial\(\) on axis 0, which is .*; expected Partial only where the buffer is Partial"
        refused(lambda old=old: old.redistribute([P]), mf.StateError, text)
    text = r"`placements` got a sum of torch.bool; expected a dtype that backends add; cast it first"
    refused(lambda: abstract(placement=P).redistribute([P], dtype=torch.bool).redistribute([R]), mf.StateError, text)
    text = r"`placements` got \[.*\]; expected one placement for each of 1 axes"
    refused(lambda: buffer.redistribute([R, R]), mf.StateError, text)
    text = r"`placements` got RowAtomic on axis 0; expected a placement; write Replicate\(\)"
    refused(lambda: buffer.redistribute([cast(Any, mf.RowAtomic)]), mf.PlanError, text)
    text = r"`layout` got tensor 0 at \[0, 6\) on ranks \[0, 1\]; expected whole tensors .*build_for_tensor_atomic"
    refused(lambda: buffer.redistribute([mf.TensorAtomic()]), mf.LayoutError, text)
    text = r"`layout` got tensors \[\(3, 2\)\]; expected \[\(3, 2\), \(2,\)\]"
    refused(lambda: buffer.redistribute([R], layout=mf.build_for_row_atomic([(3, 2)], 2)), mf.LayoutError, text)
    text = r"`layout` got 3 ranks; expected a multiple of the 2 shards"
    three = mf.build_for_row_atomic([(3, 2), (2,)], 3)
    refused(lambda: buffer.redistribute([S], layout=three), mf.LayoutError, text)
    text = r"`layout` got a rank boundary at 2, inside a block of 2 rows"
    single = mf.build_for_row_atomic_unpadding([(2, 2)], 2)
    refused(
        lambda: mf.DBuffer.from_tensors([torch.ones(2, 2)], single, mesh, [mf.BlockAtomic(2)]), mf.LayoutError, text
    )
    text = r"`mesh` got an AbstractMesh; expected a DeviceMesh to all-gather over"
    refused(lambda: part.full_tensors(), mf.StateError, text)
    text = r"`tensors` got shapes \['1', '2'\]; expected"
    refused(lambda: mf.DBuffer.from_tensors(cast(Any, [1, 2]), layout, mesh, [R]), mf.StateError, text)
    text = r"`tensors` got shapes \[\(2,\)\]; expected \[\(3, 2\), \(2,\)\]"
    refused(lambda: mf.DBuffer.from_tensors([torch.ones(2)], layout, mesh, [R]), mf.StateError, text)
    both = [torch.ones(3, 2), torch.ones(2).double()]
    text = r"`tensors` got dtypes \['torch.float32', 'torch.float64'\]; expected one dtype; pass the buffer's `dtype`"
    refused(lambda: mf.DBuffer.from_tensors(both, layout, mesh, [R]), mf.StateError, text)
    meta = [torch.ones(3, 2, device="meta"), torch.ones(2)]
    refused(lambda: mf.DBuffer.from_tensors(meta, layout, mesh, [R]), mf.StateError, "`tensors` got a meta tensor")
    text = r"`local` got \(3,\); expected \(4,\), this rank's part"
    refused(lambda: mf.DBuffer.from_local(torch.ones(3), layout, mesh, [S]), mf.StateError, text)
    params = {"w": torch.ones(2, 2, requires_grad=True), "f": torch.ones(2)}
    state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), precision=EXACT))
    other = mf.plan({"v": params["w"]}, mf.AbstractMesh((1,), ("dp",)), mf.zero3())
    text = r"`group` got .*; expected a group of the state's plan"
    refused(lambda: mf.DBuffer.from_state(state, other.groups[0]), mf.StateError, text)
    refused(lambda: mf.DBuffer.from_state(state, cast(Any, "w")), mf.StateError, text)
    text = r"`group` got .*, frozen; expected a group that the state holds"
    frozen = state.spec.group_of("f")
    refused(lambda: mf.DBuffer.from_state(mf.zeros_like(state), frozen), mf.StateError, text)
