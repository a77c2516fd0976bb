"""Where one backward's gradients go: packed, reduced a few at a time, added to what was accumulated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from . import reduction
from .errors import StateError, bad
from .group import GroupSpec
from .state import NOTHING, ShardState, Stage, check_state
from .state import donate as mark_donated

Pendings = list[tuple[int, GroupSpec, reduction.PendingReduction]]


class _InFlight:
    """Launched reductions, and what becomes of their results."""

    def __init__(self, pendings: Pendings, then: Callable[[Pendings], None]) -> None:
        self.pendings, self.then = pendings, then

    def settle(self) -> None:
        """Free the inputs."""
        self.pendings = [(number, group, pending.settle()) for number, group, pending in self.pendings]

    def finish(self) -> None:
        """Wait for them, launch what depends on them, and hand the results on."""
        self.settle()  # what is launched next must not find the inputs still alive
        self.then(self.pendings)


class GradientSink:
    """Gradients of one `ShardState` in one backward.

    `collect` packs what autograd delivers, `issue` launches a unit's reductions, `finish` gives the result. At most
    `max_inflight_reductions` units' packed inputs are alive, the one being packed into counted. `collect` is called
    when this rank's gradients come, so it launches nothing; `issue` is called in one order on every rank, and so
    everything is launched from there.
    """

    def __init__(
        self, state: ShardState, accumulate: ShardState | None, *, is_last_microbatch: bool, donate: bool
    ) -> None:
        self.spec = state.spec
        self.last = is_last_microbatch
        self.defers = any(group.defers for group in self.spec.groups)
        self.add_after: ShardState | None = None
        self.donate = donate
        self.given = accumulate
        base = accumulate
        if accumulate is not None:
            check_state(accumulate, "accumulate", self.spec)
            if accumulate.stage is Stage.FINAL and self.defers:
                if not is_last_microbatch:
                    raise StateError(
                        bad(
                            "accumulate",
                            "finished gradients",
                            "gradients that still accumulate",
                            "pass is_last_microbatch=False for every microbatch but the last",
                        )
                    )
                self.add_after, base = accumulate, None  # finish the new ones alone, then add
        self.base = base
        self.packed: dict[int, torch.Tensor] = {}
        self.results: dict[int, torch.Tensor] = {}
        self.issued: set[int] = set()
        self.inflight: deque[_InFlight] = deque()

    def collect(self, number: int, grads: Mapping[int, torch.Tensor | None]) -> None:
        """Pack a group's gradients from one use of it, or add them to those of its other uses."""
        group = self.spec.groups[number]
        if number in self.packed:
            reduction.pack(group, grads, into=self.packed[number])
            return
        surplus = len(self.inflight) + 1 - self.spec.runtime.max_inflight_reductions
        for old in list(self.inflight)[: max(surplus, 0)]:
            old.settle()
        start = self._start(number)
        self.packed[number] = reduction.pack(group, grads, into=None if group.grad_scatters else start)

    def _start(self, number: int) -> torch.Tensor | None:
        """The accumulator to add to: the caller's own if it was donated."""
        if self.base is None:
            return None
        buffer = self.base.main[number]
        if self.donate:
            mark_donated("value_and_grad", self.base)  # from now on it may hold half of a sum
        return buffer if self.donate or self.spec.groups[number].grad_scatters else buffer.clone()

    def issue(self, unit: str) -> None:
        """Launch the reductions of a unit; what was not collected is zero. Same order on every rank."""
        self._make_room()
        numbers = [n for n in self.spec.unit_groups(unit) if self.spec.groups[n].requires_grad]
        for number in numbers:
            if number not in self.packed:
                self.collect(number, {})
        self.issued.update(numbers)
        pendings = []
        for number in numbers:
            group, packed = self.spec.groups[number], self.packed.pop(number)
            if group.grad_scatters or not (self.last and group.defers):
                pendings.append((number, group, reduction.launch(group, packed)))
            else:
                self._defer(number, group, packed)
        if pendings:
            flight = _InFlight(pendings, self._accumulate)
            if all(pending.first is None for _, _, pending in pendings):
                flight.finish()
            else:
                self.inflight.append(flight)

    def _make_room(self) -> None:
        while len(self.inflight) >= self.spec.runtime.max_inflight_reductions:
            self.inflight.popleft().finish()

    def _accumulate(self, pendings: Pendings) -> None:
        for number, group, pending in pendings:
            start = self._start(number) if group.grad_scatters else None  # else packed into it already
            total = reduction.accumulate(group, pending, start, in_place=self.donate)
            if self.last and group.defers:
                self._defer(number, group, total)
            else:
                self.results[number] = total

    def _defer(self, number: int, group: GroupSpec, total: torch.Tensor) -> None:
        self.inflight.append(_InFlight([(number, group, reduction.launch_deferred(group, total))], self._finish))

    def _finish(self, pendings: Pendings) -> None:
        for number, group, pending in pendings:
            self.results[number] = reduction.finish_deferred(group, pending)

    def drain(self) -> None:
        """Wait for everything launched."""
        while self.inflight:
            self.inflight.popleft().finish()

    def finish(self) -> ShardState:
        """The gradients; groups that no unit delivered are what was accumulated, or zero."""
        for number in reversed(range(len(self.spec.groups))):
            group = self.spec.groups[number]
            if number in self.results or not group.requires_grad:
                continue
            if self.base is not None and number not in self.issued:
                start = self.base.main[number]
                if self.last and group.defers:
                    self._make_room()
                    self._defer(number, group, start)
                else:
                    self.results[number] = start if self.donate else start.clone()
        self.drain()
        final = self.last or not self.defers
        main = []
        for number, group in enumerate(self.spec.groups):
            if number in self.results:
                main.append(self.results[number])
                continue
            held = group.main_range if final else group.grad_range
            shape = (held.stop - held.start,) if group.requires_grad else NOTHING
            main.append(torch.zeros(shape, dtype=group.dtypes.grad, device=self.spec.device))
        if self.add_after is not None:
            main = [old + new for old, new in zip(self.add_after.main, main, strict=True)]
        if self.donate and self.given is not None:
            mark_donated("value_and_grad", self.given)
        stage = Stage.FINAL if final else Stage.ACCUMULATING
        return ShardState(main=tuple(main), compute=(None,) * len(main), spec=self.spec, stage=stage)
