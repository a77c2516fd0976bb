"""Where one backward's gradients go: packed, reduced a few at a time, added to what was accumulated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from . import reduction
from .errors import StateError, bad
from .spec import GroupSpec
from .state import ShardState, Stage, check_state
from .state import donate as mark_donated


class GradientSink:
    """Gradients of one `ShardState` in one backward.

    `collect` packs what autograd delivers, `issue` launches a unit's reductions, `finish` gives the result. At most
    `max_inflight_reductions` units' packed inputs are alive beside the one being packed into.
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
        self.inflight: deque[Callable[[], None]] = deque()

    def collect(self, number: int, grads: Mapping[int, torch.Tensor | None]) -> None:
        """Pack a group's gradients from one use of it, or add them to those of its other uses."""
        group = self.spec.groups[number]
        if number in self.packed:
            reduction.pack(group, grads, into=self.packed[number])
            return
        while len(self.inflight) >= self.spec.runtime.max_inflight_reductions:
            self.inflight.popleft()()
        start = self._start(number)
        self.packed[number] = reduction.pack(group, grads, into=None if group.grad_scatters else start)

    def _start(self, number: int) -> torch.Tensor | None:
        """The accumulator to add to: the caller's own if it was donated."""
        if self.base is None:
            return None
        buffer = self.base.main[number]
        return buffer if self.donate or self.spec.groups[number].grad_scatters else buffer.clone()

    def issue(self, unit: str) -> None:
        """Launch the reductions of a unit; what was not collected is zero. Same order on every rank."""
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
            if all(pending.first is None for _, _, pending in pendings):
                self._accumulate(pendings)
            else:
                self.inflight.append(lambda: self._accumulate(pendings))

    def _accumulate(self, pendings: list[tuple[int, GroupSpec, reduction.PendingReduction]]) -> None:
        for number, group, pending in pendings:
            start = self._start(number) if group.grad_scatters else None  # else packed into it already
            total = reduction.accumulate(group, pending, start, in_place=self.donate)
            if self.last and group.defers:
                self._defer(number, group, total)
            else:
                self.results[number] = total

    def _defer(self, number: int, group: GroupSpec, total: torch.Tensor) -> None:
        pending = reduction.launch_deferred(group, total)

        def finish() -> None:
            self.results[number] = reduction.finish_deferred(group, pending)

        self.inflight.append(finish)

    def drain(self) -> None:
        """Wait for everything launched."""
        while self.inflight:
            self.inflight.popleft()()

    def finish(self) -> ShardState:
        """The gradients; groups that no unit delivered are what was accumulated, or zero."""
        for number in reversed(range(len(self.spec.groups))):
            group = self.spec.groups[number]
            if number in self.results or not group.requires_grad:
                continue
            if self.base is not None and number not in self.issued:
                start = self.base.main[number]
                if self.last and group.defers:
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
            size = held.stop - held.start if group.requires_grad else 0
            main.append(torch.zeros(size, dtype=group.dtypes.grad, device=self.spec.device))
        if self.add_after is not None:
            main = [old + new for old, new in zip(self.add_after.main, main, strict=True)]
        if self.donate and self.given is not None:
            mark_donated("value_and_grad", self.given)
        stage = Stage.FINAL if final else Stage.ACCUMULATING
        return ShardState(main=tuple(main), compute=(None,) * len(main), spec=self.spec, stage=stage)
