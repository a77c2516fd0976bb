"""Launched reductions of one call: how many may be in flight, and one wait for all of them at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .group import GroupSpec
from .reduction import PendingReduction
from .runtime import RuntimePolicy

Pendings = list[tuple[int, GroupSpec, PendingReduction]]


class Flight:
    """Reductions that were launched together, and what becomes of their results."""

    def __init__(self, pendings: Pendings, then: Callable[[Pendings], None]) -> None:
        self.pendings, self.then = pendings, then

    def settle(self) -> None:
        """Free the inputs."""
        self.pendings = [(number, group, pending.settle()) for number, group, pending in self.pendings]

    def finish(self) -> None:
        """Wait for them, launch what depends on them, and hand the results on."""
        self.settle()  # what is launched next must not find the inputs still alive
        self.then(self.pendings)


class Flights:
    """What one call has in flight, over all of its states, oldest first.

    Outer reductions have a queue of their own: what they send are shards, and their communicators are others, so that
    they need not make the reductions of the next units wait.
    """

    def __init__(self, runtime: RuntimePolicy) -> None:
        self.most = runtime.max_inflight_reductions
        self.beside = runtime.overlap_outer_communication
        self.inner: deque[Flight] = deque()
        self.outer: deque[Flight] = deque()

    def settle_for_one_more(self) -> None:
        """Free inputs so that one more may be packed. Launches nothing: ranks call this at times of their own."""
        surplus = len(self.inner) + 1 - self.most
        for old in list(self.inner)[: max(surplus, 0)]:
            old.settle()

    def make_room(self) -> None:
        """Finish what is oldest so that one more may be launched."""
        while len(self.inner) >= self.most:
            self.inner.popleft().finish()

    def launch_outer(self, launch: Callable[[], Flight]) -> None:
        """Launch an outer reduction; what follows is launched beside it, or after it."""
        while len(self.outer) >= self.most:
            self.outer.popleft().finish()
        flight = launch()
        if self.beside:
            self.outer.append(flight)
        else:
            flight.finish()

    def drain(self) -> None:
        """Wait for everything launched, and for what that launches."""
        while self.inner or self.outer:
            (self.inner or self.outer).popleft().finish()
