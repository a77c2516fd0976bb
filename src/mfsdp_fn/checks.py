"""Refusals that many functions share: what isn't a flag, a function, a dict; and how a wrong value is shown."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from .errors import MfsdpError, bad

_SHOWN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.Size)


def shown(value: object) -> str:
    """A value as an error tells it: small ones as written, others by their type, as a tensor's repr is its contents.

    >>> shown(3), shown([1, 2]), shown(torch.zeros(2, 3))
    ('3', '[1, 2]', 'a torch.float32 tensor of shape (2, 3)')
    """
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, _SHOWN):
        return repr(value)
    if isinstance(value, (tuple, list)) and len(value) <= 8 and all(isinstance(item, _SHOWN) for item in value):
        return repr(value)
    return f"a {type(value).__name__}"


def check_flag(argument: str, value: object) -> None:
    """Refuse what isn't True or False.

    Raises:
        MfsdpError: naming the argument.
    """
    if not isinstance(value, bool):
        raise MfsdpError(bad(argument, shown(value), "True or False", "mend the value or leave it out"))


def check_function(argument: str, value: object, example: str, error: type[MfsdpError] = MfsdpError) -> None:
    """Refuse what can't be called.

    Raises:
        MfsdpError: or `error`, naming the argument.
    """
    if not callable(value):
        raise error(bad(argument, shown(value), "a function", f"write {example}"))


def check_mapping(argument: str, value: object, expected: str, fix: str, error: type[MfsdpError] = MfsdpError) -> None:
    """Refuse what isn't a dict.

    Raises:
        MfsdpError: or `error`, naming the argument.
    """
    if not isinstance(value, Mapping):
        raise error(bad(argument, shown(value), expected, fix))


def is_integer(value: object) -> bool:
    """Whether it counts something: True is an int and doesn't."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_number(value: object) -> float:
    """A real number, also one of another library, as Python's; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    return value if isinstance(value, (int, float)) else float(value)


def is_finite(value: object) -> bool:
    """Whether it is a finite real number, and no tensor: its value would cost a sync."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_number(argument: str, value: Any, *, below: float = float("inf")) -> None:
    """Refuse what isn't a number in [0, `below`).

    Raises:
        MfsdpError: naming the argument.
    """
    if not is_finite(value) or not 0 <= value < below:
        wanted = "a finite number >= 0" if below == float("inf") else f"a number in [0, {below:g})"
        raise MfsdpError(bad(argument, shown(value), wanted, "mend the value or leave it out"))
