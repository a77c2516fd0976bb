"""`vjp`: forward now and backward later, in one part or in two, for pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.autograd.graph import saved_tensors_hooks

from . import tree
from .activation_checkpoints import refuse_reentrant_graph
from .calls import Recordings, make_sinks, note_call, open_call
from .checks import check_function
from .errors import StateError, bad
from .gradients import finish_all
from .outputs import check_cotangents, check_outputs, detached
from .session import Session
from .state import ShardState, check_alive


class Pullback:
    """The backward of one `vjp`: all at once by a call, or input gradients now and gradients of weights later.

    ``pullback(cotangent)`` gives ``(grads, input_grads)``. Or ``pullback.inputs(cotangent)`` gives ``input_grads``
    alone, and ``pullback.weights()`` gives ``grads`` at any later time. Each may be called once.

    The split lets a pipeline stage pass input gradients on before it computes those of its weights, and do that while
    it would wait for others (zero-bubble schedules). `inputs` gathers units again as backward does and reduces
    nothing; `weights` gathers them once more and reduces. Activations live until then. The gradients of activations
    are computed in both, since autograd can't be entered in the middle of a graph: the split costs up to a third of
    forward and backward together.
    """

    def __init__(
        self,
        session: Session,
        states: list[ShardState],
        template: tree.Template,
        args: Any,
        inputs: list[torch.Tensor],
        outputs: list[Any],
        out_template: tree.Template,
    ) -> None:
        self._session, self._states, self._template = session, states, template
        self._args, self._inputs = args, inputs
        self._outputs, self._out_template = outputs, out_template
        self._cotangents: list[torch.Tensor | None] | None = None  # of the backward to come, after `inputs`
        self._used = False

    def __call__(
        self, cotangent: Any, *, is_last_microbatch: bool = True, accumulate: Any = None, donate: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """Everything: ``(grads, input_grads)``.

        Args:
            cotangent: as `out`; None is zero.
            is_last_microbatch: False defers what is reduced once a step.
            accumulate: gradients of earlier microbatches to add to.
            donate: reuse the buffers of `accumulate`.

        Raises:
            StateError: a cotangent that doesn't fit `out`, gradients that don't fit the state, a second call.
            DonatedError: the state was donated in between.
        """
        if self._used or self._cotangents is not None:
            raise _second("pullback", "call vjp again for another backward, or weights() after inputs(cotangent)")
        sinks = self._sinks(accumulate, is_last_microbatch=is_last_microbatch, donate=donate)
        cotangents = self._checked(cotangent)
        self._used = True
        outputs, self._outputs = self._outputs, []
        self._session.sinks = sinks
        found, _ = self._session.backward(outputs, cotangents, self._inputs)
        note_call(self._states)
        return tree.build(self._template, finish_all(sinks)), self._input_grads(found)

    def inputs(self, cotangent: Any) -> tuple[Any, ...]:
        """The gradients of the inputs, for each argument; those of weights wait for `weights`.

        Raises:
            StateError: a cotangent that doesn't fit `out`, a second call.
        """
        if self._used or self._cotangents is not None:
            raise _second("pullback.inputs", "call vjp again for another backward")
        cotangents = self._checked(cotangent)
        self._used = True  # unless this succeeds
        found = self._session.backward_to_inputs(self._outputs, cotangents, self._inputs)
        # Copies: the caller may receive the next cotangent into the same memory before `weights`.
        self._cotangents, self._used = [None if ct is None else ct.clone() for ct in cotangents], False
        return self._input_grads(found)

    def weights(self, *, is_last_microbatch: bool = True, accumulate: Any = None, donate: bool = False) -> Any:
        """The gradients of the state, after `inputs`; arguments as those of a call.

        Raises:
            StateError: `inputs` was not called, gradients that don't fit the state, a second call.
        """
        if self._used:
            raise _second("pullback.weights", "call vjp again for another backward")
        if self._cotangents is None:
            raise StateError(
                bad(
                    "pullback.weights",
                    "a call before inputs(cotangent)",
                    "input gradients first",
                    "call pullback.inputs(cotangent), or pullback(cotangent) for both at once",
                )
            )
        self._check_states()
        sinks = self._sinks(accumulate, is_last_microbatch=is_last_microbatch, donate=donate)
        self._used = True
        outputs, self._outputs, cotangents = self._outputs, [], self._cotangents
        self._cotangents = None
        self._session.sinks = sinks
        self._session.backward(outputs, cotangents, [])
        note_call(self._states)
        return tree.build(self._template, finish_all(sinks))

    def _check_states(self) -> None:
        """Backward reads the weights again: a step that reused their buffers must come after it."""
        for state in self._states:
            check_alive(state, "state")

    def _sinks(self, accumulate: Any, **options: bool) -> Any:
        return make_sinks(self._states, self._template, accumulate, **options)

    def _checked(self, cotangent: Any) -> list[torch.Tensor | None]:
        """One cotangent an output that is a tensor; outputs become those alone."""
        self._check_states()
        given = tree.flatten_like(self._out_template, cotangent, "cotangent")
        check_cotangents(self._outputs, given)
        pairs = [(out, given[number]) for number, out in enumerate(self._outputs) if isinstance(out, torch.Tensor)]
        self._outputs = [out for out, _ in pairs]
        refuse_reentrant_graph(self._outputs, self._session)
        return [torch.zeros_like(out) if ct is None else ct for out, ct in pairs]

    def _input_grads(self, found: list[torch.Tensor | None]) -> tuple[Any, ...]:
        rest = iter(found)
        input_grads: Any = optree.tree_map(
            lambda value: next(rest) if isinstance(value, torch.Tensor) and value.is_floating_point() else None,
            self._args,
            none_is_leaf=True,
        )
        return input_grads


def _second(argument: str, fix: str) -> StateError:
    return StateError(bad(argument, "a second call", "one call", fix))


def vjp(fn: Callable[..., Any], state: Any, *args: Any) -> tuple[Any, Pullback]:
    """Run `fn(state, *args)` now and its backward later: for pipelines, and for backwards in another order.

    Gives ``(out, pullback)``. ``pullback(cotangent, *, is_last_microbatch=True, accumulate=None, donate=False)``
    gives ``(grads, input_grads)``: reduced gradients as `value_and_grad` does with those options, and for each of
    `args` the tree of gradients of its floating-point tensors (None elsewhere). The cotangent has the structure of
    `out`, whose tensors are detached. A pullback can be called once, or in two parts: see `Pullback`. Communicates
    what `value_and_grad` does, the backward half in the pullback; calls of `vjp` and pullbacks must have one order on
    every rank that shares a state.

    Raises:
        StateError: as `value_and_grad`; outputs in objects that optree doesn't know; a pullback called twice, or a
            cotangent that doesn't fit; a call inside a compiled step.

    >>> import torch, mfsdp_fn as mf
    >>> from mfsdp_fn.testing import single_rank
    >>> params = {"w": torch.tensor([[1.0, 2.0]], requires_grad=True)}
    >>> with single_rank() as mesh:
    ...     state = mf.shard(params, mf.plan(params, mesh, mf.zero3()))
    ...     out, pullback = mf.vjp(lambda s, x: x @ mf.unshard(s)["w"].T, state, torch.tensor([[3.0, 4.0]]))
    ...     (input_grad,) = pullback.inputs(torch.ones(1, 1))  # this could be sent to the stage before, and then
    ...     grads = pullback.weights()
    >>> out, input_grad, grads.main[0]
    (tensor([[11.]]), tensor([[1., 2.]]), tensor([3., 4.]))
    """
    check_function("fn", fn, "mf.vjp(fn, state)")
    if torch.compiler.is_compiling():
        raise StateError(
            bad("fn", "vjp inside a compiled step", "an eager call", "use value_and_grad there, or compile `fn` itself")
        )
    recordings = Recordings()
    session, states, template, handed = open_call(state, recordings)
    inputs: list[torch.Tensor] = []

    def enter(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        inputs.append(value.detach().requires_grad_())
        return inputs[-1]

    given: Any = args  # optree's annotations know no tuple of anything
    entered: Any = optree.tree_map(enter, given, none_is_leaf=True)
    try:
        with torch.enable_grad(), saved_tensors_hooks(session.pack, session.unpack):
            out = fn(handed, *entered)
        session.tape.drain()
        leaves, _, out_template = tree.flatten(out)
        check_outputs(leaves)
    except BaseException:
        session.abandon()
        raise
    later = Pullback(session, states, template, given, inputs, leaves, out_template)
    return tree.build(out_template, [detached(leaf, states) for leaf in leaves]), later
