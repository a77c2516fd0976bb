"""What one forward remembers so that its backward issues the same collectives in the same order on every rank.

Forward gathers a unit when it is used and the next one ahead of its use. Backward gathers the units again in
reverse. Order is the difficulty: autograd runs only what this rank's loss depends on, and two ranks may depend on
different units, or use what they gathered in different orders. So both orders of backward are functions of the
sequence of `unshard` calls alone, which is the same on every rank: units are *left* (their gradients reduced) latest
first use first, and *entered* (their weights gathered) latest last use first, the root units before all others
(their weights are commonly gathered once and used at both ends of a model). How the two interleave follows from what
could be used: before a unit is left, every unit is entered whose gathered weights the function still held when it was
first used, and every unit that is computed again together with it. What is entered early costs memory, not
correctness: let go of a unit's weights before the next unit, and where a later part of the model uses them again,
unshard again.

Forward numbers the `unshard` calls (`tick`), and a saved view remembers how many there had been. Autograd runs nodes
latest first, so when a node that saved after call n asks for weights, whatever came after call n has run: units first
used later are left before it gets them, with zeros where no gradient came.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from .errors import OrderError, StateError, bad
from .runtime import ExecutionOrder, Phase, PrefetchOrder
from .state import ShardState, UnitState, check_alive
from .tape_record import Record, Slot, TapePhase


def _refuse(key: tuple[int, str]) -> None:
    raise AssertionError(f"unit {key} reduced after its call was closed")


class Tape:
    """One call's sequence of units: launches gathers ahead, and walks backward in one order on every rank."""

    def __init__(
        self,
        states: Sequence[ShardState],
        reduce_unit: Callable[[tuple[int, str]], None],
        recorded: ExecutionOrder | None,
    ) -> None:
        self.phase = TapePhase.FORWARD
        self.reduces = True
        self.records: dict[tuple[int, str], Record] = {}
        for root, state in enumerate(states):
            for unit in state.spec.units:
                self.records[root, unit] = Record((root, unit), state[unit])
        self.reduce_unit = reduce_unit
        self.runtime = states[0].spec.runtime
        self.replays = self.runtime.prefetch_order is PrefetchOrder.RECORDED
        self.recorded = recorded
        self.sequence: list[tuple[int, str]] = []
        self.now = 0
        self.entering: list[Record] = []  # what backward has yet to gather, and
        self.leaving: list[Record] = []  # has yet to reduce; both last first
        self.holding: list[tuple[Record, weakref.ref[torch.Tensor]]] = []  # what forward gathered and may still hold
        self.region: object | None = None  # the checkpointed region in which a unit was used last, and
        self.region_records: list[Record] = []  # its units
        # Registration order, for "which unit comes next"; a recording replaces it.
        self.registered = [record for record in self.records.values() if record.gathered]

    def tick(self) -> int:
        """The next number."""
        self.now += 1
        return self.now

    def record_of(self, unit: UnitState) -> Record:
        """The record of a unit, checked to be usable now."""
        check_alive(unit, "unit")
        if self.phase is TapePhase.CLOSED:
            raise StateError(
                bad(
                    "unit",
                    f"unit {unit.unit!r} of a state whose call has ended",
                    "a state that is in use",
                    "don't keep the state that the function was called with",
                )
            )
        return self.records[unit.root, unit.unit]

    # Forward

    def launch(self, record: Record) -> None:
        """Gather ahead of use, at the caller's word."""
        if self.phase is TapePhase.FORWARD and record.gathered and record.ahead is None and record.held is None:
            record.ahead = record.launch(Phase.FORWARD)

    def take(self, record: Record) -> list[torch.Tensor]:
        """The gathered buffers of a unit that is used now; launches what comes next."""
        if self.phase is TapePhase.BACKWARD:
            return self._retake(record)
        self._check_replay(record)
        self.sequence.append(record.key)
        if record.held is not None:
            flats = record.held
        else:
            pendings = record.ahead or record.launch(Phase.FORWARD)
            record.ahead = None
            flats = [pending.wait() for pending in pendings]
            if record.kept:
                record.held = flats  # not left to saved views: activation checkpointing saves none
        self._launch_next(record)
        return flats

    def _check_replay(self, record: Record) -> None:
        if self.recorded is None:
            return
        place = len(self.sequence)
        expected = self.recorded.units[place] if place < len(self.recorded.units) else None
        if expected != record.key:
            raise OrderError(
                bad(
                    "unit",
                    f"{record.key[1]!r} as use number {place} of the call",
                    f"{'nothing more' if expected is None else repr(expected[1])}, as recorded",
                    "use PrefetchOrder.REGISTRATION for functions whose sequence of units changes",
                )
            )

    def _launch_next(self, record: Record) -> None:
        if self.replays:
            if self.recorded is None:
                return  # recording: gather on demand
            following = [self.records[key] for key in self.recorded.units[len(self.sequence) :]]
        elif record in self.registered:
            following = self.registered[self.registered.index(record) + 1 :]
        else:
            following = self.registered
        used = set(self.sequence) if not self.replays else {record.key}
        budget = self.runtime.forward_prefetch
        ahead = sum(other.elements for other in self.records.values() if other.ahead is not None)
        for other in following:
            if not other.gathered or other.held is not None or other.key in used:
                if self.replays and other.gathered and other.held is None:
                    break  # its next use comes before anything later; it can't be gathered twice ahead
                continue
            if budget is None:
                self.launch(other)
                return
            if other.ahead is None:
                ahead += other.elements
            if ahead > budget:
                return
            self.launch(other)

    def note_use(self, record: Record, region: object | None) -> None:
        """Number a use that gradients can flow through; `region` is one object for what is computed again together."""
        self.tick()
        if region is None or region is not self.region:
            self.region, self.region_records = region, []
        self.region_records.append(record)
        for other in self.region_records:
            other.reach = other.region_end = self.now
        record.last = self.now
        if record.opened < 0:
            record.opened = record.last
        self.holding = [(other, held) for other, held in self.holding if held() is not None]
        for other, _ in self.holding:
            other.reach = self.now

    # Backward

    def begin_backward(self, *, reduce: bool) -> None:
        """Forward is over: fix the walk. One that doesn't reduce ends with `pause`, and another one follows."""
        if self.recorded is not None and len(self.sequence) < len(self.recorded.units):
            raise OrderError(
                bad(
                    "loss_fn",
                    f"a call that ended after {len(self.sequence)} uses of units",
                    f"{len(self.recorded.units)} uses, as recorded",
                    "use PrefetchOrder.REGISTRATION for functions whose sequence of units changes",
                )
            )
        self.drain()
        self._forget_forward()
        self.phase = TapePhase.BACKWARD
        self.reduces = reduce
        used = [record for record in self.records.values() if record.opened > 0]
        self.entering = sorted(used, key=lambda record: (not record.key[1], record.last))
        self.leaving = sorted(used, key=lambda record: record.opened)
        for record in used:
            record.launched = record.left = False
            if not record.bare:
                record.slot = None  # its saved views hold it from here on

    def advance(self, number: int) -> None:
        """Leave the units that were first used after call `number`; enter on the way what is due by then."""
        while self.leaving and self.leaving[-1].opened > number:
            record = self.leaving.pop()
            while any(not other.key[1] or other.reach >= record.opened for other in self.entering):
                self._enter()
            self._leave(record)

    def _enter(self) -> None:
        """Gather the next unit, and launch what comes after it."""
        record = self.entering.pop()
        self._relaunch(record)
        budget, ahead = self.runtime.backward_prefetch, 0
        for other in reversed(self.entering):
            if not other.gathered or other.kept:
                continue
            ahead += other.elements
            if budget is not None and ahead > budget:
                break
            self._relaunch(other)
            if budget is None:
                break
        for pending in record.unclaimed or ():  # only other ranks need it
            pending.wait()
        record.unclaimed = None

    def _enter_up_to(self, record: Record) -> None:
        """Gather a unit that is needed now, and first whatever comes before it in the order of all ranks."""
        while record in self.entering:
            self._enter()

    def _relaunch(self, record: Record) -> None:
        """Gather for backward, whether or not this rank needs it: other ranks may."""
        if record.launched or not record.gathered or record.kept:
            return
        record.launched = True
        pendings, slot = record.launch(Phase.BACKWARD), record.slot_ref()
        if slot is None:
            record.unclaimed = pendings
        else:
            slot.pendings = pendings
            record.slot = slot  # until it is waited for: autograd may free the saved views without reading one

    def _leave(self, record: Record) -> None:
        record.left = True
        if not self.reduces:
            record.rest()
            return
        self._release(record)
        if record.trainable:
            self.reduce_unit(record.key)

    def _release(self, record: Record) -> None:
        slot, record.slot, record.held = record.slot_ref(), None, None
        if slot is not None and slot.pendings is not None:
            slot.get()
        for pending in record.unclaimed or ():
            pending.wait()
        record.unclaimed = None

    def fire(self, record: Record) -> None:
        """All of this rank's gradients of the unit have been collected."""
        if record.left:
            raise OrderError(
                bad(
                    "loss_fn",
                    f"gradients of unit {record.key[1]!r} after later units had been reduced",
                    "a backward that runs latest first",
                    "keep the model's forward on one device",
                )
            )
        self.advance(record.opened - 1)

    def weights(self, record: Record, slot: Slot, number: int, position: int) -> torch.Tensor:
        """A gathered buffer that a view saved after call `number` belongs to."""
        if self.phase is TapePhase.FORWARD:  # the function differentiates something itself
            return record.launch(Phase.FORWARD)[position].wait()
        self.advance(number)
        self._enter_up_to(record)
        flats = slot.get()
        if not record.bare:
            record.slot = None  # its saved views hold it again
        return flats[position]

    def _retake(self, record: Record) -> list[torch.Tensor]:
        """A unit used while backward runs: activation checkpointing computes a block again."""
        if record.opened < 0:
            raise OrderError(
                bad(
                    "unit",
                    f"{record.key[1]!r}, first used while backward runs",
                    "units that forward used",
                    "use the unit in forward too, so that every rank knows its place",
                )
            )
        self.advance(record.region_end)  # no further: of the region's units gradients are still to come
        self._enter_up_to(record)
        if record.held is not None:
            return record.held
        slot = record.slot_ref()
        if slot is None or not record.gathered:
            return [pending.wait() for pending in record.launch(Phase.BACKWARD)]
        return slot.get()

    def pause(self) -> None:
        """Walk to the end without having reduced anything: what other ranks gathered is gathered here too."""
        self.advance(0)

    def finish(self) -> ExecutionOrder:
        """Walk to the end and close; gives the sequence of units of the forward."""
        self.advance(0)
        self.close()
        return ExecutionOrder(tuple(self.sequence))

    def _forget_forward(self) -> None:
        self.holding.clear()
        self.region, self.region_records = None, []

    def drain(self) -> None:
        """Wait for gathers that nothing used."""
        for record in self.records.values():
            for pending in record.ahead or ():
                pending.wait()
            record.ahead = None

    def close(self) -> None:
        """Wait for everything launched and let go of it, at once: nothing here may wait for a garbage collection."""
        self.phase = TapePhase.CLOSED
        self.drain()
        for record in self.records.values():
            self._release(record)
            record.entry = None
        self.records.clear()
        self.registered.clear()
        self.entering.clear()
        self.leaving.clear()
        self._forget_forward()
        self.reduce_unit = _refuse  # whoever made the tape handed in its own method: a cycle
