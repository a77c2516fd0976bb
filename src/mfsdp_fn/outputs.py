"""What a differentiated function returns: its loss or outputs checked, and values taken off the graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import optree
import torch

from .checks import shown
from .errors import StateError, bad
from .state import ShardState
from .tensor_parallel import local_of


def check_loss(result: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    """The loss and aux that a loss function returned.

    Raises:
        StateError: not a scalar of a floating-point dtype, or no aux where it is wanted.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise StateError(
            bad(
                "loss_fn",
                f"a function returning a {type(result).__name__}",
                "(loss, aux)",
                "return both, or leave out has_aux=True",
            )
        )
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        got = f"a scalar of {loss.dtype}" if isinstance(loss, torch.Tensor) and loss.numel() == 1 else got
        raise StateError(
            bad(
                "loss_fn",
                f"a function returning {got}",
                "a scalar tensor of floats",
                "reduce the loss, or pass has_aux=True if it returns (loss, aux)",
            )
        )
    return loss, aux


def check_cotangents(outputs: list[Any], cotangents: dict[int, Any]) -> None:
    """Refuse cotangents that don't fit what they are of.

    Raises:
        StateError: naming `cotangent`.
    """
    for number, output in enumerate(outputs):
        cotangent = cotangents.get(number)
        if not isinstance(output, torch.Tensor) or cotangent is None:
            continue
        if (
            not isinstance(cotangent, torch.Tensor)
            or cotangent.shape != output.shape
            or (cotangent.is_complex() and not output.is_complex())
        ):
            got = f"shape {tuple(cotangent.shape)}" if isinstance(cotangent, torch.Tensor) else shown(cotangent)
            got += f", {cotangent.dtype}" if isinstance(cotangent, torch.Tensor) and cotangent.is_complex() else ""
            raise StateError(
                bad(
                    "cotangent",
                    got,
                    f"a tensor of shape {tuple(output.shape)}, or None for zero",
                    "give one in the structure of `out`",
                )
            )


def check_outputs(leaves: list[Any]) -> None:
    """Refuse outputs that a cotangent could not be given for.

    Raises:
        StateError: an object that no pytree library takes apart, with tensors of the graph in it.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and _holds_graph(leaf):
            raise StateError(
                bad(
                    "fn",
                    f"a function that returns {shown(leaf)}, with tensors that require grad in it",
                    "tensors in containers that optree knows",
                    "return them in a dict, list or tuple, or register the class with optree",
                )
            )


def detached(value: Any, states: Sequence[ShardState]) -> Any:
    """`value` with its tensors detached, those in dataclasses and in subclasses of dict too, which are copied.

    Weights that had not to be gathered are views of the states' own buffers, which a later donated step writes to: such
    tensors are copied.
    """
    buffers = [buffer for state in states for buffer in (*state.main, *state.compute) if buffer is not None]
    return _detached(value, {address for buffer in buffers if (address := _address(buffer))})


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 for a tensor without elements, or of another layout or class than views of buffers have."""
    local = local_of(tensor)
    if type(local) is not torch.Tensor or local.layout is not torch.strided:
        return 0  # a class that wraps tensors has no memory of its own, and raises when asked for it
    return local.untyped_storage().data_ptr()


def _detached(value: Any, states: set[int]) -> Any:
    return optree.tree_map(lambda leaf: _detached_leaf(leaf, states), value, none_is_leaf=True)


def _detached_leaf(leaf: Any, states: set[int]) -> Any:
    if isinstance(leaf, torch.Tensor):
        found = leaf.detach()
        return found.clone() if _address(found) in states else found
    if not _holds_graph(leaf):
        return leaf
    copied = copy.copy(leaf)
    if isinstance(leaf, dict):
        for key, item in leaf.items():
            copied[key] = _detached(item, states)
    for name, part in _fields(leaf).items():  # an object may be both
        object.__setattr__(copied, name, _detached(part, states))  # frozen ones too
    return copied


def _fields(leaf: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return {}
    return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)}


def _holds_graph(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.requires_grad
    values = [*_fields(leaf).values(), *(leaf.values() if isinstance(leaf, dict) else ())]
    return any(_holds_graph(part) for value in values for part in optree.tree_leaves(value))
