"""Errors. Everything that is wrong with an argument is a `ValueError`, raised before any communication."""

from __future__ import annotations


class MfsdpError(ValueError):
    """Base of every error this library raises about its arguments."""


class LayoutError(MfsdpError):
    """A layout can't be built from, or asked for, what was given."""


class PlanError(MfsdpError):
    """A plan can't be made, or ranks don't agree about it."""


class StateError(MfsdpError):
    """A state doesn't fit the spec, the other states, or the moment at which it is used."""


class DonatedError(StateError):
    """A state was used after a function with ``donate=True`` had taken its buffers."""


class OrderError(MfsdpError):
    """Collectives would be issued in an order that ranks can't agree on."""


class SimulationError(MfsdpError):
    """Simulated ranks can't do this as real ones would."""


def bad(argument: str, got: object, expected: str, fix: str) -> str:
    """The text of an argument error: which argument, what it got, what was expected, how to mend it.

    >>> bad("block_size", 0, "a positive integer", "leave it out for single rows")
    '`block_size` got 0; expected a positive integer; leave it out for single rows.'
    """
    return f"`{argument}` got {got}; expected {expected}; {fix}."
