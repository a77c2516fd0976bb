"""`unshard`, also as `launch` and `wait`: gathered parameters, each a view of its group's buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import tree
from .buffer import PendingGather, launch_gather
from .errors import StateError, bad
from .group import GroupSpec
from .model_weights import gather_weights
from .spec import ShardSpec
from .state import NOTHING, ShardState, Stage, UnitState, check_alive, check_state
from .tensor_parallel import whole_of


def whole_views(group: GroupSpec, flat: torch.Tensor) -> list[torch.Tensor]:
    """Every tensor of a group as a view of its gathered buffer."""
    return [flat.narrow(0, offset, numel).view(shape) for offset, shape, numel in group.views]


def unit_values(spec: ShardSpec, unit: str, views: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Leaf number to tensor for one unit, from each group's views; tied leaves get one object."""
    found: dict[int, torch.Tensor] = {}
    made: dict[tuple[int, int], torch.Tensor] = {}
    for number, group, index in spec.unit_leaves[unit]:
        value, parallel = views[group][index], spec.leaves[number].parallel
        if parallel is not None and value is not None:
            if (group, index) not in made:
                made[group, index] = whole_of(parallel, value)
            value = made[group, index]
        found[number] = value
    return found


@dataclasses.dataclass(frozen=True)
class Pending:
    """A unit whose gathers were launched; pass it to `wait`, once."""

    unit: UnitState
    gathers: tuple[PendingGather | None, ...]


def launch(unit: UnitState) -> Pending:
    """Launch the gathers of one unit, for `wait` to finish: explicit prefetch.

    Communicates what `unshard` does. Inside `value_and_grad` the gather counts as the unit's prefetch.

    Raises:
        StateError: not a unit of a living state.
    """
    if not isinstance(unit, UnitState):
        raise StateError(bad("unit", f"a {type(unit).__name__}", "a UnitState", "pass state[unit]"))
    check_alive(unit, "unit")
    if unit.stage is not Stage.FINAL:
        raise StateError(
            bad("unit", "accumulating gradients", "a finished state", "call finish_grad_sync(grads) first")
        )
    if unit.gatherer is not None:
        unit.gatherer.launch(unit)
        return Pending(unit, ())
    return Pending(unit, tuple(_launch_group(unit, i) for i in range(len(unit.main))))


def _launch_group(unit: UnitState, position: int) -> PendingGather | None:
    group = unit.spec.groups[unit.spec.unit_groups(unit.unit)[position]]
    main, compute = unit.main[position], unit.compute[position]
    if tuple(main.shape) == NOTHING:  # a frozen group of gradients or moments
        return None
    if compute is None and group.has_compute:
        # Gradients and moments, and what tree_map made of weights: whole main buffers.
        return launch_gather(main, group.sync_gathers + group.gathers, label=(group.name, "unshard"))
    return gather_weights(group, main, compute, group.gathers, "unshard")


def wait(pending: Pending) -> Any:
    """The parameters of a launched unit, as `unshard` gives them."""
    if not isinstance(pending, Pending):
        raise StateError(bad("pending", f"a {type(pending).__name__}", "what launch(unit) returned", "launch first"))
    unit = pending.unit
    return tree.build(unit.spec.unit_template(unit.unit), _Values(_wait_values(pending)))


class _Values(dict[int, Any]):
    """Values by leaf number; None for leaves of groups that hold nothing."""

    def __missing__(self, key: int) -> None:
        return None


def _wait_values(pending: Pending) -> dict[int, torch.Tensor]:
    unit = pending.unit
    check_alive(unit, "unit")
    if unit.gatherer is not None:
        return unit.gatherer.gather(unit)
    numbers = unit.spec.unit_groups(unit.unit)
    views: dict[int, Sequence[Any]] = {}
    for number, gather in zip(numbers, pending.gathers, strict=True):
        group = unit.spec.groups[number]
        views[number] = [None] * len(group.views) if gather is None else whole_views(group, gather.wait())
    return unit_values(unit.spec, unit.unit, views)


def gather_values(unit: UnitState) -> dict[int, torch.Tensor]:
    """`unshard` of a unit as tensors by leaf number, for callers that place them themselves."""
    return _wait_values(launch(unit))


def unshard(state: ShardState | UnitState) -> Any:
    """The gathered parameters: of a whole state the tree that was planned, of a unit its subtree.

    One all-gather a group over each axis that its compute weights are sharded over (zero3: one; ddp, zero1,
    zero2: none), in the compute dtype; bytes received a rank: (N-1)/N of the group. Every parameter is a view of
    its group's gathered buffer; nothing is copied. Don't write to them: where nothing had to be gathered (ddp, axes of
    one rank) that buffer is the state's own. Tied leaves are one tensor. The root unit is the tree without
    the other units' subtrees, which are left out of dicts and None elsewhere. A state without compute weights
    (gradients, moments) gives its main buffers' values. What was planned as a DTensor over other axes is one again.

    Inside `value_and_grad` differentiable: its transpose is `reduce`.

    Raises:
        StateError: not a finished, living state.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"emb": torch.ones(2, requires_grad=True), "l.0.w": torch.zeros(1, requires_grad=True)}
    >>> spec = mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.ddp(), units=("l.*",))
    >>> mf.unshard(mf.shard(params, spec)["l.0"])
    {'w': tensor([0.])}
    """
    if isinstance(state, UnitState):
        return wait(launch(state))
    check_state(state, "state")
    if state.gatherer is not None:
        values: dict[int, torch.Tensor] = {}
        for unit in state.spec.units:
            values.update(state.gatherer.gather(state[unit]))
        return tree.build(state.spec.template, values)
    pendings = [launch(state[unit]) for unit in state.spec.units]
    values = {}
    for pending in pendings:
        values.update(_wait_values(pending))
    return tree.build(state.spec.template, _Values(values))
