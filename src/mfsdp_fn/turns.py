"""Threads that take turns: functions that wait for each other run in one process, one at a time, in a fixed order.

Turns pass only where a function waits for another, so a run is as deterministic as the functions are, and nothing
needs a lock. What a process has once and ranks have each, torch's random state, changes with the turn.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import OrderError, bad


class _Stopped(BaseException):
    """Unwinds a rank after another one has failed. Not an Exception: user code doesn't catch it by accident."""


def _closed() -> threading.Lock:
    """A lock that is waited for until another thread opens it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Rank(threading.Thread):
    """One function's thread. `waits_for` says what it waits for, and `ready` whether that has come."""

    def __init__(self, turns: Turns, number: int, call: Callable[[], Any], random: torch.Tensor) -> None:
        super().__init__(name=f"simulated rank {number}", daemon=True)
        self.turns, self.number, self.call, self.random = turns, number, call, random
        self.turn = _closed()
        self.ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] | None = None
        self.raising: BaseException | None = None  # what it cleans up after while it waits
        self.ended = False
        self.result: Any = None

    def run(self) -> None:
        """Take a turn when the first comes, and pass on the last."""
        self.turn.acquire()
        # One thread for its operators too: each thread that starts a parallel region gets a team of its own.
        torch.set_num_threads(1)
        try:
            if self.turns.failure is None:
                torch.set_rng_state(self.random)
                self.result = self.call()
        except _Stopped:
            pass
        except BaseException as error:
            self.turns.fail(error, f"Raised by simulated rank {self.number} of {len(self.turns.ranks)}.")
        self.ended = True
        self.turns.pass_on(self)


class Turns:
    """Runs functions in threads, one at a time."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self.failure: BaseException | None = None
        self.all_ended = _closed()

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all of them to their end; what they return. Once only.

        Raises:
            BaseException: the first one that a function raised, with a note that says which.
            OrderError: functions that wait for what no other will do.
        """
        random, threads = torch.get_rng_state(), torch.get_num_threads()
        self.ranks = [_Rank(self, number, call, random) for number, call in enumerate(calls)]
        for rank in self.ranks:
            rank.start()
        try:
            self.ranks[0].turn.release()
            self.all_ended.acquire()
            for rank in self.ranks:
                rank.join()
        except BaseException as error:  # an interrupt: whoever has the turn stops at its next wait
            self.failure = self.failure or error
            raise
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(random)
        results, self.ranks = [rank.result for rank in self.ranks], []
        if self.failure is not None:
            raise self.failure
        return results

    def current(self) -> int | None:
        """The number of the function that is calling; None outside all of them."""
        thread = threading.current_thread()
        return thread.number if isinstance(thread, _Rank) and thread.turns is self else None

    def fail(self, error: BaseException, note: str | None = None) -> None:
        """End the run: everyone who waits is stopped. The first failure counts."""
        if self.failure is None:
            if note is not None:
                error.add_note(note)
            self.failure = error

    def wait(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let the others run until `ready()`."""
        me = threading.current_thread()
        assert isinstance(me, _Rank)
        if not ready():
            me.ready, me.waits_for, me.raising = ready, waits_for, sys.exception()
            me.random = torch.get_rng_state()
            self.pass_on(me)
            if self.failure is None:  # else the caller's may have been put back
                torch.set_rng_state(me.random)
            me.ready = me.waits_for = me.raising = None
        self.stop_if_failed(ready)

    def stop_if_failed(self, ready: Callable[[], bool] = lambda: False) -> None:
        """Unwind the caller if the run has failed, unless what it waits for has come anyway."""
        if self.failure is not None and not ready():
            raise _Stopped

    def pass_on(self, me: _Rank) -> None:
        """Give the turn to the next that can go on, and wait for it to come back if `me` hasn't ended."""
        following = self._next(me)
        if following is None and not all(rank.ended for rank in self.ranks):
            self._fail_stuck()
            following = self._next(me)
        if following is me:
            return
        (self.all_ended if following is None else following.turn).release()
        if not me.ended:
            me.turn.acquire()

    def _next(self, me: _Rank) -> _Rank | None:
        order = self.ranks[me.number + 1 :] + self.ranks[: me.number + 1]
        for rank in order:
            if not rank.ended and (rank.ready is None or self.failure is not None or rank.ready()):
                return rank
        return None

    def _fail_stuck(self) -> None:
        """Nobody can go on: the fault is what a rank was raising when it got stuck, or else their order."""
        waiting = [rank for rank in self.ranks if not rank.ended]
        for rank in waiting:
            if rank.raising is not None:
                return self.fail(rank.raising, f"Raised by simulated rank {rank.number} of {len(self.ranks)}.")
        said = [f"rank {rank.number} waits for {rank.waits_for()}" for rank in waiting[:4] if rank.waits_for]
        said += [f"{len(waiting) - 4} more wait"] if len(waiting) > 4 else []
        ended = [rank.number for rank in self.ranks if rank.ended]
        said += [f"ranks {ended} have ended"] if ended else []
        error = bad(
            "fn",
            f"ranks that wait for each other: {'; '.join(said)}",
            "the same collectives in the same order on every rank",
            "gather every unit on every rank, whether it uses it or not",
        )
        self.fail(OrderError(error))


def on_a_rank() -> bool:
    """Whether the caller is a function that takes turns, of whatever run."""
    return isinstance(threading.current_thread(), _Rank)
