"""States: pytrees of flat local buffers, with the spec as their static part."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE

from .errors import DonatedError, StateError, bad
from .group import GroupSpec
from .placement import Placement
from .spec import ShardSpec


class Stage(enum.Enum):
    """What placement a state's main buffers have.

    FINAL is the optimizer placement: main weights, moments, finished gradients. ACCUMULATING is the gradient
    placement where that differs: gradients with a reduction still to come.
    """

    FINAL = "final"
    ACCUMULATING = "accumulating"


# Shape of a frozen group's buffer in gradients and moments. Not (0,), which is what a rank with an empty segment of
# frozen weights holds: whether a group is gathered must not depend on the rank.
NOTHING = (0, 0)


class Gatherer(Protocol):
    """What `value_and_grad` puts into the state that it hands to the user's function."""

    def gather(self, unit: UnitState) -> dict[int, torch.Tensor]:
        """Gathered parameters of a unit by leaf number, recorded for backward."""
        ...

    def launch(self, unit: UnitState) -> None:
        """Launch the unit's gather ahead of its use."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ShardState:
    """A sharded tree: one flat local buffer a group.

    Args:
        main: this rank's segment of each group, in order of ``spec.groups``. Never requires grad.
        compute: compute weights where their dtype or placement differ from the main weights'; None where they
            are the same buffer, and in gradients and moments.
        spec: the plan, static.
        stage: the placement of `main`, static.

    ``state[unit]`` is that unit's part.
    """

    main: tuple[torch.Tensor, ...]
    compute: tuple[torch.Tensor | None, ...]
    spec: ShardSpec
    stage: Stage = Stage.FINAL
    root: int = 0
    gatherer: Gatherer | None = dataclasses.field(default=None, repr=False)
    origin: ShardState | None = dataclasses.field(default=None, repr=False)
    donated_to: str | None = dataclasses.field(default=None, repr=False)

    def __getitem__(self, unit: str) -> UnitState:
        numbers = self.spec.unit_groups(unit)
        return UnitState(
            main=tuple(self.main[number] for number in numbers),
            compute=tuple(self.compute[number] for number in numbers),
            spec=self.spec,
            unit=unit,
            stage=self.stage,
            root=self.root,
            gatherer=self.gatherer,
            origin=self,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class UnitState:
    """One unit of a `ShardState`: the buffers of its groups, in order of ``spec.unit_groups(unit)``."""

    main: tuple[torch.Tensor, ...]
    compute: tuple[torch.Tensor | None, ...]
    spec: ShardSpec
    unit: str
    stage: Stage = Stage.FINAL
    root: int = 0
    gatherer: Gatherer | None = dataclasses.field(default=None, repr=False)
    origin: ShardState | None = dataclasses.field(default=None, repr=False)


_CHILDREN = ("main", "compute")
_OWN = ("donated_to", "origin")  # facts about one object, which a copy made by a tree library does not share


def flatten_node(node: ShardState | UnitState) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Children and static part, for tree libraries."""
    check_alive(node, "state")
    static = tuple(
        getattr(node, field.name) for field in dataclasses.fields(node) if field.name not in (*_CHILDREN, *_OWN)
    )
    return (node.main, node.compute), static


