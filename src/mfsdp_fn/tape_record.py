"""What the tape knows of a call, and of one unit in it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .buffer import PendingGather
from .group import GroupSpec
from .model_weights import gather_weights
from .runtime import Phase
from .state import UnitState


class TapePhase(enum.Enum):
    """Where a call is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CLOSED = "closed"


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
        self.held: list[torch.Tensor] | None = None  # of a kept unit, from its first use until it is left
        self.opened = -1  # number of the first use
        self.last = -1  # number of the last use
        self.reach = -1  # number of the last use of any unit at which this one's weights were still held or needed
        self.region_end = -1  # number of the last use of any unit in the checkpointed region that used this one last
        self.bare = False  # some use saved no view: nothing but the tape can hold the slot
        self.entry: Any = None  # the autograd node through which all its gradients leave
        self.slot: Slot | None = Slot()
        self.slot_ref = weakref.ref(self.slot)
        self.launched = False  # in backward
        self.left = False
        self.unclaimed: list[PendingGather] | None = None

    def launch(self, phase: Phase) -> list[PendingGather]:
        """Launch the gathers of every group."""
        unit = self.unit
        return [
            gather_weights(group, main, compute, group.wire_gathers, phase.value)
            for group, main, compute in zip(self.groups, unit.main, unit.compute, strict=True)
        ]

    def rest(self) -> None:
        """Let go of what backward gathered until another backward gathers it again; kept weights stay."""
        slot = self.slot_ref()
        if slot is not None:
            if slot.pendings is not None:
                slot.get()
            slot.flats = None
        if not self.bare:
            self.slot = None
