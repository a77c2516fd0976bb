"""One call of a transformed function: how it enters autograd, what it saves for backward, and its backward.

Every unit that takes part enters autograd through one node (`_Enter`, fed by a 0-D anchor that requires grad: state
buffers never do) and is used through others (`_Use`), one a call of `unshard`. A `_Use` packs the gradients of one
use; when all of them have, autograd reaches the `_Enter`, and the unit is reduced, once.

Private torch API here, with a test that fails when it goes: `UntypedStorage._cdata` and
`torch.multiprocessing.reductions.StorageWeakRef` (which gathered buffer does a saved view belong to).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from .activation_checkpoints import checkpointed_region, reentrant_error, refuse_reentrant_checkpoint
from .errors import StateError, bad
from .gradients import GradientSink
from .runtime import ExecutionOrder
from .saved import Kept, Saved
from .state import ShardState, UnitState
from .tape import Tape
from .tape_record import Record, TapePhase
from .tensor_parallel import local_of, parallel_of, whole_of
from .unsharding import unit_values, whole_views


class _Enter(torch.autograd.Function):
    """Where a unit's gradients leave autograd, all uses done."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, session: Session, record: Record) -> torch.Tensor:
        ctx.session, ctx.record = session, record
        return torch.empty_like(anchor)  # only the edge matters

    @staticmethod
    @once_differentiable
    # The base takes any number of gradients; this node has one output, and `once_differentiable` names nothing.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        ctx.session.tape.fire(ctx.record)
        return grad, None, None


class _Use(torch.autograd.Function):
    """One use of a unit: gathered buffers to parameter views, and parameter gradients to the packed buffer."""

    @staticmethod
    def forward(
        ctx: Any, entry: torch.Tensor, session: Session, record: Record, flats: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.session, ctx.record = session, record
        ctx.set_materialize_grads(False)
        per_group = [whole_views(group, flat) for group, flat in zip(record.groups, flats, strict=True)]
        pairs = zip(record.groups, per_group, strict=True)
        ctx.mark_non_differentiable(*(view for group, views in pairs if not group.requires_grad for view in views))
        return tuple(view for views in per_group for view in views)

    @staticmethod
    @once_differentiable
    # `once_differentiable` is annotated so that `ctx` loses its name.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        ctx.session.collect(ctx.record, grads)
        return ctx.session.zero, None, None, None


class Session:
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
        """Launch a unit's gathers ahead of its use."""
        self.tape.launch(self.tape.record_of(unit))

    def gather(self, unit: UnitState) -> dict[int, torch.Tensor]:
        """One use of a unit: its parameters by leaf number."""
        record = self.tape.record_of(unit)
        grad_enabled = torch.is_grad_enabled()
        if not grad_enabled:
            refuse_reentrant_checkpoint()
        flats = self.tape.take(record)
        if grad_enabled and self.tape.phase is TapePhase.FORWARD:
            self.tape.note_use(record, checkpointed_region())
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
        """What is saved instead of `tensor`: of a gathered weight a `Saved`, of anything else itself, `Kept`."""
        local = local_of(tensor)  # DTensors have no memory of their own
        found = self.storages.get(local.untyped_storage()._cdata)
        if found is None or self.tape.phase is not TapePhase.FORWARD:
            return Kept(tensor)
        _, record, position, saved = found
        saved[0] = True
        assert record.slot is not None
        return Saved(record, record.slot, position, self.tape.now, local.detach(), parallel_of(tensor))

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, its weights gathered again.

        Raises:
            StateError: the call has ended, or a saved tensor was written to.
        """
        if isinstance(saved, Kept):
            return saved.get()
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
        view = flat.as_strided(saved.shape, saved.stride, saved.offset)
        return view if saved.parallel is None else whole_of(saved.parallel, view)

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
        """Run autograd and the rest of the walk; gradients of `inputs`. The last reductions may be in flight."""
        try:
            found = self._run(outputs, cotangents, [self.anchor, *inputs], reduce=True)
            order = self.tape.finish()
        except BaseException:
            self.abandon()
            raise
        self._close()
        return found[1:], order

    def backward_to_inputs(
        self, outputs: list[torch.Tensor], cotangents: list[torch.Tensor | None], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run autograd for the gradients of `inputs` alone: gathers, reduces nothing, and leaves `backward` to come."""
        try:
            found = self._run(outputs, cotangents, inputs, reduce=False)
            self.tape.pause()
        except BaseException:
            self.abandon()
            raise
        return found

    def _run(
        self,
        outputs: list[torch.Tensor],
        cotangents: list[torch.Tensor | None],
        inputs: list[torch.Tensor],
        *,
        reduce: bool,
    ) -> list[torch.Tensor | None]:
        for record, saved in self.uses:
            record.bare |= not saved[0]
        self.storages.clear()
        self.tape.begin_backward(reduce=reduce)
        pairs = [(out, ct) for out, ct in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if not pairs or not inputs:
            return [None] * len(inputs)
        try:
            found = torch.autograd.grad(
                [out for out, _ in pairs],
                inputs,
                [ct for _, ct in pairs],
                allow_unused=True,
                retain_graph=not reduce,
            )
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise reentrant_error() from error
            raise
        return list(found)

    def abandon(self) -> None:
        """Wait for everything launched; nothing more can be done with this call."""
        self.tape.close()
        for sink in self.sinks:
            sink.flights.drain()
        self._close()

    def _close(self) -> None:
        self.tape.close()
        self.sinks = []
        self.storages.clear()
        self.uses.clear()


@functools.cache
def opaque_session() -> type[Session]:
    """The session for programs that compile something: a compiled loss breaks its graph at each `unshard`.

    Not the only one, since `torch.compiler.disable` imports the compiler, which takes seconds.
    """
    disable: Any = functools.partial(
        torch.compiler.disable, reason="unshard inside value_and_grad is eager; compile the whole of it with mf.compile"
    )

    class OpaqueSession(Session):
        launch = disable(Session.launch)
        gather = disable(Session.gather)

    return OpaqueSession