def unflatten_node(cls: type, static: tuple[Any, ...], children: Any) -> Any:
    """The node again; its buffers may be anything that a tree function returned."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in (*_CHILDREN, *_OWN)]
    main, compute = children
    return cls(main=main, compute=compute, **dict(zip(names, static, strict=True)))


def register_optree_node(cls: type) -> None:
    """Make a state class a node of optree in every namespace."""

    def flatten(node: Any) -> tuple[Any, ...]:
        return *flatten_node(node), _CHILDREN

    def unflatten(static: Any, children: Any) -> Any:
        return unflatten_node(cls, static, children)

    node_class: Any = cls  # optree's annotations want a collection
    optree.register_pytree_node(node_class, flatten, unflatten, namespace=EVERYWHERE)


for _cls in (ShardState, UnitState):
    register_optree_node(_cls)


def check_alive(state: ShardState | UnitState, argument: str) -> None:
    """Refuse a state whose buffers were donated.

    Raises:
        DonatedError: naming the function they were donated to.
    """
    while state.origin is not None:  # a unit is as alive as the state it was taken from
        state = state.origin
    if isinstance(state, ShardState) and state.donated_to is not None:
        raise DonatedError(
            bad(
                argument,
                f"a state whose buffers were donated to {state.donated_to}",
                "a state that is alive",
                "use the state that the call returned, or leave donate=True out",
            )
        )


def donate(to: str, *states: ShardState) -> None:
    """Mark states as used up by `to`."""
    for state in states:
        object.__setattr__(state, "donated_to", to)  # frozen for everyone else


def check_state(state: Any, argument: str, spec: ShardSpec | None = None) -> None:
    """Refuse what isn't a living `ShardState` of `spec`.

    Raises:
        StateError: naming the argument.
    """
    if not isinstance(state, ShardState):
        raise StateError(
            bad(argument, f"a {type(state).__name__}", "a ShardState", "make one with shard(params, spec)")
        )
    check_alive(state, argument)
    if spec is not None and state.spec != spec:
        raise StateError(
            bad(
                argument,
                f"a state of {state.spec!r}",
                f"a state of {spec!r}",
                "use states of one plan together",
            )
        )


def placement_of(state: ShardState, group: GroupSpec) -> tuple[Placement, ...]:
    """The placement of the state's main buffer of a group."""
    return group.placements.gradient if state.stage is Stage.ACCUMULATING else group.placements.optimizer


def tree_map(fn: Callable[..., Any], *states: ShardState) -> ShardState:
    """Apply `fn` to the main buffers of each trainable group; the result has no compute weights.

    Communicates nothing. `fn` gets one flat local buffer a state, padding included, and returns one of the same
    size. A frozen group's buffer is passed on from the first state. Call `sync_model_weights` on the result before
    `unshard` if it holds weights.

    Raises:
        StateError: the states have different plans or stages, or were donated.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    >>> mf.tree_map(torch.add, state, state).main[0]
    tensor([2., 2.])
    """
    if not states:
        raise StateError(bad("states", "no state", "at least one ShardState", "pass the states to map over"))
    first = states[0]
    for number, state in enumerate(states):
        check_state(state, f"states[{number}]", first.spec if isinstance(first, ShardState) else None)
        if state.stage is not first.stage:
            raise StateError(
                bad(
                    f"states[{number}]",
                    f"a state that is {state.stage.value}",
                    f"{first.stage.value}, as states[0]",
                    "finish accumulated gradients with finish_grad_sync first",
                )
            )
    if not callable(fn):
        raise StateError(bad("fn", repr(fn), "a function of one buffer a state", "pass the function first"))
    columns = zip(first.spec.groups, *(state.main for state in states), strict=True)
    main = tuple(fn(*buffers) if group.requires_grad else buffers[0] for group, *buffers in columns)
    for group, before, after in zip(first.spec.groups, first.main, main, strict=True):
        if not isinstance(after, torch.Tensor) or after.shape != before.shape:
            got = tuple(after.shape) if isinstance(after, torch.Tensor) else repr(after)
            raise StateError(
                bad(
                    "fn",
                    f"a function that gives {got} for the buffer of {group.name!r}",
                    f"a tensor of its shape {tuple(before.shape)}",
                    "map elementwise; whole tensors are owner_map's business",
                )
            )
    return with_main(first, main)


def with_main(like: ShardState, main: tuple[torch.Tensor, ...]) -> ShardState:
    """A state of the plan and stage of `like` with other main buffers and no compute weights."""
    return ShardState(main=main, compute=(None,) * len(main), spec=like.spec, stage=like.stage)


def zeros_like(state: ShardState) -> ShardState:
    """Zeros in the shape of the state's main buffers: moments, or gradients. Frozen groups hold nothing.

    >>> import torch, mfsdp_fn as mf
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    >>> mf.zeros_like(state).main[0]
    tensor([0., 0.])
    """
    check_state(state, "state")
    pairs = zip(state.spec.groups, state.main, strict=True)
    return with_main(
        state,
        tuple(torch.zeros_like(main) if group.requires_grad else main.new_empty(NOTHING) for group, main in pairs),
    )
