"""Owner assignment (seed: owner_planning).

Owners are global process ranks, also where a mesh's ranks don't start at 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from . import communicators
from .checks import shown
from .communicators import Mesh
from .errors import PlanError, bad
from .group import GroupSpec
from .layout import GlobalLayout
from .owner_balance import (
    CostFn,
    OwnerWork,
    checked_cost_fn,
    checked_loads,
    greedy,
    ns_cost_fn,
    refine,
    select_ge_2d_params,
    works_of,
)
from .owner_checks import checked_indices, checked_layout, checked_ranks, checked_tensor_to_owner
from .owner_layout import EligibleFn, GroupOwnerLayout, eligible, made
from .owner_packing import OwnerGatherPlan, OwnerScatterPlan
from .placement import sharded_axes
from .spec import ShardSpec

__all__ = [
    "GroupOwnerLayout",
    "OwnerGatherPlan",
    "OwnerScatterPlan",
    "assign_owner_work",
    "ns_cost_fn",
    "owner_loads",
    "plan_owners",
    "select_ge_2d_params",
]


def assign_owner_work(
    layout: GlobalLayout,
    mesh: Mesh,
    tensor_indices: Iterable[int],
    cost_fn: CostFn | None = None,
    *,
    initial_loads: Mapping[int, float] | None = None,
) -> dict[int, int]:
    """Give each participating tensor to a global rank that holds part of it.

    Tensors with one holder come first, then the others in descending cost, each to its least-loaded holder. Ties
    follow buffer order. A tensor without elements has no holder and gets no owner. Communicates nothing.

    Args:
        layout: layout of a buffer that is sharded over every axis of `mesh`.
        mesh: the mesh, or sub-mesh; its size is the layout's number of ranks.
        tensor_indices: the participating tensors.
        cost_fn: positive cost of a tensor's full shape; by default Newton-Schulz with five iterations.
        initial_loads: loads that ranks have already, by global rank, such as `owner_loads` of the groups before.

    Returns:
        Owner by tensor index.

    Raises:
        PlanError: what isn't a mesh or a layout, or of different sizes; an index, a cost or a load that can't be.

    Source: `owner_planning` of Megatron-FSDP v2.

    >>> from mfsdp_fn import AbstractMesh, build_for_row_atomic
    >>> layout = build_for_row_atomic([(6, 4), (4, 4)], 2)
    >>> mesh = AbstractMesh((2,), ("dp",))
    >>> assign_owner_work(layout, mesh, [0, 1])
    {0: 0, 1: 1}
    >>> assign_owner_work(layout, mesh, [0, 1], initial_loads={0: 1000})
    {0: 1, 1: 1}
    """
    ranks = checked_ranks(mesh, layout, None)
    indices = checked_indices(layout, tensor_indices, "tensor_indices")
    return greedy(works_of(layout, ranks, indices, cost_fn), checked_loads(initial_loads))


def owner_loads(
    layout: GlobalLayout,
    tensor_to_owner: Mapping[int, int],
    cost_fn: CostFn | None = None,
    *,
    initial_loads: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """Load of each owner: what to carry to the next group as `initial_loads`.

    Raises:
        PlanError: a tensor that the layout doesn't have, or a cost or load that can't be.

    >>> from mfsdp_fn import build_for_row_atomic
    >>> owner_loads(build_for_row_atomic([(6, 4), (4, 4)], 2), {0: 1, 1: 1}, ns_cost_fn(1))
    {1: 200}
    """
    checked_layout(layout)
    checked_tensor_to_owner(layout, tensor_to_owner)
    cost_fn, loads = checked_cost_fn(cost_fn), checked_loads(initial_loads)
    for index, owner in tensor_to_owner.items():
        loads[owner] = loads.get(owner, 0) + cost_fn(layout.tensor_shapes[index])
    return loads


def plan_owners(
    spec: ShardSpec, *, cost_fn: CostFn | None = None, eligible_fn: EligibleFn | None = None
) -> dict[GroupSpec, GroupOwnerLayout]:
    """Owners for every trainable group, balanced over all groups together.

    Groups are assigned in order, each starting with the loads of those before it, by the rule of
    `assign_owner_work`; then tasks are shifted between holders to even out the total (`owner_balance.refine`).
    Plain integers, the same on every rank of a shard set: nothing is sent. Groups over different ranks (meshes by
    unit) are evened out by themselves, the widest first; the others start with its loads. With two sharded axes
    (hfsdp) a communicator over both is made, collectively, the first time.

    Args:
        spec: the plan.
        cost_fn: positive cost of a tensor's full shape; by default Newton-Schulz with five iterations.
        eligible_fn: whether a tensor takes part, asked with a meta tensor; by default those with two dimensions
            or more.

    Returns:
        One owner layout for each trainable group, in order of ``spec.groups``.

    Raises:
        PlanError: not a plan, a cost that isn't a positive number, or an `eligible_fn` that doesn't say True or False;
            a DTensor that is sharded over other axes.

    >>> import torch, mfsdp_fn as mf
    >>> params = {f"l.{i}.w": torch.zeros(4, 4, requires_grad=True) for i in range(4)}
    >>> spec = mf.plan(params, mf.AbstractMesh((2,), ("dp",)), mf.zero3(), units=("l.*",))
    >>> [owners.tensor_to_owner for owners in plan_owners(spec).values()]
    [{0: 0}, {0: 1}, {0: 0}, {0: 1}]
    """
    if not isinstance(spec, ShardSpec):
        raise PlanError(bad("spec", shown(spec), "a ShardSpec", "make one with plan(params, …), or pass state.spec"))
    groups = [group for group in spec.groups if group.requires_grad]
    jobs = [(group, group.layout, eligible(group, eligible_fn)) for group in groups]
    taking_part = {(group.number, index) for group, _, indices in jobs for index in indices}
    for leaf in spec.leaves:
        cut = leaf.parallel is not None and not leaf.parallel.is_whole(range(len(leaf.shape)))
        if cut and (leaf.group, leaf.index) in taking_part:
            raise PlanError(
                bad(
                    "eligible_fn",
                    f"{leaf.path!r}, a DTensor of which this rank has only a part over other axes",
                    "tensors that can be brought together over data-parallel ranks",
                    "leave it out",
                )
            )
    return dict(zip(groups, balance(jobs, cost_fn), strict=True))


def balance(
    jobs: Sequence[tuple[GroupSpec, GlobalLayout, Sequence[int]]], cost_fn: CostFn | None
) -> list[GroupOwnerLayout]:
    """What `plan_owners` does, for layouts of one's own over the groups' shards.

    Args:
        jobs: group, layout (the group's, or a finer one of the same buffer) and participating tensors.
        cost_fn: as in `plan_owners`.
    """
    sets = [communicators.ranks_of(group.mesh, sharded_axes(group.placements.optimizer)) for group, _, _ in jobs]
    found: dict[int, GroupOwnerLayout] = {}
    done: dict[tuple[int, ...], dict[int, float]] = {}
    for ranks in sorted(dict.fromkeys(sets), key=lambda ranks: -len(ranks)):
        # Loads that every one of these ranks knows: others would plan otherwise with what only some know.
        loads: dict[int, float] = {}
        for wider, theirs in done.items():
            if set(ranks) <= set(wider):
                loads = {rank: loads.get(rank, 0) + theirs.get(rank, 0) for rank in ranks}
        works: list[OwnerWork] = []
        owners: list[int] = []
        counts: dict[int, int] = {}
        for number in (number for number, mine in enumerate(sets) if mine == ranks):
            group, layout, indices = jobs[number]
            mine = works_of(layout, ranks, indices, cost_fn)
            first = greedy(mine, loads)
            works += mine
            owners += [first[work.tensor_index] for work in mine]
            counts[number] = len(mine)
        refined = refine(works, owners, loads)
        final = iter(zip(works, refined, strict=True))
        for number, count in counts.items():
            group, layout, _ = jobs[number]
            by_tensor = {work.tensor_index: owner for work, owner in itertools.islice(final, count)}
            found[number] = made(group, layout, dict(sorted(by_tensor.items())))
        done[ranks] = {}
        for work, owner in zip(works, refined, strict=True):
            done[ranks][owner] = done[ranks].get(owner, 0) + work.cost
    return [found[number] for number in range(len(jobs))]
