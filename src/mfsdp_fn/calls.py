"""What every call of a transformed function begins with: its states checked, a session, gradients' destinations."""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import tree
from .checks import check_flag
from .errors import StateError, bad
from .flights import Flights
from .gradients import GradientSink
from .runtime import ExecutionOrder, PrefetchOrder
from .session import Session, opaque_session
from .state import ShardState, Stage, check_state


def _split(state: Any, argument: str) -> tuple[list[ShardState], list[tuple[str, ...]], tree.Template]:
    """The ShardStates of a pytree of them, with their paths."""
    states, paths, template = tree.flatten(state, is_leaf=lambda node: isinstance(node, ShardState))
    for leaf, path in zip(states, paths, strict=True):
        check_state(leaf, ".".join((argument, *path)))
    if not states:
        raise StateError(bad(argument, "no state", "a ShardState, or a pytree of them", "pass shard(params, spec)"))
    return states, paths, template


class Recordings:
    """The sequence of units that a transformed function saw first, by the digests of its states."""

    def __init__(self) -> None:
        self.checked = False  # its graph, for reentrant checkpoints
        self.orders: dict[tuple[str, ...], ExecutionOrder] = {}

    def get(self, states: list[ShardState]) -> ExecutionOrder | None:
        """What was recorded for these states; None before the first call has ended, and where nothing is recorded."""
        if states[0].spec.runtime.prefetch_order is not PrefetchOrder.RECORDED:
            return None
        return self.orders.get(tuple(state.spec.digest() for state in states))

    def put(self, states: list[ShardState], order: ExecutionOrder) -> None:
        """Record an order, unless there is one."""
        self.orders.setdefault(tuple(state.spec.digest() for state in states), order)


def _refuse_cold_capture(states: list[ShardState]) -> None:
    """A first call makes handles and threads, which a capturing stream doesn't allow; CUDA's own errors are obscure."""
    if states[0].spec.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    if not all(state.spec.history.ran for state in states):
        raise StateError(
            bad(
                "state",
                "a first call inside a CUDA graph capture",
                "a call outside it before",
                "run the step once on a side stream to warm up, then capture it",
            )
        )


def note_call(states: list[ShardState]) -> None:
    """Remember that forward and backward have run once."""
    for state in states:
        state.spec.history.ran = True


def open_call(state: Any, recordings: Recordings) -> tuple[Session, list[ShardState], tree.Template, Any]:
    """A session for `state`, and the state that the user's function is called with."""
    states, _, template = _split(state, "state")
    _refuse_cold_capture(states)
    if torch.is_inference_mode_enabled():
        raise StateError(
            bad(
                "state",
                "a state in inference mode",
                "a call outside torch.inference_mode()",
                "differentiate outside it: tensors made inside can't be saved for backward",
            )
        )
    for one in states:
        if one.stage is not Stage.FINAL:
            raise StateError(bad("state", "accumulating gradients", "weights", "pass the state of weights first"))
        if one.gatherer is not None:
            raise StateError(
                bad(
                    "state",
                    "a state that another value_and_grad is using",
                    "a state of its own",
                    "don't nest value_and_grad over one state",
                )
            )
        if one.spec.runtime != states[0].spec.runtime:
            raise StateError(
                bad(
                    "state",
                    "states with different RuntimePolicy",
                    "one policy",
                    "plan them with the same runtime=",
                )
            )
    recorded = recordings.get(states)
    session = (opaque_session() if "torch._dynamo" in sys.modules else Session)(states, recorded)
    handed = [
        ShardState(main=one.main, compute=one.compute, spec=one.spec, root=root, gatherer=session, origin=one)
        for root, one in enumerate(states)
    ]
    return session, states, template, tree.build(template, handed)


def make_sinks(
    states: list[ShardState],
    template: tree.Template,
    accumulate: Any,
    *,
    is_last_microbatch: bool,
    donate: bool,
) -> list[GradientSink]:
    """One destination a state for its gradients, each with what it adds to.

    Raises:
        StateError: `accumulate` is not as many states as there are, or one doesn't fit.
    """
    check_flag("is_last_microbatch", is_last_microbatch)
    check_flag("donate", donate)
    given: list[ShardState | None] = [None] * len(states)
    if accumulate is not None:
        found, found_paths, _ = _split(accumulate, "accumulate")
        by_path = dict(zip(found_paths, found, strict=True))
        paths = [tuple(path) for path in tree.leaf_paths(template)]
        if sorted(by_path) != sorted(paths):
            said = [[".".join(path) or "the top" for path in some] for some in (by_path, paths)]
            raise StateError(
                bad(
                    "accumulate",
                    f"states at {said[0]}",
                    f"states at {said[1]}, as in `state`",
                    "pass the last call's gradients",
                )
            )
        given = [by_path[path] for path in paths]
    flights = Flights(states[0].spec.runtime)  # `open_call` saw to it that all states have one policy
    return [
        GradientSink(one, total, flights, is_last_microbatch=is_last_microbatch, donate=donate)
        for one, total in zip(states, given, strict=True)
    ]
