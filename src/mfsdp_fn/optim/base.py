"""What every optimizer is and shares: the protocol, its state as a pytree node, the checks of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE

from ..autodiff import register_torch_node
from ..checks import check_flag
from ..errors import StateError, bad
from ..model_weights import sync_model_weights
from ..spec import ShardSpec
from ..state import ShardState, Stage, check_state
from ..state import donate as mark_donated

T = TypeVar("T")


class Optimizer(Protocol):
    """A pair of pure functions; any object that has them will do.

    The optimizer itself holds hyperparameters and no tensors of the model. What changes from step to step is in
    the state that `init` makes: a pytree whose moments are `ShardState`s and whose counters are 0-D tensors (a
    Python counter would compile a new graph every step).
    """

    def init(self, state: ShardState) -> Any:
        """The optimizer's state for weights `state`; communicates nothing."""
        ...

    def step(
        self, grads: ShardState, opt_state: Any, state: ShardState, *, donate: bool = False
    ) -> tuple[ShardState, Any]:
        """New weights, synced, and the optimizer's new state.

        Communicates what `sync_model_weights` does.

        Args:
            grads: finished gradients of the same plan.
            opt_state: what `init` or the last `step` returned.
            state: the weights.
            donate: work in place; `grads`, `opt_state` and `state` can't be used again.
        """
        ...


def register_opt_state(*children: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: make a frozen dataclass a node of optree and of torch's pytrees.

    Args:
        children: the fields that hold the tree's children; the others are static.
    """

    def register(cls: type[T]) -> type[T]:
        assert dataclasses.is_dataclass(cls)
        static_names = tuple(field.name for field in dataclasses.fields(cls) if field.name not in children)

        def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return tuple(getattr(node, name) for name in children), tuple(getattr(node, name) for name in static_names)

        def unflatten(cls: type, static: Any, values: Any) -> Any:
            return cls(**dict(zip(children, values, strict=True)), **dict(zip(static_names, static, strict=True)))

        node_class: Any = cls  # optree's annotations want a collection
        optree.register_pytree_node(
            node_class,
            lambda node: (*flatten(node), children),
            lambda static, values: unflatten(cls, static, values),
            namespace=EVERYWHERE,
        )
        register_torch_node(cls, flatten, unflatten)
        return cls

    return register


def moments_of(opt_state: Any) -> dict[str, ShardState]:
    """The ShardStates among an optimizer state's own fields."""
    fields = {field.name: getattr(opt_state, field.name) for field in dataclasses.fields(opt_state)}
    return {name: value for name, value in fields.items() if isinstance(value, ShardState)}


def check_weights(state: Any) -> None:
    """Refuse what isn't a living state of weights.

    Raises:
        StateError: naming the argument.
    """
    check_state(state, "state")
    if state.stage is not Stage.FINAL:
        raise StateError(
            bad("state", "accumulating gradients", "weights", "pass the arguments as step(grads, opt_state, state)")
        )


def check_finished(grads: ShardState, argument: str) -> None:
    """Refuse gradients that are not reduced yet.

    Raises:
        StateError: naming the argument.
    """
    if grads.stage is not Stage.FINAL:
        raise StateError(
            bad(
                argument,
                "gradients that still accumulate",
                "finished gradients",
                "call finish_grad_sync(grads) after the last microbatch"
                if grads.spec.runtime.caller_managed_grad_sync
                else "pass is_last_microbatch=True with the last microbatch, or call finish_grad_sync(grads)",
            )
        )


def check_step(kind: type, grads: Any, opt_state: Any, state: Any, donate: Any) -> None:
    """Refuse arguments of `step` that don't belong together, before anything is changed.

    Raises:
        DonatedError: one of them was used up by an earlier call.
        StateError: naming the argument that doesn't fit `state`.
        MfsdpError: `donate` isn't True or False.
    """
    check_flag("donate", donate)
    check_weights(state)
    check_state(grads, "grads", state.spec)
    check_finished(grads, "grads")
    if any(compute is not None for compute in grads.compute):
        raise StateError(bad("grads", "a state of weights", "gradients", "the order is step(grads, opt_state, state)"))
    if not isinstance(opt_state, kind):
        raise StateError(
            bad(
                "opt_state",
                f"a {type(opt_state).__name__}",
                f"a {kind.__name__}",
                "pass what init(state) of this optimizer returned, or its last step",
            )
        )
    check_spec(opt_state.spec, state.spec)
    for name, moment in moments_of(opt_state).items():
        check_state(moment, f"opt_state.{name}", state.spec)


def check_spec(got: ShardSpec, expected: ShardSpec) -> None:
    """Refuse an optimizer state that was made for another plan.

    Raises:
        StateError: telling both plans.
    """
    if got != expected:
        raise StateError(
            bad("opt_state", f"a state made for {got!r}", f"one made for {expected!r}", "call init(state) again")
        )


def writable(state: ShardState, *, donate: bool) -> list[torch.Tensor]:
    """Main buffers to write to in place: the state's own, or copies. Frozen groups' are the state's own always."""
    pairs = zip(state.spec.groups, state.main, strict=True)
    return [buffer if donate or not group.requires_grad else buffer.clone() for group, buffer in pairs]


def finish(name: str, state: ShardState, main: list[torch.Tensor], *used: ShardState, donate: bool) -> ShardState:
    """The synced state with new main buffers; `state` and what was `used` are marked if they were donated."""
    moved = dataclasses.replace(state, main=tuple(main))
    synced = sync_model_weights(moved, donate=donate)
    if donate:
        mark_donated(name, state, *used)
    return synced


def count_up(step: torch.Tensor, *, donate: bool) -> torch.Tensor:
    """The step counter plus one; donated, it is the same tensor, so that a captured CUDA graph counts too."""
    return step.add_(1) if donate else step + 1
