"""Pointing a copy of a module at copies of its parts: what else in it refers to submodules and parameters.

Registered submodules and parameters are easy. But a module's other attributes and hooks may refer to them too: a list
of layers, a bound method, a closure, a parameter kept in a tuple so that it is not registered twice. Each would run the
original, with its old weights, in silence.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import StateError, bad

# Containers that are rebuilt; dict and its kinds by their items, the others from an iterable.
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_TRANSPARENT = (*_SEQUENCES, dict, functools.partial, types.MethodType, types.FunctionType)
_DEPTH = 2  # how deep to look into objects of other kinds
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)


class Rewiring:
    """Replaces submodules by their copies, and parameters by what `parameter` makes of them, inside any value."""

    def __init__(self, copies: Mapping[int, nn.Module], leaf_of: Mapping[int, int]) -> None:
        self.copies = copies
        self.leaf_of = leaf_of
        self.clean: set[int] = set()  # ids of values with nothing in them, such as a config that every module has

    def holds_parameters(self, value: Any) -> bool:
        """Whether a parameter of the module is somewhere inside `value`."""
        return self.holds_any(value) and self._finds(value, lambda item: id(item) in self.leaf_of, set(), _DEPTH)

    def holds_any(self, value: Any) -> bool:
        """Whether a submodule or parameter of the module is somewhere inside `value`."""
        return self._finds(value, lambda item: id(item) in self.leaf_of or id(item) in self.copies, self.clean, _DEPTH)

    def _finds(self, value: Any, wanted: Callable[[Any], bool], clean: set[int], depth: int) -> bool:
        if isinstance(value, _PLAIN) or id(value) in clean:
            return False
        if wanted(value):
            return True
        if isinstance(value, (nn.Module, torch.Tensor)):
            return False
        clean.add(id(value))  # while it is looked into, too: values may refer to themselves
        depth -= not isinstance(value, _TRANSPARENT)
        found = depth >= 0 and any(self._finds(part, wanted, clean, depth) for part in _parts(value))
        if found:
            clean.discard(id(value))
        return found

    def apply(self, value: Any, where: str, parameter: Callable[[int], Any]) -> Any:
        """`value` with everything replaced; the value itself if nothing in it needs to be.

        Raises:
            StateError: an object of another kind that refers to a part of the module.
        """
        if id(value) in self.leaf_of:
            return parameter(self.leaf_of[id(value)])
        if id(value) in self.copies:
            return self.copies[id(value)]
        if not self.holds_any(value):
            return value

        def again(part: Any) -> Any:
            return self.apply(part, where, parameter)

        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, again(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(again(value.func), *map(again, value.args), **_items(value.keywords, again))
        if isinstance(value, types.FunctionType):
            cells = tuple(types.CellType(again(cell.cell_contents)) for cell in value.__closure__ or ())
            copy = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
            copy.__kwdefaults__ = value.__kwdefaults__
            return copy
        if isinstance(value, dict):
            copy = value.copy()  # keeps the kind: OrderedDict, defaultdict
            copy.update(_items(value, again))
            return copy
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(again, value))
        if type(value) in _SEQUENCES:
            return type(value)(map(again, value))
        raise StateError(
            bad(
                "module",
                f"a {type(value).__name__} at {where!r} that refers to a submodule or parameter",
                "references in attributes, containers, methods, partials or closures",
                "keep such an object outside the module, or register what it refers to",
            )
        )


def _items(mapping: Mapping[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]:
    return {key: change(item) for key, item in mapping.items()}


def _parts(value: Any) -> list[Any]:
    """What a value is made of, as far as a reference could hide there."""
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (*_SEQUENCES,)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is not bound yet
        return False
