"""Owner assignment and exchange plans: the seed's worked example, the greedy rule, and how even loads get."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_fn as mf
from mfsdp_fn import owner_balance
from mfsdp_fn.owner_planning import (
    GroupOwnerLayout,
    OwnerGatherPlan,
    OwnerScatterPlan,
    assign_owner_work,
    ns_cost_fn,
    owner_loads,
    plan_owners,
    select_ge_2d_params,
)
from model_shapes import DENSE
from owner_bounds import lower_bound
from pool import run_ranks


def mesh(size: int, rank: int = 0) -> mf.AbstractMesh:
    return mf.AbstractMesh((size,), ("dp",), rank=rank)


def test_costs_and_selection() -> None:
    cost = ns_cost_fn(5)
    assert cost(torch.Size([6, 4])) == 24 * (4 * 5 + 1) and cost(torch.Size([4, 6])) == cost(torch.Size([6, 4]))
    assert cost(torch.Size([4, 3, 2])) == 24 * (4 * 5 + 1)
    assert cost(torch.Size([0, 3])) == 0 and cost(torch.Size([])) == 6
    assert [select_ge_2d_params(torch.empty(shape)) for shape in ((), (3,), (3, 1), (1, 2, 3))] == [False] * 2 + [
        True
    ] * 2
    with pytest.raises(mf.PlanError, match=r"`num_ns_steps` got 0; expected a positive integer"):
        ns_cost_fn(0)


LAYOUT = mf.build_for_row_atomic([(6, 4), (4, 4)], 2)
PARAM_0, PARAM_1 = torch.arange(24.0).view(6, 4), torch.arange(100.0, 116.0).view(4, 4)


def test_seed_example_from_rank_0() -> None:
    assert (LAYOUT.tensor_to_offset, LAYOUT.size) == ((0, 24), 40)
    owners = GroupOwnerLayout(mesh(2, 0), LAYOUT, {0: 1, 1: 1})
    plan = OwnerGatherPlan.pack(owners, {0: PARAM_0[:5], 1: PARAM_1[:0]})
    assert plan.layout is LAYOUT and plan.this_rank == 0
    assert plan.rank_ranges == {0: mf.Range(0, 20), 1: mf.Range(20, 40)}
    assert list(plan.send_buffers) == [1] and torch.equal(plan.send_buffers[1], torch.arange(20.0))
    assert (plan.recv_sizes, plan.own_shards, plan.recv_offsets) == ({}, {}, {})
    back = OwnerScatterPlan.pack(owners, {})
    assert (back.send_buffers, back.recv_sizes, back.recv_offsets) == ({}, {1: 20}, {(0, 1): 0})
    assert back.local_range == mf.Range(0, 20)
    assert torch.equal(back.unpack({1: torch.arange(20.0)})[0], torch.arange(20.0))


def test_seed_example_from_rank_1() -> None:
    owners = GroupOwnerLayout(mesh(2, 1), LAYOUT, {0: 1, 1: 1})
    plan = OwnerGatherPlan.pack(owners, {0: PARAM_0[5:], 1: PARAM_1})
    assert plan.send_buffers == {} and plan.recv_sizes == {0: 20} and plan.recv_offsets == {(0, 0): 0}
    assert list(plan.own_shards) == [0, 1]
    assert torch.equal(plan.own_shards[0], PARAM_0[5]) and plan.own_shards[0].data_ptr() == PARAM_0[5:].data_ptr()
    assert torch.equal(plan.own_shards[1], PARAM_1.view(-1))
    received = {0: torch.arange(20.0)}
    assert torch.equal(plan.reconstruct_full(0, received).view(6, 4), PARAM_0)
    assert plan.reconstruct_full(1, received).data_ptr() == PARAM_1.data_ptr()  # fully local: not a copy
    back = OwnerScatterPlan.pack(owners, {0: PARAM_0, 1: PARAM_1})
    assert list(back.send_buffers) == [0] and torch.equal(back.send_buffers[0], torch.arange(20.0))
    assert (back.recv_sizes, back.recv_offsets, back.unpack({})) == ({}, {}, {})


def test_the_greedy_rule() -> None:
    # Rank 0 holds [0, 6), rank 1 [6, 12), rank 2 [12, 18).
    shapes = [(4, 1), (4, 1), (2, 1), (4, 1), (4, 1)]
    layout = mf.build_for_row_atomic_unpadding(shapes, 3)
    by_shape = {torch.Size([4, 1]): 3.0, torch.Size([2, 1]): 1.0}
    # Single holders: 0 -> rank 0, 2 -> rank 1, 4 -> rank 2. Then 1 (0 or 1) and 3 (1 or 2): rank 1 has least, twice.
    assert [list(layout.ranks_of(i)) for i in range(5)] == [[0], [0, 1], [1], [1, 2], [2]]
    assert assign_owner_work(layout, mesh(3), range(5), lambda s: by_shape[s]) == {0: 0, 1: 1, 2: 1, 3: 2, 4: 2}
    # Equal loads: the first holder in buffer order.
    assert assign_owner_work(layout, mesh(3), [1, 3], lambda s: 1.0) == {1: 0, 3: 1}
    assert assign_owner_work(layout, mesh(3), [1], lambda s: 1.0, initial_loads={0: 5.0}) == {1: 1}
    assert owner_loads(layout, {1: 1, 3: 1}, lambda s: 2.0, initial_loads={0: 1.0}) == {0: 1.0, 1: 4.0}
    # A dearer tensor first, whatever its place: then the cheaper one finds rank 1 free.
    layout = mf.build_for_row_atomic_unpadding([(2, 1), (4, 1), (4, 2)], 3)
    assert [list(layout.ranks_of(i)) for i in range(3)] == [[0], [0, 1], [1, 2]]
    assert assign_owner_work(layout, mesh(3), [1, 2], lambda s: float(s.numel())) == {1: 0, 2: 1}


def test_what_is_held_by_nobody_is_owned_by_nobody() -> None:
    layout = mf.build_for_row_atomic_unpadding([(0, 4), (1, 5), (5, 1)], 2)
    assert set(assign_owner_work(layout, mesh(2), range(3))) == {1, 2}
    assert GroupOwnerLayout(mesh(2), layout, {0: 1}).traffic() == {}


def test_errors_name_the_argument() -> None:
    with pytest.raises(mf.PlanError, match=r"`tensor_to_owner` got owner 0 for tensor 1; expected .* \[1\]"):
        GroupOwnerLayout(mesh(2), LAYOUT, {1: 0})
    with pytest.raises(mf.PlanError, match=r"`tensor_to_owner` got tensor 2"):
        GroupOwnerLayout(mesh(2), LAYOUT, {2: 0})
    with pytest.raises(mf.PlanError, match=r"`mesh` got 3 ranks .* the layout's 2"):
        GroupOwnerLayout(mesh(3), LAYOUT, {})
    with pytest.raises(mf.PlanError, match=r"`cost_fn` got 0 for shape \(6, 4\)"):
        assign_owner_work(LAYOUT, mesh(2), [0], lambda shape: 0)
    owners = GroupOwnerLayout(mesh(2), LAYOUT, {0: 1, 1: 1})
    with pytest.raises(mf.StateError, match=r"`local_shards` got no entry for tensor 0"):
        OwnerGatherPlan.pack(owners, {})
    with pytest.raises(mf.StateError, match=r"`local_shards` got \(4, 4\) for tensor 0; expected a tensor of 20"):
        OwnerGatherPlan.pack(owners, {0: PARAM_1})


def test_equal_layouts_hash_alike() -> None:
    a, b = (GroupOwnerLayout(mesh(2, 1), LAYOUT, {0: 1}) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a != GroupOwnerLayout(mesh(2, 1), LAYOUT, {0: 0})


def submesh_owners(rank: int, world_size: int) -> tuple[dict[int, int], dict[int, int], list[int]]:
    half = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "dp"))["dp"]
    owners = GroupOwnerLayout(half, LAYOUT, {0: half.mesh.tolist()[1]})
    plan = OwnerGatherPlan.pack(owners, {0: PARAM_0[:5] if rank % 2 == 0 else PARAM_0[5:]})
    sent = {peer: buffer.numel() for peer, buffer in plan.send_buffers.items()}
    return assign_owner_work(LAYOUT, half, [0, 1]), sent | plan.recv_sizes, list(plan.rank_ranges)


def test_a_sub_mesh_counts_in_global_ranks() -> None:
    got = run_ranks(4, submesh_owners)
    assert [owners for owners, _, _ in got] == [{0: 0, 1: 1}] * 2 + [{0: 2, 1: 3}] * 2
    assert [peers for _, peers, _ in got] == [{1: 20}, {0: 20}, {3: 20}, {2: 20}]
    assert [ranks for _, _, ranks in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_two_sharded_axes_make_the_inner_one_most_significant() -> None:
    abstract = mf.AbstractMesh((2, 2), ("outer", "inner"), rank=1)
    params = {"w": torch.zeros(8, 2, requires_grad=True)}
    (group,) = mf.plan(params, abstract, mf.hfsdp()).groups
    owners = GroupOwnerLayout.from_group(group)
    assert owners.ranks == (0, 2, 1, 3)
    # And so it is in the buffer.
    assert owners.rank_ranges[1] == group.main_range == mf.Range(8, 12)
    hsdp = GroupOwnerLayout.from_group(mf.plan(params, abstract, mf.hsdp()).groups[0])
    assert hsdp.ranks == (0, 1) and hsdp.tensor_to_owner == {0: 0}
    other = mf.plan(params, mf.AbstractMesh((2, 2), ("outer", "inner"), rank=2), mf.hsdp())
    assert GroupOwnerLayout.from_group(other.groups[0]).tensor_to_owner == {0: 2}


def test_frozen_groups_and_vectors_take_no_part() -> None:
    params = {
        "w": torch.zeros(4, 2, requires_grad=True),
        "b": torch.zeros(4, requires_grad=True),
        "frozen": torch.zeros(4, 2),
    }
    spec = mf.plan(params, mesh(2), mf.zero3())
    assert [(group.name, owners.tensor_to_owner) for group, owners in plan_owners(spec).items()] == [
        ("(root) float32", {0: 0})
    ]
    none = plan_owners(spec, eligible_fn=lambda tensor: False)
    assert [owners.tensor_to_owner for owners in none.values()] == [{}]


def one_layer_groups(name: str, ranks: int) -> mf.ShardSpec:
    layer, count = DENSE[name]
    params = {
        f"layers.{i}.{path}": torch.empty(shape, device="meta").requires_grad_()
        for i, (path, shape) in itertools.product(range(count), layer.items())
    }
    return mf.plan(params, mesh(ranks), mf.zero3(), units=("layers.*",))


def loads_of(layouts: Sequence[GroupOwnerLayout]) -> dict[int, float]:
    loads: dict[int, float] = {}
    for owners in layouts:
        loads = owner_loads(owners.layout, owners.tensor_to_owner, initial_loads=loads)
    return loads


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("name", DENSE)
def test_loads_are_within_5_percent_of_a_lower_bound(name: str, ranks: int, capsys: pytest.CaptureFixture) -> None:
    spec = one_layer_groups(name, ranks)
    cost = ns_cost_fn(5)
    tasks = []
    for group in spec.groups:
        for index, shape in enumerate(group.layout.tensor_shapes):
            if len(shape) >= 2:
                held = [r for r in range(ranks) if group.layout.local_shape(index, r).numel()]
                tasks.append((cost(shape), held[0], held[-1]))
    bound = lower_bound(tasks, ranks)
    total = sum(task[0] for task in tasks)
    planned = loads_of(list(plan_owners(spec).values()))
    assert sum(planned.values()) == total
    alone = loads_of([GroupOwnerLayout.from_group(group) for group in spec.groups])
    with capsys.disabled():
        print(
            f"\n{name:15} {ranks:3} ranks: largest load / bound {max(planned.values()) / bound:.3f}, "
            f"/ mean {max(planned.values()) * ranks / total:.3f}, "
            f"/ mean without carry {max(alone.values()) * ranks / total:.3f}"
        )
    assert bound <= max(planned.values()) <= 1.05 * bound
    forced = [sum(cost for cost, first, last in tasks if first == last == rank) for rank in range(ranks)]
    plain = max(total / ranks, *forced, *(task[0] for task in tasks))
    # 8B at 32 ranks: no order of the matrices gives holders that do better (docs/benchmarks.md has the count).
    assert max(planned.values()) <= (1.07 if (name, ranks) == ("Llama-3.1-8B", 32) else 1.05) * plain
    assert max(planned.values()) < max(alone.values())


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_bytes_are_below_the_bound_for_moving_everything(ranks: int) -> None:
    spec = one_layer_groups("Llama-3.1-8B", ranks)
    elements, sent = 0, [0] * ranks
    for owners in plan_owners(spec).values():
        elements += sum(owners.layout.tensor_shapes[i].numel() for i in owners.tensor_to_owner)
        for (holder, owner), count in owners.traffic().items():
            sent[holder] += count  # to the owner
            sent[owner] += count  # and back
        # Exactly the remote parts of what straddles ranks, whoever looks.
        remote = 0
        for index in owners.tensor_to_owner:
            own = owners.layout.local_shape(index, owners.tensor_to_owner[index]).numel()
            remote += owners.layout.tensor_shapes[index].numel() - own
        assert sum(owners.traffic().values()) == remote
    assert sum(sent) / ranks <= 2 * elements / ranks * (ranks - 1) / ranks


def test_refining_never_makes_it_worse_and_keeps_to_holders() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    for _ in range(30):
        works = []
        for number in range(40):
            first = draw(6)
            holders = tuple(range(first, min(first + 1 + draw(4), 7)))
            works.append(owner_balance.OwnerWork(number, float((1, 2, 7)[draw(3)]), holders))
        loads: dict[int, float] = {}
        before = owner_balance.greedy(works, loads)
        after = owner_balance.refine(works, [before[work.tensor_index] for work in works], loads)
        total = dict.fromkeys(range(7), 0.0)
        for work, owner in zip(works, after, strict=True):
            assert owner in work.candidates
            total[owner] += work.cost
        assert max(total.values()) <= max(loads.values())
