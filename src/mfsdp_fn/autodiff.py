"""`value_and_grad` and `vjp` of functions of sharded states.

Every unit that takes part enters autograd through one node (`_Enter`, fed by a 0-D anchor that requires grad: state
buffers never do) and is used through others (`_Use`), one a call of `unshard`. A `_Use` packs the gradients of one
use; when all of them have, autograd reaches the `_Enter`, and the unit is reduced, once.

Private torch API here, each with a test that fails when it goes: `UntypedStorage._cdata` and
`torch.multiprocessing.reductions.StorageWeakRef` (which gathered buffer does a saved view belong to),
`torch._C._autograd._top_saved_tensors_default_hooks` (which units does one checkpoint compute again together).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks as torch_saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as torch_pytree

from . import traced, tree
from .errors import MfsdpError, StateError, bad
from .gradients import GradientSink
from .runtime import ExecutionOrder
from .state import ShardState, Stage, UnitState, check_state, flatten_node, unflatten_node
from .tape import Record, Slot, Tape, TapePhase
from .transforms import unit_values, whole_views


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


for _cls in (ShardState, UnitState):
    register_torch_node(_cls, flatten_node, unflatten_node)


class _Enter(torch.autograd.Function):
    """Where a unit's gradients leave autograd, all uses done."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, session: _Session, record: Record) -> torch.Tensor:
        ctx.session, ctx.record = session, record
        return torch.empty_like(anchor)  # only the edge matters

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.session.tape.fire(ctx.record)
        return grad, None, None


