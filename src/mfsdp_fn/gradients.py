"""Where one backward's gradients go: packed, reduced a few at a time, added to what was accumulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from . import reduction
from .errors import StateError, bad
from .flights import Flight, Flights, Pendings
from .group import GroupSpec
from .state import NOTHING, ShardState, Stage, check_state
from .state import donate as mark_donated


class GradientSink:
    """Gradients of one `ShardState` in one backward.

    `collect` packs what autograd delivers, `issue` launches a unit's reductions, `finish_all` gives the results of all
    states of a call. At most `max_inflight_reductions` units' packed inputs are alive, the one being packed into
    counted. `collect` is called when this rank's gradients come, so it launches nothing; `issue` is called in one
    order on every rank, and so everything is launched from there.
    """

    def __init__(
        self,
        state: ShardState,
        accumulate: ShardState | None,
        flights: Flights,
        *,
        is_last_microbatch: bool,
        donate: bool,
    ) -> None:
        self.spec = state.spec
        self.flights = flights
        managed = self.spec.runtime.caller_managed_grad_sync
        self.last = is_last_microbatch and not managed
        self.defers = any(group.defers for group in self.spec.groups)
        self.add_after: ShardState | None = None
        self.donate = donate
        self.given = accumulate
        base = accumulate
        if accumulate is not None:
            check_state(accumulate, "accumulate", self.spec)
            if any(compute is not None for compute in accumulate.compute):
                raise StateError(
                    bad("accumulate", "a state of weights", "gradients", "pass the gradients of earlier microbatches")
                )
            if accumulate.stage is Stage.FINAL and self.defers:
                if not self.last:
                    raise StateError(
                        bad(
                            "accumulate",
                            "finished gradients",
                            "gradients that still accumulate",
                            "call finish_grad_sync after the last microbatch, since RuntimePolicy leaves it to you"
                            if managed
                            else "pass is_last_microbatch=False for every microbatch but the last",
                        )
                    )
                self.add_after, base = accumulate, None  # finish the new ones alone, then add
        self.base = base
        self.packed: dict[int, torch.Tensor] = {}
        self.results: dict[int, torch.Tensor] = {}
        self.issued: set[int] = set()

    def collect(self, number: int, grads: Mapping[int, torch.Tensor | None]) -> None:
        """Pack a group's gradients from one use of it, or add them to those of its other uses."""
        group = self.spec.groups[number]
        if number in self.packed:
            reduction.pack(group, grads, into=self.packed[number])
            return
        self.flights.settle_for_one_more()
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
        self.flights.make_room()
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
            flight = Flight(pendings, self._accumulate)
            if all(pending.first is None for _, _, pending in pendings):
                flight.finish()
            else:
                self.flights.inner.append(flight)

    def _accumulate(self, pendings: Pendings) -> None:
        for number, group, pending in pendings:
            start = self._start(number) if group.grad_scatters else None  # else packed into it already
            total = reduction.accumulate(group, pending, start, in_place=self.donate)
            if self.last and group.defers:
                self._defer(number, group, total)
            else:
                self.results[number] = total

    def _defer(self, number: int, group: GroupSpec, total: torch.Tensor) -> None:
        def launch() -> Flight:
            return Flight([(number, group, reduction.launch_deferred(group, total))], self._finish)

        if group.grad_scatters:
            self.flights.launch_outer(launch)
        else:
            self.flights.inner.append(launch())

    def _finish(self, pendings: Pendings) -> None:
        for number, group, pending in pendings:
            self.results[number] = reduction.finish_deferred(group, pending)

    def launch_rest(self) -> None:
        """What no unit delivered is what was accumulated: finish it too, if this is the last microbatch."""
        for number in reversed(range(len(self.spec.groups))):
            group = self.spec.groups[number]
            if number in self.issued or not group.requires_grad or self.base is None:
                continue
            start = self.base.main[number]
            if self.last and group.defers:
                self.flights.make_room()
                self._defer(number, group, start)
            else:
                self.results[number] = start if self.donate else start.clone()

    def result(self) -> ShardState:
        """The gradients, everything waited for; groups without any are zero."""
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


def finish_all(sinks: Sequence[GradientSink]) -> list[ShardState]:
    """The gradients of all states of a call: everything is launched before the one wait at its end."""
    try:
        for sink in sinks:
            sink.launch_rest()
    finally:
        for sink in sinks:
            sink.flights.drain()
    return [sink.result() for sink in sinks]
