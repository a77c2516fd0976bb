"""Experts on a data-parallel mesh of their own, beside dense parameters: the full batch on one rank, bit for bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

import experts
import mfsdp_fn as mf
from counting import Counting
from experts import UNITS, made, part, whole
from models import (
    EXACT,
    PRESETS,
    accumulated,
    assert_equal,
    batch_of,
    mesh_of,
    plain_grads,
    plain_training,
    sgd,
    trainable,
)
from pool import run_ranks

# Placements of dense units over a mesh, and of experts.
MIXES = [
    ("zero3", "zero3", 1),
    ("zero1", "zero1", 1),
    ("zero2", "zero2", 1),
    ("hsdp", "zero3", 2),
    ("hfsdp", "zero1", 2),
    ("ddp", "zero3", 1),
    ("zero3", "ddp", 1),
]


def train(rank: int, world: int, ep: int, mixes: list[tuple[str, str, int]]) -> None:
    expected = plain_training(whole(), world, steps=3, micros=2, loss=experts.plain_loss)
    for number, (dense, on_experts, axes) in enumerate(mixes):
        shape = (world,) if axes == 1 else (2, world // 2)
        options: dict[str, Any] = {"shard_layout": "unpadded"} if number % 2 else {}
        state, group = made(PRESETS[dense], PRESETS[on_experts], shape, ep, **options)
        for step in range(3):
            batches: list[Any] = [batch_of(step, micro, rank) for micro in range(2)]
            state = sgd(state, accumulated(experts.sharded_loss, state, batches, float(world), group))
        place = experts.expert_mesh(ep, world // ep).get_local_rank("ep")
        assert_equal(mf.unshard(state), part(expected, place, ep), (dense, on_experts, ep))


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (4, 1)])
def test_training_equals_the_full_batch(world: int, ep: int) -> None:
    mixes = [mix for mix in MIXES if world > 1 or mix[2] == 1]
    run_ranks(world, train, ep, mixes if (world, ep) == (4, 2) else mixes[::3])


def train_on_two_axes(rank: int, world: int) -> None:
    """Experts replicated over one axis and sharded over another."""
    expected = plain_training(whole(), world, steps=3, micros=2, loss=experts.plain_loss)
    for dense, on_experts, edp in [(mf.zero2, mf.hsdp, (2, 1)), (mf.ddp, mf.hfsdp, (1, 2))]:
        state, group = made(dense, on_experts, (world,), 2, edp)
        for step in range(3):
            batches: list[Any] = [batch_of(step, micro, rank) for micro in range(2)]
            state = sgd(state, accumulated(experts.sharded_loss, state, batches, float(world), group))
        assert_equal(mf.unshard(state), part(expected, rank // 2, 2), on_experts)
        grads = mf.tree_map(torch.ones_like, mf.zeros_like(state))
        count = sum(value.numel() for value in whole().values())
        torch.testing.assert_close(mf.optim.global_norm(grads) ** 2, torch.tensor(float(count), dtype=torch.float64))


def test_experts_on_two_axes() -> None:
    run_ranks(4, train_on_two_axes)


def counted(rank: int, world: int) -> list[tuple[str, int]]:
    """A step's launches; only experts' units use the experts' communicators."""
    state, group = made(mf.hsdp, mf.zero3, (2, 2), 2)
    dense, own = state.spec.groups[0].axes, state.spec.group_of("blocks.0.experts.w").axes
    grads = None
    for last in (False, True):
        with Counting() as counting:
            transformed = mf.value_and_grad(experts.sharded_loss, is_last_microbatch=last, accumulate=grads)
            _, grads = transformed(state, batch_of(0, int(last), rank), 1.0, group)
        assert not counting.unwaited()
        for axes, units in ((dense, 3), (own, 2)):
            assert counting.count("gather", axes[-1].gather_group) == 2 * units
            assert counting.count("scatter", axes[-1].reduce_group) == units
        assert counting.count("all_reduce", dense[0].reduce_group) == 3 * last
        assert counting.count("all_to_all", group) == 8
        assert len(counting.launches()) == 10 + 5 + 8 + 3 * last
    return [(kind, sent) for kind, _, sent in counting.launches()]


