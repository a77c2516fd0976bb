"""What one forward remembers so that its backward issues the same collectives in the same order on every rank.

Forward gathers a unit when it is used and the next one ahead of its use. Backward gathers the units again in
reverse. Order is the difficulty: autograd runs only what this rank's loss depends on, and two ranks may depend on
different units. So forward numbers everything that happens (`_tick`), and backward walks that numbering downwards:
each unit is *entered* (its weights gathered) at the number of its last saved view and *left* (its gradients
reduced) at the number of its first use. Autograd runs nodes latest first, so when a node numbered n asks for
weights, everything numbered above n that will ever run has run: those units are left first, with zeros where no
gradient came. The walk is a function of the sequence of `unshard` calls alone, which is the same on every rank.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .buffer import PendingGather, launch_gather
from .errors import OrderError, StateError, bad
from .runtime import ExecutionOrder, Phase, PrefetchOrder
from .spec import GroupSpec
from .state import ShardState, UnitState, check_alive
from .transforms import weights_of


class Slot:
    """The gathered buffers of one unit in backward.

    Saved views hold it, and nothing else does unless a use saved none: when the last saved view dies, so do the
    buffers.
    """

    __slots__ = ("__weakref__", "flats", "pendings")

    def __init__(self) -> None:
        self.pendings: Sequence[PendingGather] | None = None
        self.flats: list[torch.Tensor] | None = None

    def get(self) -> list[torch.Tensor]:
        """The buffers, waited for once."""
        if self.flats is None:
            assert self.pendings is not None
            self.flats = [pending.wait() for pending in self.pendings]
            self.pendings = None
        return self.flats


class Record:
    """One unit of one state in one call."""

    def __init__(self, key: tuple[int, str], unit: UnitState) -> None:
        spec = unit.spec
        self.key = key
        self.unit = unit
        self.numbers = spec.unit_groups(unit.unit)
        self.groups: tuple[GroupSpec, ...] = tuple(spec.groups[number] for number in self.numbers)
        self.gathered = any(group.gathers and group.layout.size for group in self.groups)
        self.kept = unit.unit in spec.kept_units
        self.trainable = any(group.requires_grad for group in self.groups)
        self.elements = sum(group.layout.size for group in self.groups)
        self.ahead: list[PendingGather] | None = None  # launched in forward, not used yet
        self.opened = -1  # number of the first use
        self.last = -1  # number of the last use or saved view
        self.bare = False  # some use saved no view: nothing but the tape can hold the slot
        self.entry: Any = None  # the autograd node through which all its gradients leave
        self.slot: Slot | None = Slot()
        self.slot_ref = weakref.ref(self.slot)
        self.launched = False  # in backward
        self.entered = False
        self.left = False
        self.unclaimed: list[PendingGather] | None = None

    def launch(self) -> list[PendingGather]:
        """Launch the gathers of every group."""
        unit = self.unit
        return [
            launch_gather(weights_of(group, main, compute), group.gathers)
            for group, main, compute in zip(self.groups, unit.main, unit.compute, strict=True)
        ]


class TapePhase(enum.Enum):
    """Where a call is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CLOSED = "closed"


class Tape:
    """One call's sequence of units: launches gathers ahead, and walks backward in one order on every rank."""

    def __init__(
        self,
        states: Sequence[ShardState],
        reduce_unit: Callable[[tuple[int, str]], None],
        recorded: ExecutionOrder | None,
    ) -> None:
        self.phase = TapePhase.FORWARD
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
        self.events: list[tuple[int, bool, Record]] = []
        self.position = 0
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
        if self.phase is TapePhase.FORWARD and record.gathered and record.ahead is None:
            record.ahead = record.launch()

    def take(self, record: Record) -> list[torch.Tensor]:
        """The gathered buffers of a unit that is used now; launches what comes next."""
        if self.phase is TapePhase.BACKWARD:
            return self._retake(record)
        self._check_replay(record)
        self.sequence.append(record.key)
        pendings = record.ahead or record.launch()
        record.ahead = None
        flats = [pending.wait() for pending in pendings]
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
            if not other.gathered or other.key in used:
                if self.replays and other.gathered:
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

    def note_use(self, record: Record) -> None:
        """Number a use that gradients can flow through."""
        if record.opened < 0:
            record.opened = self.tick()
        record.last = self.tick()

    def note_saved(self, record: Record) -> int:
        """Number a saved view."""
        record.last = self.tick()
        return record.last

    # Backward

    def begin_backward(self) -> None:
        """Forward is over: fix the walk."""
        self.drain()
        self.phase = TapePhase.BACKWARD
        for record in self.records.values():
            if record.opened < 0:
                continue
            self.events.append((record.last, True, record))
            self.events.append((record.opened, False, record))
            if not record.bare:
                record.slot = None  # its saved views hold it from here on
        self.events.sort(key=lambda event: -event[0])

    def advance(self, number: int) -> None:
        """Walk down to `number`, inclusive."""
        while self.position < len(self.events) and self.events[self.position][0] >= number:
            _, entering, record = self.events[self.position]
            self.position += 1
            if entering:
                self._enter(record)
            else:
                self._leave(record)

    def _enter(self, record: Record) -> None:
        record.entered = True
        self._relaunch(record)
        budget, ahead = self.runtime.backward_prefetch, 0
        for _, entering, other in self.events[self.position :]:
            if not entering or not other.gathered or other.kept:
                continue
            ahead += other.elements
            if budget is not None and ahead > budget:
                return
            self._relaunch(other)
            if budget is None:
                return

    def _relaunch(self, record: Record) -> None:
        """Gather for backward, whether or not this rank needs it: other ranks may."""
        if record.launched or not record.gathered or record.kept:
            return
        record.launched = True
        pendings, slot = record.launch(), record.slot_ref()
        if slot is None:
            record.unclaimed = pendings
        else:
            slot.pendings = pendings

    def _leave(self, record: Record) -> None:
        record.left = True
        self._release(record)
        if record.trainable:
            self.reduce_unit(record.key)

    def _release(self, record: Record) -> None:
        slot, record.slot = record.slot_ref(), None
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
        self.advance(record.opened)

    def weights(self, record: Record, slot: Slot, number: int, position: int) -> torch.Tensor:
        """A gathered buffer that a view saved at `number` belongs to."""
        if self.phase is TapePhase.FORWARD:  # the function differentiates something itself
            return record.launch()[position].wait()
        self.advance(number)
        return slot.get()[position]

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
        self.advance(record.last)
        slot = record.slot_ref()
        if slot is None or not record.gathered or record.kept:
            return [pending.wait() for pending in record.launch()]
        return slot.get()

    def finish(self) -> ExecutionOrder:
        """Walk to the end and close; gives the sequence of units of the forward."""
        self.advance(0)
        self.close()
        return ExecutionOrder(tuple(self.sequence))

    def drain(self) -> None:
        """Wait for gathers that nothing used."""
        for record in self.records.values():
            for pending in record.ahead or ():
                pending.wait()
            record.ahead = None

    def close(self) -> None:
        """Wait for everything launched and let go of it."""
        self.phase = TapePhase.CLOSED
        self.drain()
        for record in self.records.values():
            self._release(record)
            record.entry = None


__all__ = ["Phase", "Record", "Slot", "Tape", "TapePhase"]