class _Use(torch.autograd.Function):
    """One use of a unit: gathered buffers to parameter views, and parameter gradients to the packed buffer."""

    @staticmethod
    def forward(
        ctx: Any, entry: torch.Tensor, session: _Session, record: Record, flats: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.session, ctx.record = session, record
        ctx.set_materialize_grads(False)
        per_group = [whole_views(group, flat) for group, flat in zip(record.groups, flats, strict=True)]
        pairs = zip(record.groups, per_group, strict=True)
        ctx.mark_non_differentiable(*(view for group, views in pairs if not group.requires_grad for view in views))
        return tuple(view for views in per_group for view in views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        ctx.session.collect(ctx.record, grads)
        return ctx.session.zero, None, None, None


class _Saved:
    """A view saved for backward: which buffer, its geometry in it, and how many uses of units there had been."""

    __slots__ = ("dtype", "number", "offset", "position", "record", "shape", "slot", "stride")

    def __init__(self, record: Record, slot: Slot, position: int, number: int, view: torch.Tensor) -> None:
        self.record, self.slot, self.position, self.number = record, slot, position, number
        self.dtype, self.shape, self.stride = view.dtype, view.shape, view.stride()
        self.offset = view.storage_offset()


class _Session:
    """One call: the tape, the gradients' destination, and the hooks that remember less.

    It is the `Gatherer` in the states that the user's function gets, so it travels with them: no context variable
    (CUDA's backward thread would not see it) and no global.
    """

    def __init__(self, states: list[ShardState], recorded: ExecutionOrder | None) -> None:
        self.sinks: list[GradientSink] = []
        self.tape = Tape(states, self._reduce_unit, recorded)
        device = states[0].spec.device
        self.zero = torch.zeros((), device=device)
        self.anchor = states[0].spec.anchor
        # Gathered storages by address. The weak reference keeps an address from being used again.
        self.storages: dict[int, tuple[StorageWeakRef, Record, int, list[bool]]] = {}
        self.uses: list[tuple[Record, list[bool]]] = []

    def _reduce_unit(self, key: tuple[int, str]) -> None:
        self.sinks[key[0]].issue(key[1])

    # The Gatherer

    def launch(self, unit: UnitState) -> None:
        self.tape.launch(self.tape.record_of(unit))

    def gather(self, unit: UnitState) -> dict[int, torch.Tensor]:
        record = self.tape.record_of(unit)
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled:
            _refuse_reentrant_checkpoint()
        flats = self.tape.take(record)
        if grad_enabled and self.tape.phase is TapePhase.FORWARD:
            self.tape.note_use(record, _checkpointed_region())
            flats = self._watch(record, flats)
        if grad_enabled and record.trainable:
            if record.entry is None:
                record.entry = _Enter.apply(self.anchor, self, record)
            views = list(_Use.apply(record.entry, self, record, flats))
        else:
            views = [
                view for group, flat in zip(record.groups, flats, strict=True) for view in whole_views(group, flat)
            ]
        by_group: dict[int, list[torch.Tensor]] = {}
        for number, group in zip(record.numbers, record.groups, strict=True):
            by_group[number], views = views[: len(group.views)], views[len(group.views) :]
        return unit_values(record.unit.spec, record.unit.unit, by_group)

    def _watch(self, record: Record, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """Recognise views of these buffers when they are saved for backward. Gives the buffers to take views of."""
        if not record.gathered or record.kept:
            return flats
        saved, watched = [False], []
        self.uses.append((record, saved))
        for position, (group, flat) in enumerate(zip(record.groups, flats, strict=True)):
            storage = flat.untyped_storage()
            # Only the function's views refer to this alias (as their base), so that it tells whether the function
            # holds any. The buffer doesn't: a backend's threads let go of it at a time of their own on each rank.
            alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
            watched.append(alias.set_(storage, flat.storage_offset(), flat.shape, flat.stride()))
            if group.gathers and storage.nbytes():  # empty storages all look alike
                self.storages[storage._cdata] = (StorageWeakRef(storage), record, position, saved)
                self.tape.holding.append((record, weakref.ref(watched[-1])))
        return watched

    # The hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        found = self.storages.get(tensor.untyped_storage()._cdata)
        if found is None or self.tape.phase is not TapePhase.FORWARD:
            return tensor
        _, record, position, saved = found
        saved[0] = True
        assert record.slot is not None
        return _Saved(record, record.slot, position, self.tape.now, tensor.detach())

    def unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        if self.tape.phase is TapePhase.CLOSED:
            raise StateError(
                bad(
                    "loss_fn",
                    "a backward through its graph after the call had ended",
                    "a graph used inside the call",
                    "return what you need as aux, or use vjp",
                )
            )
        flat = self.tape.weights(saved.record, saved.slot, saved.number, saved.position)
        if flat.dtype != saved.dtype:
            flat = flat.view(saved.dtype)
        return flat.as_strided(saved.shape, saved.stride, saved.offset)

    # Backward

    def collect(self, record: Record, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Pack the gradients of one use."""
        if self.tape.phase is not TapePhase.BACKWARD:
            raise StateError(
                bad(
                    "loss_fn",
                    "a backward through unshard inside it",
                    "a function that returns its loss",
                    "differentiate with value_and_grad or vjp; inside, only with respect to activations",
                )
            )
        start = 0
        for number, group in zip(record.numbers, record.groups, strict=True):
            mine = grads[start : start + len(group.views)]
            start += len(group.views)
            if group.requires_grad:
                self.sinks[record.key[0]].collect(number, dict(enumerate(mine)))

    def backward(
        self, outputs: list[torch.Tensor], cotangents: list[torch.Tensor | None], inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], ExecutionOrder]:
        """Run autograd and the rest of the walk; gradients of `inputs`."""
        for record, saved in self.uses:
            record.bare |= not saved[0]
        self.storages.clear()
        pairs = [(out, ct) for out, ct in zip(outputs, cotangents, strict=True) if out.requires_grad]
        try:
            self.tape.begin_backward()
            found: list[torch.Tensor | None] = [None] * len(inputs)
            if pairs:
                _, *found = torch.autograd.grad(
                    [out for out, _ in pairs],
                    [self.anchor, *inputs],
                    [ct for _, ct in pairs],
                    allow_unused=True,
                )
            return found, self.tape.finish()
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise _reentrant_error() from error
            raise
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Wait for everything launched; nothing more can be done with this call."""
        self.tape.close()
        for sink in self.sinks:
            sink.drain()
        self.sinks = []
        self.storages.clear()
        self.uses.clear()


def _reentrant_error() -> MfsdpError:
    return StateError(
        bad(
            "loss_fn",
            "torch.utils.checkpoint.checkpoint(…, use_reentrant=True)",
            "use_reentrant=False",
            "pass use_reentrant=False: the reentrant kind can't run under autograd.grad",
        )
    )


def _refuse_reentrant_checkpoint() -> None:
    """Reentrant checkpointing runs forward without grad, which by itself is legitimate: so look who calls."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.endswith("checkpoint.py") and "torch" in code.co_filename:
            raise _reentrant_error()
        frame = frame.f_back


def _checkpointed_region() -> object | None:
    """What identifies the non-reentrant checkpoint that forward is in; None outside one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return None
    return hooks[0]


def _split(state: Any, argument: str) -> tuple[list[ShardState], tree.Template]:
    """The ShardStates of a pytree of them."""
    states, paths, template = tree.flatten(state, is_leaf=lambda node: isinstance(node, ShardState))
    for leaf, path in zip(states, paths, strict=True):
        check_state(leaf, ".".join((argument, *path)))
    if not states:
        raise StateError(bad(argument, "no state", "a ShardState, or a pytree of them", "pass shard(params, spec)"))
    return states, template


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


class _Recordings:
    """The sequence of units that a transformed function saw first, by the digests of its states."""

    def __init__(self) -> None:
        self.orders: dict[tuple[str, ...], ExecutionOrder] = {}

    def get(self, states: list[ShardState]) -> ExecutionOrder | None:
        return self.orders.get(tuple(state.spec.digest() for state in states))

    def put(self, states: list[ShardState], order: ExecutionOrder) -> None:
        self.orders.setdefault(tuple(state.spec.digest() for state in states), order)


def _open(state: Any, recordings: _Recordings) -> tuple[_Session, list[ShardState], tree.Template, Any]:
    """A session for `state`, and the state that the user's function is called with."""
    states, template = _split(state, "state")
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
    session = _Session(states, recorded)
    handed = [
        ShardState(main=one.main, compute=one.compute, spec=one.spec, root=root, gatherer=session, origin=one)
        for root, one in enumerate(states)
    ]
    return session, states, template, tree.build(template, handed)


def _make_sinks(
    states: list[ShardState],
    template: tree.Template,
    accumulate: Any,
    *,
    is_last_microbatch: bool,
    donate: bool,
) -> list[GradientSink]:
    given: list[ShardState | None] = [None] * len(states)
    if accumulate is not None:
        found, _ = _split(accumulate, "accumulate")
        if len(found) != len(states):
            raise StateError(
                bad(
                    "accumulate",
                    f"{len(found)} states",
                    f"{len(states)}, as `state`",
                    "pass the last call's gradients",
                )
            )
        given = list(found)
    return [
        GradientSink(one, total, is_last_microbatch=is_last_microbatch, donate=donate)
        for one, total in zip(states, given, strict=True)
    ]


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
            detached.
        is_last_microbatch: False defers what is reduced once a step (ddp, zero1, outer axes).
        accumulate: gradients of earlier microbatches to add to.
        donate: reuse the buffers of `accumulate`, which can't be used again.

    Raises:
        StateError: a state that is not one, was donated, or does not fit `accumulate`; a loss that is no scalar.
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
    return ValueAndGrad(loss_fn, has_aux, is_last_microbatch, accumulate, donate, _Recordings())


@dataclasses.dataclass(frozen=True, eq=False)
class ValueAndGrad:
    """What `value_and_grad` returns: the transformed function, with the order of units that it has recorded."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    is_last_microbatch: bool
    accumulate: Any
    donate: bool
    recordings: _Recordings

    def with_options(
        self, *, is_last_microbatch: bool = True, accumulate: Any = None, donate: bool = False
    ) -> ValueAndGrad:
        """The same function for another microbatch: it shares what was recorded (`PrefetchOrder.RECORDED`)."""
        return dataclasses.replace(self, is_last_microbatch=is_last_microbatch, accumulate=accumulate, donate=donate)

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """``(loss, grads)``, or ``((loss, aux), grads)``."""
        if torch.compiler.is_compiling():
            return _traced_value_and_grad(self, state, args, kwargs)
        session, states, template, handed = _open(state, self.recordings)
        sinks = _make_sinks(
            states, template, self.accumulate, is_last_microbatch=self.is_last_microbatch, donate=self.donate
        )
        session.sinks = sinks
        try:
            with torch.enable_grad(), torch_saved_tensors_hooks(session.pack, session.unpack):
                result = self.loss_fn(handed, *args, **kwargs)
            loss, aux = _check_loss(result, self.has_aux)
        except BaseException:
            session.abandon()
            raise
        del result, handed
        _, order = session.backward([loss], [None], [])
        grads = tree.build(template, [sink.finish() for sink in sinks])
        self.recordings.put(states, order)
        if self.has_aux:
            return (loss.detach(), optree.tree_map(_detach, aux, none_is_leaf=True)), grads
        return loss.detach(), grads


def _traced_value_and_grad(
    transform: ValueAndGrad, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """`value_and_grad` as a compiler sees it; `donate` is the compiler's own business there."""
    single = isinstance(state, ShardState)
    states = [state] if single else list(state)
    session = traced.Session(states)
    handed = [
        ShardState(main=one.main, compute=one.compute, spec=one.spec, root=root, gatherer=session, origin=one)
        for root, one in enumerate(states)
    ]
    with torch.enable_grad():
        result = transform.loss_fn(handed[0] if single else type(state)(handed), *args, **kwargs)
    loss, aux = _check_loss(result, transform.has_aux)
    accumulate = transform.accumulate
    given = [None] * len(states) if accumulate is None else [accumulate] if single else list(accumulate)
    grads = traced.gradients(session, loss, given, is_last_microbatch=transform.is_last_microbatch)
    value = (loss.detach(), aux) if transform.has_aux else loss.detach()
    return value, grads[0] if single else type(state)(grads)


def _check_loss(result: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise StateError(
            bad(
                "loss_fn",
                f"a function returning a {type(result).__name__}",
                "(loss, aux)",
                "return both, or leave out has_aux=True",
            )
        )
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise StateError(
            bad(
                "loss_fn",
                f"a function returning {got}",
                "a scalar tensor",
                "reduce the loss, or pass has_aux=True if it returns (loss, aux)",
            )
        )
    return loss, aux


Pullback = Callable[..., tuple[Any, tuple[Any, ...]]]


def vjp(fn: Callable[..., Any], state: Any, *args: Any) -> tuple[Any, Pullback]:
    """Run `fn(state, *args)` now and its backward later: for pipelines, and for backwards in another order.

    Gives ``(out, pullback)``. ``pullback(cotangent, *, is_last_microbatch=True, accumulate=None, donate=False)``
    gives ``(grads, input_grads)``: reduced gradients as `value_and_grad` does, and for each of `args` the tree of
    gradients of its floating-point tensors (None elsewhere). The cotangent has the structure of `out`, whose
    tensors are detached. A pullback can be called once. Communicates what `value_and_grad` does, the backward half
    in the pullback; calls of `vjp` and pullbacks must have one order on every rank.

    Raises:
        StateError: as `value_and_grad`; a pullback called twice.
    """
    recordings = _Recordings()
    session, states, template, handed = _open(state, recordings)
    inputs: list[torch.Tensor] = []

    def enter(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        inputs.append(value.detach().requires_grad_())
        return inputs[-1]

    entered = optree.tree_map(enter, args, none_is_leaf=True)
    try:
        with torch.enable_grad(), torch_saved_tensors_hooks(session.pack, session.unpack):
            out = fn(handed, *entered)
        session.tape.drain()
    except BaseException:
        session.abandon()
        raise
    leaves, _, out_template = tree.flatten(out)
    used = False

    def pullback(
        cotangent: Any, *, is_last_microbatch: bool = True, accumulate: Any = None, donate: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        nonlocal used, leaves
        if used:
            raise StateError(bad("pullback", "a second call", "one call", "call vjp again for another backward"))
        sinks = _make_sinks(states, template, accumulate, is_last_microbatch=is_last_microbatch, donate=donate)
        session.sinks = sinks
        cotangents = tree.flatten_like(out_template, cotangent, "cotangent")
        used = True
        outputs, leaves = leaves, []
        pairs = [(o, cotangents[i]) for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)]
        pairs = [(o, torch.zeros_like(o) if ct is None else ct) for o, ct in pairs]
        found, _ = session.backward([o for o, _ in pairs], [ct for _, ct in pairs], inputs)
        grads = tree.build(template, [sink.finish() for sink in sinks])
        rest = iter(found)
        input_grads = optree.tree_map(
            lambda value: next(rest) if isinstance(value, torch.Tensor) and value.is_floating_point() else None,
            args,
            none_is_leaf=True,
        )
        return grads, input_grads

    return tree.build(out_template, [_detach(leaf) for leaf in leaves]), pullback


@contextlib.contextmanager
def saved_tensors_hooks(state: Any, hooks: torch_saved_tensors_hooks) -> Iterator[None]:
    """Use other saved-tensor hooks inside a differentiated function without keeping gathered weights.

    Only autograd's innermost hooks fire, so a plain ``with torch.autograd.graph.save_on_cpu():`` inside `loss_fn`
    would save gathered weights on the CPU. This passes weights on to the tape, and the rest to `hooks`.

    Args:
        state: the state that the function was called with (or one of its units).
        hooks: for example ``torch.autograd.graph.save_on_cpu()``.

    Raises:
        StateError: `state` is not one that `value_and_grad` or `vjp` handed out.
    """
    session = getattr(state, "gatherer", None)
    if not isinstance(session, _Session):
        raise StateError(
            bad(
                "state",
                "a state outside value_and_grad",
                "the state that loss_fn was called with",
                "use this inside loss_fn",
            )
        )

    def pack(tensor: torch.Tensor) -> Any:
        packed = session.pack(tensor)
        return packed if isinstance(packed, _Saved) else (hooks.pack_hook(packed),)

    def unpack(saved: Any) -> torch.Tensor:
        return session.unpack(saved) if isinstance(saved, _Saved) else hooks.unpack_hook(saved[0])

    with torch_saved_tensors_hooks(pack, unpack):
        yield