def test_counts_are_those_of_each_mesh_and_the_order_is_one() -> None:
    first, *others = run_ranks(4, counted)
    assert all(other == first for other in others)


def norms(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    full = plain_grads(
        whole(), [lambda p, r=r: experts.plain_loss(p, batch_of(0, 0, r), 1.0) for r in range(world)], world
    )
    flat = torch.cat([grad.reshape(-1) for grad in full.values()])
    for (dense, on_experts, axes), ep in [*((mix, 2) for mix in MIXES), (MIXES[0], 4), (MIXES[3], 1)]:
        state, group = made(PRESETS[dense], PRESETS[on_experts], (world,) if axes == 1 else (2, 2), ep)
        _, grads = mf.value_and_grad(experts.sharded_loss)(state, batch_of(0, 0, rank), 1.0, group)
        for norm_type in (1.0, 2.0, math.inf):
            norm = mf.optim.global_norm(grads, norm_type)
            torch.testing.assert_close(
                norm, torch.linalg.vector_norm(flat, norm_type), rtol=1e-12, atol=0, msg=f"{dense} {on_experts}"
            )
            found.append(norm)
        clipped, norm = mf.optim.clip_by_global_norm(grads, 1.0)
        factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        place = experts.expert_mesh(ep, world // ep).get_local_rank("ep")
        wanted = {name: grad * factor for name, grad in part(full, place, ep).items()}
        assert_equal(mf.unshard(clipped), wanted, (dense, on_experts))
    return found


def test_the_norm_counts_every_expert_once() -> None:
    answers = run_ranks(4, norms)
    assert all(torch.equal(torch.stack(found), torch.stack(answers[0])) for found in answers)


def seeds_of_their_own(rank: int, world: int) -> None:
    """Replicas are made equal; experts of other cells are other experts."""
    mesh = experts.expert_mesh(2, 2)
    params = trainable({"w": torch.full((4, 2), float(rank)), "experts.w": torch.full((4, 2), 10.0 + rank)})
    for on_experts, expected in ((mf.ddp, 10.0 + rank - rank % 2), (mf.zero3, None)):
        spec = mf.plan(
            params, {"": mesh_of(2, 2), "experts": mesh["edp"]}, {"": mf.hsdp(), "experts": on_experts()},
            units=("experts",),
        )  # fmt: skip
        found = mf.unshard(mf.shard(params, spec))
        assert found["w"][0, 0] == 0 and found["w"][2, 0] == 1  # rows of the first replica's ranks
        if expected is None:
            assert found["experts.w"][:, 0].tolist() == [10.0 + rank - rank % 2] * 2 + [11.0 + rank - rank % 2] * 2
        else:
            assert torch.equal(found["experts.w"], torch.full((4, 2), expected))


def test_replicas_start_equal_and_cells_stay_different() -> None:
    run_ranks(4, seeds_of_their_own)


def stepped(rank: int, world: int) -> None:
    """Optimizers against themselves on whole parameters, one rank."""
    makers = {
        "adamw": lambda: mf.optim.adamw(lr=0.1),
        "sgd": lambda: mf.optim.sgd(lr=0.1, momentum=0.5),
        "muon": lambda: mf.optim.muon(lr=0.1, exclude=("b",), fallback=mf.optim.adamw(lr=0.1)),
        "muon2": lambda: mf.optim.muon(lr=0.1, exclude=("embed", "b"), fallback=mf.optim.sgd(lr=0.1), buckets=3),
    }
    params = whole()
    alone = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3(), units=UNITS, precision=EXACT)
    for (dense, on_experts, axes), name in itertools.product((MIXES[0], MIXES[1], MIXES[3]), makers):
        state, group = made(PRESETS[dense], PRESETS[on_experts], (world,) if axes == 1 else (2, 2), 2)
        optimizer = makers[name]()
        reference, expected = mf.shard(params, alone), None
        opt_state, ref_state = optimizer.init(state), optimizer.init(reference)
        for step in range(2):
            _, grads = mf.value_and_grad(experts.sharded_loss)(state, batch_of(step, 0, rank), 1.0, group)
            full = plain_grads(
                mf.unshard(reference),
                [lambda p, s=step, r=r: experts.plain_loss(p, batch_of(s, 0, r)) for r in range(world)],
                world,
            )
            # Rounded weights make sums that depend on their order: both go on from one gradient.
            whole_grads = mf.reduce(full, alone)
            mine = part(full, experts.expert_mesh(2, 2).get_local_rank("ep"), 2)
            assert_close(mf.unshard(grads), mine)
            grads = mf.reduce({n: g * (2 if "experts" in n else 1) for n, g in mine.items()}, state.spec)
            grads = mf.finish_grad_sync(grads)
            state, opt_state = optimizer.step(grads, opt_state, state, donate=step == 1)
            reference, ref_state = optimizer.step(whole_grads, ref_state, reference)
        expected = part(mf.unshard(reference), experts.expert_mesh(2, 2).get_local_rank("ep"), 2)
        assert_equal(mf.unshard(state), expected, (dense, on_experts, name))


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def test_optimizers_equal_those_of_the_whole_model() -> None:
    run_ranks(4, stepped)


def owners(rank: int, world: int) -> list[Any]:
    state, _ = made(mf.zero3, mf.zero3, (world,), 2, shard_layout="unpadded")
    planned = mf.plan_owners(state.spec)
    doubled = mf.owner_map(lambda full: full * 2 + full.sum(), buckets=2)(state, planned)
    for name, value in part(whole(), rank // 2, 2).items():
        wanted = value * 2 + value.sum() if value.ndim > 1 else value
        assert torch.equal(mf.unshard(doubled)[name], wanted), name
    shards = {
        group: {i: state.main[group.number].narrow(0, *layout.spots[i]) for i in layout.mine}
        for group, layout in planned.items()
    }
    with Counting() as counting:
        fulls = mf.gather_to_owner(shards, planned)
        back = mf.scatter_from_owner(fulls, planned)
    assert counting.count("all_to_all") == 4  # each way one over the dense ranks, one over the experts'
    for group, layout in planned.items():
        for index in layout.mine:
            assert torch.equal(back[group][index].reshape(-1), shards[group][index])
    return [
        (group.unit, layout.tensor_to_owner) for group, layout in planned.items() if not group.unit.endswith("experts")
    ]


def test_owners_are_agreed_on_where_they_are_shared() -> None:
    first, *others = run_ranks(4, owners)
    assert all(other == first for other in others)


def as_dtensors(rank: int, world: int) -> None:
    state, _ = made(mf.hsdp, mf.zero3, (2, 2), 2, shard_layout="unpadded")
    for name, value in part(whole(), rank // 2, 2).items():
        found = mf.to_dtensors(state)[name]
        mine = distribute_tensor(value, found.device_mesh, found.placements, src_data_rank=None)
        assert torch.equal(found.to_local(), mine.to_local()), name
        assert found.device_mesh.ndim == (1 if "experts" in name else 2)


def test_dtensors_lie_on_their_own_mesh() -> None:
    run_ranks(4, as_dtensors)


def policies(rank: int, world: int) -> None:
    expected = None
    for runtime in (
        mf.RuntimePolicy(),
        mf.RuntimePolicy(prefetch_order=mf.PrefetchOrder.RECORDED),
        mf.RuntimePolicy(forward_prefetch=1000, backward_prefetch=0, max_inflight_reductions=3),
        mf.RuntimePolicy(overlap_allgather_reduction=False, keep_gathered=("blocks.*.experts",)),
    ):
        state, group = made(mf.hsdp, mf.zero3, (2, 2), 2, runtime=runtime)
        transformed = mf.value_and_grad(experts.sharded_loss)
        transformed(state, batch_of(0, 0, rank), 1.0, group)
        _, grads = transformed(state, batch_of(0, 0, rank), 1.0, group)
        expected = expected or mf.unshard(grads)
        assert_equal(mf.unshard(grads), expected, runtime)


def test_policies_change_no_result() -> None:
    run_ranks(4, policies)
