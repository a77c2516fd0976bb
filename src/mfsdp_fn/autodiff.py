"""`value_and_grad` of functions of sharded states.

Private torch API here: `torch.utils._pytree`, whose nodes compile, checkpoint and vmap take apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks as torch_saved_tensors_hooks
from torch.utils import _pytree as torch_pytree

from . import traced, tree
from .activation_checkpoints import refuse_reentrant_graph
from .calls import Recordings, make_sinks, note_call, open_call
from .checks import check_flag, check_function, shown
from .dbuffer import DBuffer, flatten_buffer, unflatten_buffer
from .errors import StateError, bad
from .gradients import finish_all
from .outputs import check_loss, detached
from .saved import Saved
from .session import Session
from .state import ShardState, UnitState, check_state, flatten_node, unflatten_node


def register_torch_node(
    cls: type, flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[type, Any, Any], Any]
) -> None:
    """Make `cls` a node of torch's own pytrees, which compile, checkpoint and vmap use.

    Args:
        cls: the class.
        flatten: gives the children and the static part of a node.
        unflatten: ``unflatten(cls, static, children)`` gives the node again.
    """
    torch_pytree.register_pytree_node(cls, flatten, lambda children, static: unflatten(cls, static, children))


def _flatten_for_torch(node: ShardState | UnitState) -> tuple[Any, Any]:
    """As `flatten_node`; but None is a leaf in torch's pytrees, so absent compute weights are part of the structure."""
    (main, compute), static = flatten_node(node)
    return (main, tuple(c for c in compute if c is not None)), (static, tuple(c is not None for c in compute))


def _unflatten_for_torch(cls: type, static: tuple[Any, Any], children: Any) -> Any:
    facts, present = static
    main, compute = children
    rest = iter(compute)
    return unflatten_node(cls, facts, (main, tuple(next(rest) if there else None for there in present)))


for _cls in (ShardState, UnitState):
    register_torch_node(_cls, _flatten_for_torch, _unflatten_for_torch)
register_torch_node(DBuffer, flatten_buffer, unflatten_buffer)


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    is_last_microbatch: bool = True,
    accumulate: Any = None,
    donate: bool = False,
) -> ValueAndGrad:
    """A function that computes `loss_fn` and the sharded gradient with respect to its first argument.

    The transformed function takes ``(state, *args, **kwargs)`` and gives ``(loss, grads)``: the loss of this rank's
    batch, detached, and a `ShardState` of gradients, averaged over data-parallel ranks. `state` may be a pytree of
    ShardStates; then gradients are that pytree. In a loop over microbatches make it once, and take
    ``with_options(accumulate=…, is_last_microbatch=…)`` for each.

    Communicates what the placements' table says: a unit is gathered when it is used and again in backward (the next
    one is launched ahead each time), and reduced when its last gradient is there. Reductions leave in the reverse
    order of first use on every rank; a unit whose output this rank didn't use is reduced with zeros in its place.

    Args:
        loss_fn: ``loss_fn(state, *args, **kwargs)`` gives a scalar; every rank must call `unshard` on the same
            sequence of units.
        has_aux: `loss_fn` gives ``(loss, aux)``, the transformed function ``((loss, aux), grads)``, tensors in aux
            detached (in dataclasses and subclasses of dict too; other objects are passed on as they are). Views of the
            state's own buffers (weights that had not to be gathered) are copied; not in a compiled step, where you
            clone them if it donates.
        is_last_microbatch: False defers what is reduced once a step (ddp, zero1, outer axes).
        accumulate: gradients of earlier microbatches to add to.
        donate: reuse the buffers of `accumulate`, which can't be used again. Without `accumulate`, as in the first
            microbatch of a loop, there is nothing to reuse: no effect.

    Raises:
        MfsdpError: an option that isn't True or False, or `loss_fn` that isn't a function.
        StateError: a state that is not one, was donated, or does not fit `accumulate`; a loss that is no
            floating-point scalar.
        OrderError: units used in an order that differs from the recorded one.

    Idea: Megatron-FSDP v2 (the seeds), with JAX's signature.

    >>> import torch, mfsdp_fn as mf
    >>> from mfsdp_fn.testing import single_rank
    >>> params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    >>> with single_rank() as mesh:
    ...     state = mf.shard(params, mf.plan(params, mesh, mf.zero3()))
    ...     loss, grads = mf.value_and_grad(lambda s: mf.unshard(s)["w"].square().sum())(state)
    >>> loss.item(), grads.main[0]
    (5.0, tensor([2., 4.]))
    """
    check_function("loss_fn", loss_fn, "mf.value_and_grad(loss_fn)")
    check_flag("has_aux", has_aux)
    _check_flags(is_last_microbatch, donate)
    return ValueAndGrad(loss_fn, has_aux, is_last_microbatch, accumulate, donate, Recordings())


def _check_flags(is_last_microbatch: bool, donate: bool) -> None:
    check_flag("is_last_microbatch", is_last_microbatch)
    check_flag("donate", donate)


