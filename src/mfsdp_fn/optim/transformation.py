"""Optimizers from objects that follow optax's protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..errors import MfsdpError, StateError, bad
from ..spec import ShardSpec
from ..state import ShardState
from .base import Optimizer, check_step, check_weights, finish, register_opt_state, writable


class GradientTransformation(Protocol):
    """optax's protocol, with torch tensors."""

    def init(self, params: Any, /) -> Any:
        """The transformation's state for a tree of parameters."""
        ...

    def update(self, updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        """Updates to add to the parameters, from gradients; and the new state."""
        ...


@register_opt_state("inner")
@dataclasses.dataclass(frozen=True, eq=False)
class TransformationState:
    """State of `from_gradient_transformation`: a node of optree and torch pytrees.

    Args:
        inner: the transformation's own state, a pytree.
        spec: the plan, static.
    """

    inner: Any
    spec: ShardSpec


@dataclasses.dataclass(frozen=True, eq=False)
class _FromTransformation:
    tx: GradientTransformation

    def init(self, state: ShardState) -> TransformationState:
        check_weights(state)
        # Copies: a transformation may keep what it is given, and a donating step writes to the weights.
        params = {path: rows.clone() for path, rows in _rows(state.spec, state.main).items()}
        with torch.no_grad():
            return TransformationState(self.tx.init(params), state.spec)

    def step(
        self, grads: ShardState, opt_state: TransformationState, state: ShardState, *, donate: bool = False
    ) -> tuple[ShardState, TransformationState]:
        check_step(TransformationState, grads, opt_state, state, donate)
        params = _rows(state.spec, state.main)
        given = _rows(state.spec, grads.main)
        with torch.no_grad():
            given = {path: grad.to(params[path].dtype) for path, grad in given.items()}
            updates, inner = self.tx.update(given, opt_state.inner, params)
            _check_updates(updates, params)
            main = writable(state, donate=donate)
            for path, rows in _rows(state.spec, main).items():
                rows.add_(updates[path])
        state = finish("from_gradient_transformation", state, main, grads, donate=donate)
        return state, TransformationState(inner, opt_state.spec)


def _rows(spec: ShardSpec, buffers: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's rows of every trainable tensor, by path; views."""
    found: dict[str, torch.Tensor] = {}
    for group, buffer in zip(spec.groups, buffers, strict=True):
        if not group.requires_grad:
            continue
        mine = group.local_views(buffer, group.main_range)
        for index, path in enumerate(group.paths):
            # The same paths on every rank, so that its state has one structure.
            found[path] = mine[index] if index in mine else buffer.new_empty((0, *group.layout.row_shape(index)))
    return found


def _check_updates(updates: Any, params: dict[str, torch.Tensor]) -> None:
    if not isinstance(updates, Mapping) or updates.keys() != params.keys():
        got = sorted(map(str, updates)) if isinstance(updates, Mapping) else type(updates).__name__
        raise StateError(
            bad("tx", f"updates {got}", f"a dict with the paths {sorted(params)}", "return updates as they came in")
        )
    for path, rows in params.items():
        update = updates[path]
        if not isinstance(update, torch.Tensor) or update.shape != rows.shape:
            got = tuple(update.shape) if isinstance(update, torch.Tensor) else repr(update)
            raise StateError(
                bad("tx", f"an update {got} at {path!r}", f"a tensor of shape {tuple(rows.shape)}", "keep its shape")
            )


def from_gradient_transformation(tx: GradientTransformation) -> Optimizer:
    """An optimizer from any object with optax's ``init(params)`` and ``update(updates, state, params)``.

    The transformation sees ``{path: this rank's rows}``: one tensor of shape ``(rows, *shape[1:])`` (of ``(rows,
    *shape[n:])`` with ``leading_dims=n``) in the main weights' dtype for every trainable tensor, padding left out;
    zero rows where this rank holds none (a 0-D tensor is then of shape (0,)). The keys are the same on every rank,
    so masks and labels by path work. The updates it returns are added to the weights. Elementwise transformations
    are right as they are. One that needs whole tensors or norms (clipping, LAMB, factored moments) would see a part
    only: clip with `clip_by_global_norm` before the step instead. Communicates what `sync_model_weights` does, and
    nothing for `tx`.

    With ``donate=True`` weights change in place after `update`: a transformation that keeps `params` or `updates`
    in its state must copy them there. What it does with its own state is its own affair.

    Raises:
        MfsdpError: `tx` has no `init` or `update`.
        StateError: by `step`: updates of other paths or shapes, gradients that still accumulate, or arguments of
            different plans.

    Idea: optax (Google DeepMind), `GradientTransformation`.

    >>> import torch, mfsdp_fn as mf
    >>> class Scale:
    ...     def init(self, params):
    ...         return ()
    ...
    ...     def update(self, updates, state, params):
    ...         return {path: -0.5 * grad for path, grad in updates.items()}, state
    >>> params = {"w": torch.ones(2, requires_grad=True)}
    >>> state = mf.shard(params, mf.plan(params, mf.AbstractMesh((1,), ("dp",)), mf.zero3()))
    >>> opt = from_gradient_transformation(Scale())
    >>> grads = mf.tree_map(torch.ones_like, state)
    >>> state, opt_state = opt.step(grads, opt.init(state), state)
    >>> state.main[0]
    tensor([0.5000, 0.5000])
    """
    for name in ("init", "update"):
        if not callable(getattr(tx, name, None)):
            raise MfsdpError(
                bad("tx", f"a {type(tx).__name__} without {name}", "an object with init and update", "see optax")
            )
    return _FromTransformation(tx)