@dataclasses.dataclass(frozen=True, eq=False)
class ValueAndGrad:
    """What `value_and_grad` returns: the transformed function, with the order of units that it has recorded."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    is_last_microbatch: bool
    accumulate: Any
    donate: bool
    recordings: Recordings

    def with_options(
        self, *, is_last_microbatch: bool = True, accumulate: Any = None, donate: bool = False
    ) -> ValueAndGrad:
        """The same function for another microbatch: it shares what was recorded (`PrefetchOrder.RECORDED`)."""
        _check_flags(is_last_microbatch, donate)
        return dataclasses.replace(self, is_last_microbatch=is_last_microbatch, accumulate=accumulate, donate=donate)

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """``(loss, grads)``, or ``((loss, aux), grads)``."""
        if torch.compiler.is_compiling():
            return _traced_value_and_grad(self, state, args, kwargs)
        session, states, template, handed = open_call(state, self.recordings)
        sinks = make_sinks(
            states, template, self.accumulate, is_last_microbatch=self.is_last_microbatch, donate=self.donate
        )
        session.sinks = sinks
        try:
            with torch.enable_grad(), torch_saved_tensors_hooks(session.pack, session.unpack):
                result = self.loss_fn(handed, *args, **kwargs)
            loss, aux = check_loss(result, self.has_aux)
        except BaseException:
            session.abandon()
            raise
        del result, handed
        if not self.recordings.checked:
            refuse_reentrant_graph([loss], session)
            self.recordings.checked = True
        _, order = session.backward([loss], [None], [])
        grads = tree.build(template, finish_all(sinks))
        self.recordings.put(states, order)
        note_call(states)
        if self.has_aux:
            return (loss.detach(), detached(aux, states)), grads
        return loss.detach(), grads


def _traced_value_and_grad(
    transform: ValueAndGrad, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """`value_and_grad` as a compiler sees it; `donate` is the compiler's own business there."""
    states = _traced_states(state)
    session = traced.Session(states)
    handed = [
        ShardState(main=one.main, compute=one.compute, spec=one.spec, root=root, gatherer=session, origin=one)
        for root, one in enumerate(states)
    ]
    with torch.enable_grad():
        result = transform.loss_fn(_like(state, handed), *args, **kwargs)
    loss, aux = check_loss(result, transform.has_aux)
    accumulate = transform.accumulate
    given: list[ShardState | None] = [None] * len(states)
    if isinstance(accumulate, dict):
        given = [accumulate[key] for key in state]
    elif accumulate is not None:
        given = [*_traced_states(accumulate)]
    grads = traced.gradients(session, loss, given, is_last_microbatch=transform.is_last_microbatch)
    # Dynamo knows this tree_map and not optree's; it refuses what is left on the graph itself.
    aux = torch_pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)
    value = (loss.detach(), aux) if transform.has_aux else loss.detach()
    return value, _like(state, grads)


def _traced_states(state: Any) -> list[ShardState]:
    """The states of one, or of a dict, list or tuple of them: in a graph no deeper trees are served."""
    if isinstance(state, ShardState):
        return [state]
    states = list(state.values()) if isinstance(state, dict) else list(state)
    for one in states:
        check_state(one, "state")
    return states


def _like(state: Any, values: list[ShardState]) -> Any:
    if isinstance(state, ShardState):
        return values[0]
    return dict(zip(state, values, strict=True)) if isinstance(state, dict) else type(state)(values)


@contextlib.contextmanager
def saved_tensors_hooks(state: Any, hooks: torch_saved_tensors_hooks) -> Iterator[None]:
    """Use other saved-tensor hooks inside a differentiated function without keeping gathered weights.

    Only autograd's innermost hooks fire, so a plain ``with torch.autograd.graph.save_on_cpu():`` inside `loss_fn`
    would save gathered weights on the CPU. This passes weights on to the tape, and the rest to `hooks`.

    Args:
        state: the state that the function was called with (or one of its units).
        hooks: for example ``torch.autograd.graph.save_on_cpu()``.

    Raises:
        StateError: `state` is not one that `value_and_grad` or `vjp` handed out, or `hooks` are none.
    """
    session = getattr(state, "gatherer", None)
    if not isinstance(session, Session):
        raise StateError(
            bad(
                "state",
                "a state outside value_and_grad",
                "the state that loss_fn was called with",
                "use this inside loss_fn",
            )
        )

    for name in ("pack_hook", "unpack_hook"):
        if not callable(getattr(hooks, name, None)):
            fix = "pass torch.autograd.graph.save_on_cpu(), say"
            raise StateError(bad("hooks", shown(hooks), "torch.autograd.graph.saved_tensors_hooks", fix))

    def pack(tensor: torch.Tensor) -> Any:
        packed = session.pack(tensor)
        return packed if isinstance(packed, Saved) else (hooks.pack_hook(tensor),)

    def unpack(saved: Any) -> torch.Tensor:
        return session.unpack(saved) if isinstance(saved, Saved) else hooks.unpack_hook(saved[0])

    with torch_saved_tensors_hooks(pack, unpack):
        yield
